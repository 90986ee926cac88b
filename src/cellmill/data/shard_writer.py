"""Writing shards of many datasets: split, preshuffled and rank-ordered, with one shard of cells in memory at a time.

Two passes. The first streams every dataset and keeps a few numbers per cell: its split, its nonzeros among the
vocabulary's genes, its largest count. The second gathers the cells of each shard from the datasets, by pread in disk
order, and writes them in shuffled order. Cells are shuffled on disk so that blocks of contiguous cells, which are
fast to read, are already mixed: a batch has a donor entropy of 3.26 of 3.27 bits.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.config.corpus import Shard as ShardOptions
from cellmill.data.count_matrix import select_columns
from cellmill.data.counts_reader import open_counts
from cellmill.data.counts_writer import count_dtype, write_cells
from cellmill.data.gene_ranking import inverse_medians, rank_order_rows
from cellmill.data.level_table import level_table
from cellmill.data.manifest import Manifest, ShardEntry, SplitEntry
from cellmill.data.obs_levels import DATASET
from cellmill.data.shard_file import RowFile
from cellmill.data.shuffle import SHARDS, permutation
from cellmill.data.split import SPLITS, hash_cells, hash_genes, places, require_column, split_by_content, split_by_value
from cellmill.data.vocabulary import Vocabulary
from cellmill.errors import DataError
from cellmill.files import atomic_path, sha256_file

_BLOCK = 1024  # cells read, ordered and written at a time
_MAX_NONZEROS = np.iinfo(np.int32).max  # of a shard: its indptr is int32
_READ_THREADS = 4
_SHARD_NAME = re.compile(r"(train|val|test)-\d{5}\.h5ad")


@dataclass(frozen=True)
class _Dataset:
    name: str
    path: Path
    target: np.ndarray  # row in the vocabulary of each gene of the file, or -1
    obs: pd.DataFrame
    hashes: np.ndarray
    nnz: np.ndarray  # nonzeros of each cell among the vocabulary's genes
    largest: np.ndarray  # largest count of each cell among the vocabulary's genes
    ordered: bool  # rows are sequences, whose order is kept


@dataclass(frozen=True)
class _Cells:
    """Cells of the corpus with a gene of the vocabulary, one entry each."""

    dataset: np.ndarray
    row: np.ndarray
    nnz: np.ndarray
    largest: np.ndarray

    def __getitem__(self, which: np.ndarray) -> _Cells:
        return _Cells(self.dataset[which], self.row[which], self.nnz[which], self.largest[which])


def write_shards(cells: list[Path], vocabulary: Vocabulary, options: ShardOptions, out: Path) -> Manifest:
    """Write the shards of a corpus beside `out`, then the manifest to `out`.

    `cells` are preprocessed .h5ad files; the stem of each is the name of its dataset. Existing shards are replaced;
    their manifest is removed first, so that nobody reads a mixture. Raises DataError when a name occurs twice, a column
    is missing, a split is empty, or no cell has a gene of the vocabulary.
    """
    paths = {path.stem: path for path in cells}
    if len(paths) < len(cells):
        raise DataError(f"{cells[0].parent}: two datasets have the same file name; rename one, it names the dataset")
    weights, hashes = inverse_medians(vocabulary.medians), hash_genes(vocabulary.gene_ids)
    datasets = [_scan(paths[name], vocabulary, hashes) for name in sorted(paths)]
    corpus, split = _divide(datasets, options)
    obs = _joint_obs(datasets, corpus)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    splits: dict[str, SplitEntry] = {}
    sources = [RowFile(dataset.path) for dataset in datasets]
    for number, name in enumerate(SPLITS):
        order = np.flatnonzero(split == number)
        order = order[permutation(len(order), options.seed, SHARDS, number)]
        shards: list[ShardEntry] = []
        for first in range(0, len(order), options.cells_per_shard):
            chosen = order[first : first + options.cells_per_shard]
            path = out.parent / f"{name}-{len(shards):05d}.h5ad"
            shards.append(_write_shard(path, corpus[chosen], obs.iloc[chosen], datasets, sources, vocabulary, weights))
        splits[name] = SplitEntry(len(order), sum(shard.nnz for shard in shards), tuple(shards))
    written = {shard.name for entry in splits.values() for shard in entry.shards}
    for path in out.parent.iterdir():  # shards of an earlier, larger set
        if _SHARD_NAME.fullmatch(path.name) and path.name not in written:
            path.unlink()
    return _write_manifest(out, vocabulary, options, obs, datasets, splits)


def _write_manifest(
    out: Path,
    vocabulary: Vocabulary,
    options: ShardOptions,
    obs: pd.DataFrame,
    datasets: list[_Dataset],
    splits: dict[str, SplitEntry],
) -> Manifest:
    medians = hashlib.sha256(vocabulary.medians.astype("<f4").tobytes()).hexdigest()
    manifest = Manifest(
        path=out,
        fingerprint="",
        vocabulary={"digest": vocabulary.digest, "n_genes": vocabulary.n_genes, "medians_digest": medians},
        seed=options.seed,
        split={"by": options.split_by, "val_frac": options.val_frac, "test_frac": options.test_frac},
        obs_columns=list(obs.columns),
        left_out={dataset.name: int((dataset.nnz == 0).sum()) for dataset in datasets},
        splits=splits,
        obs_levels=level_table(obs),
        ordered=any(dataset.ordered for dataset in datasets),
    )
    manifest = replace(manifest, fingerprint=manifest.expected_fingerprint())
    manifest.write()  # last: its existence means that the shards are complete
    return manifest


def _scan(path: Path, vocabulary: Vocabulary, gene_hashes: np.ndarray) -> _Dataset:
    hashes, nnz, largest = [], [], []
    with open_counts(path) as reader:
        target = vocabulary.rows_of(reader.var_names)
        for block in reader.rows(_BLOCK):
            counts = _selected(block, target, vocabulary.n_genes, reader.ordered)
            # a sequence is its residues at their places, a cell its genes with their counts
            values = places(counts.indptr) if reader.ordered else counts.data
            hashes.append(hash_cells(counts.indptr, counts.indices, values, gene_hashes))
            nnz.append(np.diff(counts.indptr))
            largest.append(np.ones(len(nnz[-1])) if reader.ordered else counts.max(axis=1).toarray().ravel())
        return _Dataset(
            path.stem,
            path,
            target,
            reader.obs,
            hashes=np.concatenate(hashes),
            nnz=np.concatenate(nnz),
            largest=np.concatenate(largest),
            ordered=reader.ordered,
        )


def _selected(block: sp.csr_matrix, target: np.ndarray, n_genes: int, ordered: bool) -> sp.csr_matrix:
    """`block` over the vocabulary's genes, summed; of sequences nothing is summed or lost."""
    if not ordered:
        return select_columns(block, target, n_genes)
    if (target < 0).any():
        raise DataError("the vocabulary lacks residues; make it from these datasets (the `vocabulary` stage)")
    return sp.csr_matrix((block.data, target[block.indices], block.indptr), shape=(block.shape[0], n_genes))


def _divide(datasets: list[_Dataset], options: ShardOptions) -> tuple[_Cells, np.ndarray]:
    """Cells with a gene of the vocabulary, and the split of each."""
    sizes = [len(dataset.nnz) for dataset in datasets]
    corpus = _Cells(
        np.repeat(np.arange(len(datasets)), sizes),
        np.concatenate([np.arange(size) for size in sizes]),
        np.concatenate([dataset.nnz for dataset in datasets]).astype(np.int64),
        np.concatenate([dataset.largest for dataset in datasets]),
    )
    keep = corpus.nnz > 0
    if not keep.any():
        raise DataError(
            f"{datasets[0].path}: none of {len(keep):,} cells of the corpus has a gene of the vocabulary; "
            "give the vocabulary made from these datasets"
        )
    if options.split_by is None:
        hashes = np.concatenate([dataset.hashes for dataset in datasets])[keep]
        split = split_by_content(hashes, options.seed, options.val_frac, options.test_frac)
    else:
        values = np.concatenate([_values(dataset, options.split_by) for dataset in datasets])[keep]
        split = split_by_value(values, options.split_by, options.seed, options.val_frac, options.test_frac)
    return corpus[keep], split


def _values(dataset: _Dataset, column: str) -> np.ndarray:
    """Values of an obs column as text; for `dataset`, the dataset's name."""
    if column == DATASET:
        return np.full(len(dataset.obs), dataset.name, object)
    require_column(column, dataset.obs.columns, str(dataset.path))
    values = dataset.obs[column]
    if values.isna().any():
        raise DataError(
            f"{dataset.path}: {int(values.isna().sum()):,} cells have no {column!r} (shard.split_by), so no split; "
            "fill in the column, or split by another"
        )
    return values.astype(str).to_numpy(object)


def _joint_obs(datasets: list[_Dataset], corpus: _Cells) -> pd.DataFrame:
    """obs of all cells, with the union of the datasets' columns.

    Text becomes categories, numbers stay numbers. Cells of a dataset without the column have NaN.
    """
    frame = pd.DataFrame(index=pd.RangeIndex(len(corpus.row)))
    where = np.array([dataset.name for dataset in datasets], object)[corpus.dataset]
    frame[DATASET] = pd.Categorical(where, categories=[dataset.name for dataset in datasets])
    rows = [corpus.row[corpus.dataset == number] for number in range(len(datasets))]
    for name in dict.fromkeys(str(column) for dataset in datasets for column in dataset.obs.columns):
        parts = [dataset.obs.get(name) for dataset in datasets]
        # a user's own column `dataset` is kept under another name
        frame[name if name != DATASET else f"{DATASET}_original"] = _joint_column(parts, rows)
    cells = np.concatenate([dataset.obs.index.to_numpy(object)[r] for dataset, r in zip(datasets, rows)])
    frame.index = pd.Index([f"{a}:{b}" for a, b in zip(where, cells)], dtype=object)
    return frame


def _joint_column(parts: list[pd.Series | None], rows: list[np.ndarray]) -> np.ndarray | pd.Categorical:
    present = [part for part in parts if part is not None]
    whole = len(present) == len(parts) and not any(part.isna().any() for part in present)
    if all(pd.api.types.is_bool_dtype(part) for part in present) and whole:
        dtype: type | None = bool
    elif all(pd.api.types.is_integer_dtype(part) for part in present) and whole:
        dtype = np.int64
    elif all(pd.api.types.is_numeric_dtype(part) and not pd.api.types.is_bool_dtype(part) for part in present):
        dtype = np.float64
    else:
        dtype = None
    columns: list[np.ndarray] = []
    for part, chosen in zip(parts, rows):
        if part is None:
            columns.append(np.full(len(chosen), None if dtype is None else np.nan, object if dtype is None else dtype))
        elif dtype is None:
            values = part.iloc[chosen].astype(object)
            columns.append(values.astype(str).where(values.notna(), None).to_numpy(object))
        elif dtype is np.float64:
            columns.append(part.iloc[chosen].to_numpy(np.float64, na_value=np.nan))
        else:
            columns.append(part.iloc[chosen].to_numpy(dtype))
    column = np.concatenate(columns)
    return column if dtype is not None else pd.Categorical(column)


def _write_shard(
    path: Path,
    cells: _Cells,
    obs: pd.DataFrame,
    datasets: list[_Dataset],
    sources: list[RowFile],
    vocabulary: Vocabulary,
    weights: np.ndarray,
) -> ShardEntry:
    nnz, dtype = int(cells.nnz.sum()), count_dtype(int(cells.largest.max()))
    if nnz > _MAX_NONZEROS:
        raise DataError(
            f"{path}: {nnz:,} nonzeros in a shard, the limit is {_MAX_NONZEROS:,}; lower shard.cells_per_shard"
        )
    content = hashlib.sha256("\n".join(obs.index).encode())
    var = pd.DataFrame(
        {"symbol": vocabulary.symbols, "n_cells": vocabulary.n_cells, "median": vocabulary.medians},
        index=pd.Index(vocabulary.gene_ids, name="gene_id", dtype=object),
    )

    def blocks() -> Iterator[sp.csr_matrix]:
        for block in _ordered_blocks(cells, datasets, sources, vocabulary.n_genes, weights):
            for array in (block.indptr.astype("<i8"), block.indices.astype("<i4"), block.data.astype("<u4")):
                content.update(array.tobytes())
            yield block

    with atomic_path(path) as temporary:
        write_cells(temporary, obs, var, blocks(), nnz, dtype, ordered=any(dataset.ordered for dataset in datasets))
        _narrow_indptr(temporary)
    return ShardEntry(path.name, len(obs), nnz, dtype.name, sha256_file(path), content.hexdigest())


def _narrow_indptr(path: Path) -> None:
    """Rewrite indptr as int32, like indices: scipy sorts rows (ours are in rank order) only if both have one dtype."""
    with h5py.File(path, "r+") as file:
        indptr = file["X/indptr"][:].astype("<i4")
        del file["X/indptr"]
        file["X"].create_dataset("indptr", data=indptr)


def _ordered_blocks(
    cells: _Cells, datasets: list[_Dataset], sources: list[RowFile], n_genes: int, weights: np.ndarray
) -> Iterator[sp.csr_matrix]:
    """Rows of a shard over the vocabulary's genes, each in rank order, `_BLOCK` rows at a time.

    Sequences keep their own order.
    """
    starts, columns, counts = _gather(cells, sources)
    target = np.concatenate([dataset.target for dataset in datasets])
    ordered = any(dataset.ordered for dataset in datasets)
    for first in range(0, len(cells.row), _BLOCK):
        edges = starts[first : first + _BLOCK + 1]
        nonzeros = slice(edges[0], edges[-1])
        shape = (len(edges) - 1, len(target))
        block = sp.csr_matrix((counts[nonzeros], columns[nonzeros], edges - edges[0]), shape=shape)
        block = _selected(block, target, n_genes, ordered)
        if not ordered:
            block.eliminate_zeros()
        if (np.diff(block.indptr) != cells.nnz[first : first + _BLOCK]).any():
            raise DataError(f"{sources[0].path.parent}: a cells file changed while shards were written; run again")
        starts_of_block = block.indptr.astype(np.int64)
        genes, of_gene = block.indices, block.data
        if not ordered:
            genes, of_gene = rank_order_rows(starts_of_block, genes, of_gene, weights)
        yield sp.csr_matrix((of_gene, genes, starts_of_block), shape=block.shape)


def _gather(cells: _Cells, sources: list[RowFile]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of `cells` from their files: starts (int64), columns and counts (uint32).

    Columns (int32) count through all files: those of file i follow those of file i - 1.
    """
    lengths = np.zeros(len(cells.row), np.int64)
    for number, source in enumerate(sources):
        own = cells.dataset == number
        lengths[own] = np.diff(source.indptr)[cells.row[own]]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    first_column = np.cumsum([0, *(source.n_vars for source in sources)])
    columns, counts = np.empty(starts[-1], np.int32), np.empty(starts[-1], np.uint32)

    def read(task: tuple[int, np.ndarray]) -> None:
        number, chosen = task
        source, row = sources[number], cells.row[chosen]
        for run in np.split(chosen, np.flatnonzero(np.diff(row) != 1) + 1):
            spans = [slice(starts[cell], starts[cell + 1]) for cell in run]
            start, stop = source.indptr[cells.row[run[0]]], source.indptr[cells.row[run[-1]] + 1]
            source.read_genes(int(start), [columns[span] for span in spans])
            run_counts = np.empty(stop - start, source.dtype)
            source.read_counts(int(start), [run_counts])
            for span, offset in zip(spans, np.cumsum([0, *lengths[run]])):
                columns[span] += first_column[number]
                counts[span] = run_counts[offset : offset + span.stop - span.start]

    tasks = []
    for number in range(len(sources)):
        chosen = np.flatnonzero(cells.dataset == number)
        chosen = chosen[np.argsort(cells.row[chosen])]  # in disk order, for read-ahead
        tasks += [(number, chosen[first : first + _BLOCK]) for first in range(0, len(chosen), _BLOCK)]
    with ThreadPoolExecutor(_READ_THREADS) as pool:
        list(pool.map(read, tasks))
    return starts, columns, counts
