"""The model of an evaluation and the cells that it is judged on: those that it was not trained on."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from cellmill.config.evaluate import Evaluate
from cellmill.data.counts_reader import CountsReader
from cellmill.data.manifest import Manifest
from cellmill.errors import DataError
from cellmill.evaluate.embed import load_for_inference
from cellmill.evaluate.task import EvaluatedModel
from cellmill.evaluate.training_cells import TrainedContents, held_out, seen_cells


class TrainedCells:
    """Training and validation cells of corpora: those of the model, and of the ones that it started from."""

    def __init__(self, manifests: Sequence[Manifest], datasets: Iterable[str]) -> None:
        self._seen, self._contents = seen_cells(manifests, datasets), TrainedContents(manifests)

    def in_corpus(self, dataset: str) -> bool:
        """True if cells of the dataset are among them by name."""
        return bool(self._seen[dataset])

    def unseen(self, dataset: str, reader: CountsReader) -> tuple[np.ndarray, int]:
        """Mask, bool `(n_obs,)`, of the cells of a dataset that are not among them, and the number of equal ones.

        Cells that are equal to trained cells of other names are not unseen; their number is printed.
        """
        unnamed = held_out(reader.obs.index, self._seen[dataset])
        unseen = unnamed & ~self._contents.copies(reader, unnamed)
        n = int((unnamed & ~unseen).sum())
        if n:
            told = f"{n:,} cells are equal to training or validation cells of other names: not held out"
            print(f"{dataset}: {told}", flush=True)
        return unseen, n


def scored_cells(reader: CountsReader, unseen: np.ndarray, options: Evaluate) -> np.ndarray:
    """Mask, bool `(n_obs,)`, of the cells that `options.cells` chooses. Raises DataError if none is held out."""
    if options.cells == "all":
        return np.ones(reader.n_obs, dtype=bool)
    if not unseen.any():
        raise DataError(
            f"{reader.path}: no held-out cells: all {reader.n_obs:,} were trained or validated on; "
            "raise shard.test_frac, or set evaluate.cells to all"
        )
    return unseen


def load_evaluated(model: Path, manifest: Path, shards: Manifest, seed: int) -> EvaluatedModel:
    """The exported model in the folder `model`. Raises DataError if its vocabulary is not that of the shards."""
    network, vocabulary, tokens, config = load_for_inference(model)
    if vocabulary.digest != shards.vocabulary["digest"]:
        raise DataError(
            f"{manifest}: its vocabulary is {shards.vocabulary['digest'][:12]}, the model's {vocabulary.digest[:12]}; "
            "pass the manifest of the shards that the model was trained on"
        )
    return EvaluatedModel(network, config, vocabulary, tokens, shards, seed)
