"""Cells of a file that a model was trained on, and the agreement of its labels with those of the
file.

A cell is recognised by its counts of the vocabulary's genes, under any name: hashes of all training
and validation cells are stored next to the shards. For a file that lacks some of these genes, the cells of the
shards are hashed again over the others. A model folder contains none of this. The shards are found
through train/run.json of the run that the folder is in, also for the models that the run started
from or learnt from. If a model was copied elsewhere, its training cells are not found, and a message
says so.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import pandas as pd

from cellmill.config.load import read_model_config, stored_options
from cellmill.config.options import TrainOptions
from cellmill.config.plugin import in_one_line
from cellmill.data.genes.names import match_columns
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.inputs.reader import CountsReader
from cellmill.data.rows import positions_in_rows
from cellmill.data.shards.index import are_in, open_index
from cellmill.data.shards.manifest import READ, Manifest, verify
from cellmill.data.shards.plan import select_genes
from cellmill.data.shards.reader import open_shards, read_names
from cellmill.data.split import hash_cells, hash_genes
from cellmill.errors import DataError, UserError
from cellmill.files import read_json

ROWS = 4096  # cells of a shard that are read at once
HASHED_ROWS = 1024  # cells of a file that are hashed at once
_MIN_GENES = 20  # with counts, in a file that lacks genes; on fewer, different cells may be equal
Ancestor = tuple[str, Path | None]  # name, and folder of the exported model if it is there


class CellBlock(NamedTuple):
    """Counts of some cells of a shard, as `Tokenizer.tokenize` takes them."""

    genes: np.ndarray  # (nonzeros,) rows of the vocabulary
    counts: np.ndarray  # (nonzeros,)
    starts: np.ndarray  # (cells + 1,) int64: first nonzero of each cell

    @property
    def n_cells(self) -> int:
        return len(self.starts) - 1


def read_blocks(manifest: Manifest, split: str) -> Iterator[CellBlock]:
    """The cells of a split, block by block. Raises DataError for a damaged shard."""
    for shard in open_shards(manifest, split):
        for first in range(0, shard.n_obs, ROWS):
            starts, genes, counts = shard.read(first, min(ROWS, shard.n_obs - first))
            yield CellBlock(genes, counts, starts)
        shard.close()


class HashedCorpus(NamedTuple):
    """Genes of a corpus, and the hashes of its training and validation cells."""

    genes: Vocabulary
    hashes: list[np.ndarray]  # for each split, `(2, cells)` uint64 in ascending order
    manifest: Manifest

    def hashes_over(self, shared: np.ndarray) -> list[np.ndarray]:
        """`hashes` of the counts of genes `shared`, bool `(n_genes,)`, for cells with enough such
        genes.
        """
        gene_hashes = hash_genes(self.genes.gene_ids)
        parts = [np.zeros((0, 2), np.uint64)]
        for split in _list_filled_splits(self.manifest):
            for block in read_blocks(self.manifest, split):
                is_shared = shared.take(block.genes)
                n_shared_before = np.concatenate([[0], np.cumsum(is_shared)])
                starts = n_shared_before[block.starts]
                counts = block.counts[is_shared]
                hashes = hash_cells(starts, block.genes[is_shared], counts, gene_hashes)
                parts.append(hashes[np.diff(starts) >= _MIN_GENES])
        hashes = np.concatenate(parts)
        return [hashes[np.lexsort((hashes[:, 1], hashes[:, 0]))].T]


def _list_filled_splits(manifest: Manifest) -> list[str]:
    return [split for split in READ if manifest.splits[split].n_obs]


def read_hashes(manifest: Manifest) -> HashedCorpus:
    """Genes and cells of the shards that a training reads."""
    splits = _list_filled_splits(manifest)
    first_shard = manifest.shard_path(manifest.splits[splits[0]].shards[0])
    ids = read_names(first_shard, "var").tolist()
    genes = Vocabulary(ids, ids, np.ones(len(ids), np.int64), np.ones(len(ids), np.float32))
    return HashedCorpus(
        genes, [open_index(manifest, split, "hashes") for split in splits], manifest
    )


def find_equal_cells(
    reader: CountsReader, corpora: Sequence[HashedCorpus], among: np.ndarray
) -> np.ndarray:
    """Mask, bool `(n_obs,)`, of the cells in mask `among` whose counts equal those in `corpora`.

    Only genes that both have are compared; a cell with few of them equals none.
    """
    is_equal = np.zeros(reader.n_obs, bool)
    if not among.any():
        return is_equal
    for corpus in corpora:
        n_genes = corpus.genes.n_genes
        try:
            target = match_columns(reader, corpus.genes).target
        except DataError:
            continue  # no gene in common: no equal cells
        # hash the corpus again over the shared genes if the file lacks some
        shared = np.zeros(n_genes, bool)
        shared[target[target >= 0]] = True
        lacks_genes = not shared.all() and not reader.ordered
        corpus_hashes = corpus.hashes_over(shared) if lacks_genes else corpus.hashes
        min_genes = _MIN_GENES if lacks_genes else 0
        gene_hashes = hash_genes(corpus.genes.gene_ids)
        # hash the file block by block, and look the hashes up
        block_start = 0
        for raw in reader.rows(HASHED_ROWS):
            rows = np.flatnonzero(among[block_start : block_start + raw.shape[0]])
            cells = block_start + rows
            block_start += raw.shape[0]
            if not len(rows):
                continue
            block = select_genes(raw[rows], target, n_genes, reader.ordered)
            values = positions_in_rows(block.indptr) if reader.ordered else block.data
            hashes = hash_cells(block.indptr, block.indices, values, gene_hashes)
            has_enough = np.diff(block.indptr) >= min_genes
            for split_hashes in corpus_hashes:
                is_equal[cells] |= has_enough & are_in(hashes, split_hashes)
    return is_equal


def find_shards(train: Path, options: TrainOptions, fingerprint: str) -> tuple[Path | None, str]:
    """Manifest of the shards that a run was trained on, or None and the reason.

    A relative path is also looked up in the folders above the run.
    """
    record = train / "run.json"
    if not record.exists():
        return None, f"{record} is missing, which names the shards"
    path = Path(read_json(record)["manifest"])
    candidates = _find_existing(path, train)
    for candidate in candidates:
        with suppress(DataError, KeyError):  # damaged, or without these columns: other shards
            shards = Manifest.read(candidate)
            if (
                shards.fingerprint_with(options.read_columns(), options.number_columns())
                == fingerprint
            ):
                return candidate, ""
    return None, f"{path} {'is of other shards by now' if candidates else 'was not found'}"


def _find_existing(path: Path, start: Path) -> list[Path]:
    """Files or folders called `path` in the working directory and in each folder above `start`."""
    candidates = [path] + [above / path for above in start.resolve().parents]
    return [candidate for candidate in candidates if candidate.exists()]


class Training(NamedTuple):
    """Shards that a model and its ancestors were trained on, as far as they can be found."""

    manifests: list[Manifest]
    own_missing: str  # why the model's own shards were not found; empty if they were
    ancestors_missing: list[str]  # models before it whose shards were not found


def find_training(model: Path) -> Training:
    """The shards of the exported model in the folder `model`, and of the models that it came from."""
    manifests, problem, ancestors = _find_own_training(model)
    if problem:
        return Training([], problem, [])
    missing: list[str] = []
    visited = {model.resolve()}
    for name, folder in ancestors:  # grows while the loop runs
        if folder is None:
            missing.append(name)
        elif folder.resolve() not in visited:
            visited.add(folder.resolve())
            found, problem, earlier = _find_own_training(folder)
            manifests += found
            ancestors += earlier
            missing += [name] if problem else []
    return Training(manifests, "", missing)


def _find_own_training(model: Path) -> tuple[list[Manifest], str, list[Ancestor]]:
    """Shards of one export, why they were not found, and the models that its run came from."""
    # an export is results/runs/RUN/model, or results/runs/RUN/steps/STEP/model
    run = model.resolve().parent
    if run.parent.name == "steps":
        run = run.parents[1]
    train = run / "train"
    if not (train / "run.json").is_file():
        return [], f"{model} is not in the folder of its run, which names its training cells", []
    try:
        record = read_json(train / "run.json")
        options = stored_options(record["options"], str(train / "run.json"))
        fingerprint = read_model_config(model / "config.json").get("fingerprint")
        path, problem = find_shards(train, options, str(fingerprint))
        manifests = []
        if path is not None:
            manifests = [Manifest.read(path)]
            splits = _list_filled_splits(manifests[0])
            verify(manifests[0], [manifests[0].splits[split].index["hashes"] for split in splits])
    except (UserError, OSError, LookupError, TypeError, ValueError) as error:
        return [], in_one_line(error), []
    return manifests, problem, [*_find_ancestors(record, options, train)]


def _find_ancestors(
    record: dict[str, Any], options: TrainOptions, train: Path
) -> Iterator[Ancestor]:
    """Models that a run started from or learnt from."""
    parent = record.get("init_from")
    if parent is not None:
        yield parent, next(iter(_find_existing(Path(parent), train)), None)
    for part in options.objective.each():
        teacher = getattr(part, "teacher", None)
        if teacher is not None:
            folder = train.parents[1] / teacher / "model"
            yield f"its teacher {teacher}", folder if folder.is_dir() else None


class Seen(NamedTuple):
    """Cells of a file that a model has seen in training or validation."""

    cells: np.ndarray | None  # (n_obs,) bool; None if the training cells are not known
    unknown: str  # what is not known about the training cells, in words; empty if all are known


def mark_seen_cells(reader: CountsReader, model: Path) -> Seen:
    """Cells of `reader` that the exported model in the folder `model`, or a model before it, was
    trained on.
    """
    training = find_training(model)
    if training.own_missing:
        return Seen(None, training.own_missing)
    by_fingerprint = {manifest.fingerprint: manifest for manifest in training.manifests}
    corpora = [read_hashes(manifest) for manifest in by_fingerprint.values()]
    unknown = ""
    if training.ancestors_missing:
        unknown = f"the training cells of {', '.join(training.ancestors_missing)}, before it, are not known"
    return Seen(find_equal_cells(reader, corpora, np.ones(reader.n_obs, bool)), unknown)


class Agreement(NamedTuple):
    """Number of cells whose label in the file the model knows, and how many of them have the same
    predicted label.
    """

    n_cells: int
    n_right: int
    n_rejected: int  # cells without a predicted label, counted as wrong

    @classmethod
    def tally(cls, given: np.ndarray, predicted: np.ndarray, among: np.ndarray) -> Self:
        """`given` and `predicted` are text, (cells,), None without a label; `among` is a mask."""
        return cls(
            n_cells=int(among.sum()),
            n_right=int((among & (given == predicted)).sum()),
            n_rejected=int((among & pd.isna(predicted)).sum()),
        )

    def describe(self) -> str:
        rejected = f", {self.n_rejected:,} rejected" if self.n_rejected else ""
        return f"{self.n_right:,} of {self.n_cells:,} ({self.n_right / self.n_cells:.3f}{rejected})"


def compare_labels(
    column: str, given: np.ndarray, predicted: np.ndarray, known: Sequence[str], seen: Seen
) -> tuple[dict[str, Any], list[str]]:
    """Numbers and sentences about the labels `given` in obs column `column` against `predicted`,
    both (cells,).

    Only cells whose label is `known` to the model are compared, and only unseen cells have an
    accuracy.
    """
    compared = np.isin(given.astype(str), np.array(known, str)) & ~pd.isna(given)
    if not compared.any():
        return {}, []
    if seen.cells is None:
        every = Agreement.tally(given, predicted, compared)
        line = (
            f"{column}: {every.describe()} as in the file, no accuracy: unknown whether the model was "
            "trained on them"
        )
        return {}, [f"{line} ({seen.unknown})"]
    unseen = Agreement.tally(given, predicted, compared & ~seen.cells)
    trained = Agreement.tally(given, predicted, compared & seen.cells)
    numbers: dict[str, Any] = {
        "n_labelled_unseen": unseen.n_cells,
        "n_labelled_seen": trained.n_cells,
    }
    lines = []
    if unseen.n_cells:
        numbers["accuracy"] = unseen.n_right / unseen.n_cells
        note = f"; {seen.unknown}" if seen.unknown else ""
        lines.append(
            f"{column}: accuracy on cells that the model was not trained on: {unseen.describe()}{note}"
        )
    if trained.n_cells:
        lines.append(
            f"{column}: no accuracy, cells of its training or validation: {trained.describe()} as in the file"
        )
    return numbers, lines
