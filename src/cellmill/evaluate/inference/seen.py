"""Cells of a file that a model was trained on.

A cell is recognised by its counts of the vocabulary's genes, under any name. Hashes of all training
and validation cells are stored next to the shards. train/run.json of the run that the model folder
is in names the shards, and the models that the run started from or learnt from. If a file lacks some
genes, the cells of the shards are hashed again over the other genes.

The model folder itself has digests of these cells (`data/shards/cell_digests`), also after it was
copied elsewhere. They also find copies at another depth, by barcode. Without shards and digests, a
message says that the training cells are not known.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from cellmill.config.load import read_model_config, stored_options
from cellmill.config.options import TrainOptions
from cellmill.config.plugin import in_one_line
from cellmill.data.genes.names import match_columns
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.inputs.reader import CountsReader
from cellmill.data.keys import splitmix64
from cellmill.data.rows import SparseCounts, positions_in_rows
from cellmill.data.shards.cell_digests import (
    BARCODE,
    CellDigests,
    CorpusDigests,
    read_digests,
)
from cellmill.data.shards.index import are_in, open_index
from cellmill.data.shards.manifest import READ, Manifest, verify
from cellmill.data.shards.plan import select_genes
from cellmill.data.shards.reader import open_shards, read_names
from cellmill.data.split import hash_cells, hash_genes, hash_pairs, sum_pairs
from cellmill.errors import DataError, UserError
from cellmill.files import read_json

ROWS = 4096  # cells of a shard that are read at once
HASHED_ROWS = 1024  # cells of a file that are hashed at once
_MIN_GENES = 20  # with counts, in a file that lacks genes; on fewer, different cells may be equal
# genes that a file lacks, times counts, which are tried for each cell that a digest list may have
MAX_COMPLETIONS = 4096
MAX_COMPLETED_COUNT = 16
KINDS = ["exact", "near", "new"]
"""Equal counts of the model's genes; the barcode of a training sample at other counts; neither."""
Ancestor = tuple[str, Path | None]  # name, and folder of the exported model if it is there


def read_blocks(manifest: Manifest, split: str) -> Iterator[SparseCounts]:
    """The cells of a split, block by block. Raises DataError for a damaged shard."""
    for shard in open_shards(manifest, split):
        for first in range(0, shard.n_obs, ROWS):
            yield shard.read(first, min(ROWS, shard.n_obs - first))
        shard.close()


class HashedCorpus(NamedTuple):
    """Genes of a corpus, and the hashes of its training and validation cells."""

    genes: Vocabulary
    # for each split, `(2, cells)` uint64 in ascending order; `(1, cells)` of a digest list
    hashes: list[np.ndarray]
    manifest: Manifest | None  # None of a digest list

    def hashes_over(self, shared: np.ndarray) -> list[np.ndarray]:
        """`hashes` of the counts of genes `shared`, bool `(n_genes,)`, for cells with enough such
        genes. Without shards, of all genes: see `completions`.
        """
        if self.manifest is None:
            return self.hashes
        gene_hashes = hash_genes(self.genes.gene_ids)
        parts = [np.zeros((0, 2), np.uint64)]
        for split in _list_filled_splits(self.manifest):
            for block in read_blocks(self.manifest, split):
                is_shared = shared.take(block.genes)
                n_shared_before = np.concatenate([[0], np.cumsum(is_shared)])
                offsets = n_shared_before[block.offsets]
                counts = block.counts[is_shared]
                hashes = hash_cells(offsets, block.genes[is_shared], counts, gene_hashes)
                parts.append(hashes[np.diff(offsets) >= _MIN_GENES])
        hashes = np.concatenate(parts)
        return [hashes[np.lexsort((hashes[:, 1], hashes[:, 0]))].T]

    def completions(self, lacked: np.ndarray) -> np.ndarray | None:
        """Summands, uint64, of one of the genes `lacked`, bool `(n_genes,)`, with a small count;
        at most MAX_COMPLETIONS. None with shards, and for more genes.

        Digests cannot be computed over fewer genes, but each completes a cell that has counts of
        all but one gene.
        """
        genes = hash_genes(np.array(self.genes.gene_ids, object)[lacked])
        n_counts = min(MAX_COMPLETED_COUNT, MAX_COMPLETIONS // len(genes))
        if self.manifest is not None or n_counts == 0:
            return None
        return hash_pairs(genes[:, None], np.arange(1, n_counts + 1)).ravel()


def _list_filled_splits(manifest: Manifest) -> list[str]:
    return [split for split in READ if manifest.splits[split].n_obs]


def read_hashes(manifest: Manifest) -> HashedCorpus:
    """Genes and cells of the shards that a training reads."""
    splits = _list_filled_splits(manifest)
    first_shard = manifest.shard_path(manifest.splits[splits[0]].shards[0])
    genes = _as_vocabulary(read_names(first_shard, "var").tolist())
    return HashedCorpus(
        genes, [open_index(manifest, split, "hashes") for split in splits], manifest
    )


def as_hashed(corpus: CorpusDigests) -> HashedCorpus:
    """Genes and cells of a digest list."""
    return HashedCorpus(_as_vocabulary(corpus.gene_ids), [corpus.cells[None]], None)


def _as_vocabulary(ids: list[str]) -> Vocabulary:
    return Vocabulary(ids, ids, np.ones(len(ids), np.int64), np.ones(len(ids), np.float32))


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
        completions = corpus.completions(~shared) if lacks_genes else None
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
            sums = sum_pairs(block.indptr, block.indices, values, gene_hashes)
            has_enough = np.diff(block.indptr) >= min_genes
            hashes = splitmix64(sums)
            for split_hashes in corpus_hashes:
                is_equal[cells] |= has_enough & are_in(hashes, split_hashes)
            if completions is not None:
                rows = np.flatnonzero(has_enough & ~is_equal[cells])
                # (cells, completions): digest of each cell with one more gene
                completed = splitmix64(sums[rows, :1] + completions)
                known = are_in(completed.reshape(-1, 1), corpus_hashes[0])
                is_equal[cells[rows]] |= known.reshape(completed.shape).any(axis=1)
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
            manifest = Manifest.read(candidate)
            columns = options.read_columns(), options.number_columns()
            if manifest.fingerprint_with(*columns) == fingerprint:
                return candidate, ""
    return None, f"{path} {'is of other shards by now' if candidates else 'was not found'}"


def _find_existing(path: Path, start: Path) -> list[Path]:
    """Files or folders called `path` in the working directory and in each folder above `start`."""
    candidates = [path] + [above / path for above in start.resolve().parents]
    return [candidate for candidate in candidates if candidate.exists()]


class Training(NamedTuple):
    """Cells that a model and its ancestors were trained on, as far as they can be found."""

    manifests: dict[str, Manifest]  # shards by fingerprint
    listed: dict[str, CorpusDigests]  # digests of the folders, by fingerprint
    own_missing: str  # why the model's own cells were not found; empty if they were
    ancestors_missing: list[str]  # models before it whose cells were not found

    def hashed(self) -> list[HashedCorpus]:
        """All corpora, by their shards where these were found."""
        only_listed = self.listed.keys() - self.manifests.keys()
        corpora = [read_hashes(manifest) for manifest in self.manifests.values()]
        return corpora + [as_hashed(self.listed[name]) for name in sorted(only_listed)]


class _OwnTraining(NamedTuple):
    """Cells of one model, without those of its ancestors unless its folder lists them."""

    manifest: Manifest | None
    problem: str  # why there is no manifest
    ancestors: list[Ancestor]
    digests: CellDigests | None = None


def find_training(model: Path) -> Training:
    """Cells of the exported model in the folder `model`, and of the models that it came from.

    Raises DataError for a damaged digest list.
    """
    return _with_ancestors(_find_own_training(model), {model.resolve()})


def find_training_of_run(train: Path, fingerprint: str) -> Training:
    """Cells of the run in the folder `train`, with this fingerprint, and of the models before it."""
    return _with_ancestors(_find_shards_of_run(train, fingerprint), set())


def _with_ancestors(own: _OwnTraining, visited: set[Path]) -> Training:
    """Add the cells of the ancestors, whose folders are not in `visited`."""
    if own.manifest is None and own.digests is None:
        return Training({}, {}, own.problem, [])
    manifests: dict[str, Manifest] = {}
    listed: dict[str, CorpusDigests] = {}
    missing: list[str] = []
    # grows while the loop runs; the last entry of each is true if a list has its cells already
    waiting = [("", own, False)]
    for name, training, is_covered in waiting:
        if training.manifest is not None:
            manifests[training.manifest.fingerprint] = training.manifest
        if training.digests is not None:
            listed |= training.digests.corpora
        if not is_covered:
            if training.digests is not None:
                missing += training.digests.unknown
            elif training.manifest is None:
                missing.append(name)
        for earlier, folder in training.ancestors:
            ancestor = _OwnTraining(None, "no such folder", [])
            if folder is not None:
                if folder.resolve() in visited:
                    continue
                visited.add(folder.resolve())
                ancestor = _find_own_training(folder)
            waiting.append((earlier, ancestor, is_covered or training.digests is not None))
    return Training(manifests, listed, "", list(dict.fromkeys(missing)))


def _find_own_training(model: Path) -> _OwnTraining:
    """Cells of one export, by its digest list and by the shards of its run."""
    try:
        config = read_model_config(model / "config.json")
    except (UserError, OSError) as error:
        return _OwnTraining(None, in_one_line(error), [])
    # an export is results/runs/RUN/model, or results/runs/RUN/steps/STEP/model
    run = model.resolve().parent
    if run.parent.name == "steps":
        run = run.parents[1]
    digests = read_digests(model, config)
    if not (run / "train" / "run.json").is_file():
        problem = f"{model} is not in the folder of its run, which names its training cells"
        return _OwnTraining(None, problem, [], digests)
    manifest, problem, ancestors, _ = _find_shards_of_run(
        run / "train", str(config.get("fingerprint"))
    )
    return _OwnTraining(manifest, problem, ancestors, digests)


def _find_shards_of_run(train: Path, fingerprint: str) -> _OwnTraining:
    """Shards of a run, and the models that it came from."""
    try:
        record = read_json(train / "run.json")
        options = stored_options(record["options"], str(train / "run.json"))
        path, problem = find_shards(train, options, fingerprint)
        manifest = None
        if path is not None:
            manifest = Manifest.read(path)
            splits = _list_filled_splits(manifest)
            verify(manifest, [manifest.splits[split].index["hashes"] for split in splits])
    except (UserError, OSError, LookupError, TypeError, ValueError) as error:
        return _OwnTraining(None, in_one_line(error), [])
    return _OwnTraining(manifest, problem, [*_find_ancestors(record, options, train)])


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
    is_near: np.ndarray | None = None
    """(n_obs,) bool: seen cells whose counts differ, found by barcode; None if not looked for."""


def mark_seen_cells(reader: CountsReader, model: Path) -> Seen:
    """Cells of `reader` that the exported model in the folder `model`, or a model before it, was
    trained on. Raises DataError for a damaged digest list.
    """
    return _mark_cells(reader, find_training(model))


def _mark_cells(reader: CountsReader, training: Training) -> Seen:
    if training.own_missing:
        return Seen(None, training.own_missing)
    unknown = []
    if training.ancestors_missing:
        names = ", ".join(training.ancestors_missing)
        unknown.append(f"the training cells of {names}, before it, are not known")
    corpora = training.hashed()
    is_equal = find_equal_cells(reader, corpora, np.ones(reader.n_obs, bool))
    if not training.listed:
        return Seen(is_equal, "".join(unknown))
    listed = training.listed.values()
    unknown += describe_unfindable_cells(reader, corpora, listed)
    is_near = find_barcodes(reader, listed) & ~is_equal
    return Seen(is_equal | is_near, "; ".join(unknown), is_near)


def describe_unfindable_cells(
    reader: CountsReader, corpora: Sequence[HashedCorpus], listed: Collection[CorpusDigests]
) -> list[str]:
    """A sentence on training cells that neither counts nor barcodes find; empty if all are found."""
    if _has_barcodes(reader) and all(len(corpus.barcodes) for corpus in listed):
        return []
    return _describe_lacked_genes(reader, corpora)


def _has_barcodes(reader: CountsReader) -> bool:
    return bool(reader.obs_names.str.contains(BARCODE).any())


def _describe_lacked_genes(reader: CountsReader, corpora: Sequence[HashedCorpus]) -> list[str]:
    """A sentence on training cells that are not found by their counts, because the file lacks genes
    of a corpus without shards; empty if it lacks none.
    """
    n_lacked = 0
    n_genes = 0
    for corpus in corpora:
        if corpus.manifest is not None or reader.ordered:
            continue  # shards are hashed again over the shared genes
        with suppress(DataError):  # no gene in common: no equal cells
            target = match_columns(reader, corpus.genes).target
            n = corpus.genes.n_genes - len(np.unique(target[target >= 0]))
            if n > n_lacked:
                n_lacked = n
                n_genes = corpus.genes.n_genes
    if not n_lacked:
        return []
    n_counts = min(MAX_COMPLETED_COUNT, MAX_COMPLETIONS // n_lacked)
    kind = f"more than one of them, or above {n_counts} counts of one," if n_counts else "any"
    return [
        f"it lacks {n_lacked:,} of the model's {n_genes:,} genes: a training cell with {kind} is found by its "
        "barcode only"
    ]


def find_barcodes(reader: CountsReader, corpora: Iterable[CorpusDigests]) -> np.ndarray:
    """Mask, bool `(n_obs,)`, of the cells whose barcode is in the same sample of `corpora`."""
    is_near = np.zeros(reader.n_obs, bool)
    for corpus in corpora:
        is_near |= corpus.has_barcodes(reader.obs_names)
    return is_near


def table_of_seen(
    reader: CountsReader, model: Path, vocabulary: Vocabulary
) -> tuple[pd.DataFrame, list[str]]:
    """Column `seen`, one of KINDS, of each cell by name, and sentences on what was not looked for.

    Raises DataError if `reader` has no gene of the model, or its training cells are not known.
    """
    columns = match_columns(reader, vocabulary)
    training = find_training(model)
    seen = _mark_cells(reader, training)
    if seen.cells is None:
        raise DataError(
            f"{model}: unknown: may have seen these cells: it has no digests of its training cells "
            f"({seen.unknown}); export it again, with consolidate.cell_digests"
        )
    is_near = np.zeros(reader.n_obs, bool) if seen.is_near is None else seen.is_near
    codes = np.where(is_near, 1, np.where(seen.cells, 0, 2))
    table = pd.DataFrame(
        {"seen": pd.Categorical.from_codes(codes, KINDS)},
        index=pd.Index(reader.obs_names, name="cell"),
    )
    notes = [seen.unknown] if seen.unknown else []
    lacked = _describe_lacked_genes(reader, training.hashed())
    if not any(line in seen.unknown for line in lacked):
        notes += lacked
    if seen.is_near is None or not _has_barcodes(reader):
        where = (
            "the model has no list of barcodes"
            if seen.is_near is None
            else "its cell names have no barcodes"
        )
        notes.append(f"near copies are not found: {where}")
    if columns.mismatch:
        notes.append(columns.mismatch)
    return table, notes
