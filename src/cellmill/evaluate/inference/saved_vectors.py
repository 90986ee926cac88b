"""Vectors of the cells that a killed process has embedded, which are not computed again.

The state `embedded` has the number of cells, the sums of counts that say what the model knows of
the file, what the reader has seen of its values, and the seconds that it took. The vectors are a
stream of float32 rows in the order of the cells, with NaN rows for cells without a known gene.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

from cellmill.config.run import Embed
from cellmill.data.inputs.fetch import state_of
from cellmill.data.inputs.reader import CountsReader
from cellmill.data.saved_work import SavedRows, SavedWork
from cellmill.files import sha256_file
from cellmill.models.family import Model

STATE = "embedded"
FORMAT = 1  # of the state; to be raised when the same cells get other vectors


class SavedVectors:
    """Vectors of the cells before row `first`, which are put into `vectors`, `(cells, hidden)`.

    `sums` are arrays that grow with the cells; those that were saved are put into them.
    """

    def __init__(
        self,
        saved: SavedWork,
        reader: CountsReader,
        sums: dict[str, np.ndarray],
        vectors: np.ndarray,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._saved = saved
        self._reader = reader
        self._sums = sums
        self._clock = clock
        self._began = clock()
        self.earlier_s = 0.0  # that killed processes took for these vectors
        self.first = 0
        stored = saved.restore(STATE)
        self._vectors = SavedRows(saved, STATE, {"vectors": vectors})
        if stored is not None:
            self.first = self._vectors.restore(int(stored["n_cells"]))
            self.earlier_s = float(stored["seconds"])
            for name, array in sums.items():
                array[...] = stored[name]
            reader.restore_values(stored)
            print(f"{reader.path.stem}: {self.first:,} cells are embedded already", flush=True)
        self._n_done = self.first

    def save_rows(self, blocks: Iterator[sp.csr_matrix]) -> Iterator[sp.csr_matrix]:
        """The blocks of rows; the vectors of each are there when the next one is wanted."""
        for block in blocks:
            yield block
            n = block.shape[0]
            self._n_done += n
            if self._saved.is_due(n):
                self._save()

    def _save(self) -> None:
        seen = self._reader.seen_values()
        seconds = self.earlier_s + self._clock() - self._began
        numbers = {"n_cells": np.array(self._n_done), "seconds": np.array(seconds)}
        streams = self._vectors.append(self._n_done)
        self._saved.save(STATE, self._sums | seen | numbers, streams)


def embedding_facts(
    path: Path, counts: str, counts_rule: str, folder: Path, model: Model, embed: Embed
) -> dict[str, Any]:
    """What the vectors of the cells of the file `path` depend on; `model` is that of `folder`."""
    device = next(model.parameters()).device
    is_gpu = device.type == "cuda"
    return {
        "input": {"files": state_of(path), "counts": counts, "counts_rule": counts_rule},
        "model": {
            "weights": sha256_file(folder / "model.safetensors"),
            "config": sha256_file(folder / "config.json"),
            "vocabulary": sha256_file(folder / "vocabulary.tsv"),
        },
        "options": embed.model_dump(mode="json"),
        "device": torch.cuda.get_device_name(device) if is_gpu else device.type,
        "version": [FORMAT, torch.__version__],
    }
