"""Cells of many datasets to shards: split, preshuffled and rank-ordered, with one shard of cells in memory at a time.

Two passes. The first streams every dataset and keeps a few numbers for each cell: its split, its nonzeros among the
vocabulary's genes, its largest count. The second takes the cells of one shard after another from wherever they lie,
by pread in the order on disk, and writes them in shuffled order. Shards are preshuffled once so that blocks of
contiguous cells, which are what is fast to read, are already mixed: a batch's donor entropy is 3.26 bits of 3.27.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import scipy.sparse as sp

from cellmill.config.corpus import Shard as ShardOptions
from cellmill.data.counts_reader import count_dtype, open_counts, select_columns, write_cells
from cellmill.data.gene_ranking import inverse_medians, rank_order_rows
from cellmill.data.manifest import Manifest, ShardEntry, SplitEntry
from cellmill.data.shard_file import RowFile
from cellmill.data.shuffle import SHARDS, permutation
from cellmill.data.split import SPLITS, hash_cells, hash_genes, require_column, split_by_content, split_by_value
from cellmill.data.vocabulary import Vocabulary
from cellmill.errors import DataError
from cellmill.files import atomic_path, sha256_file

_BLOCK = 1024  # cells mapped, ordered and written at a time
_MOST_NONZEROS = np.iinfo(np.int32).max
_THREADS = 4  # that read rows
_SHARD_NAME = re.compile(r"(train|val|test)-\d{5}\.h5ad")
_OWN_COLUMN = "dataset"


@dataclass(frozen=True)
class _Dataset:
    name: str
    path: Path
    target: np.ndarray
    """For each gene of the file its row in the vocabulary, or -1."""
    obs: pd.DataFrame
    hashes: np.ndarray
    nnz: np.ndarray
    """Of each cell, among the vocabulary's genes."""
    largest: np.ndarray
    """Largest count of each cell among them."""


@dataclass(frozen=True)
class _Cells:
    """All cells of the corpus that have a gene of the vocabulary, one entry each."""

    dataset: np.ndarray
    row: np.ndarray
    nnz: np.ndarray
    largest: np.ndarray

    def __getitem__(self, which: np.ndarray) -> _Cells:
        return _Cells(self.dataset[which], self.row[which], self.nnz[which], self.largest[which])


def write_shards(cells: list[Path], vocabulary: Vocabulary, options: ShardOptions, out: Path) -> Manifest:
    """Writes the shards of a corpus beside `out`, and then `out`, the manifest.

    Parameters
    ----------
    cells
        Preprocessed .h5ad files; the stem of each is the name of its dataset.

    Returns
    -------
    The manifest. A shard set that was there is replaced: its manifest goes first, so that nobody reads a mixture.

    Raises
    ------
    DataError
        When a name occurs twice, a column is absent, a split comes out empty, or no cell has a gene of the vocabulary.
    """
    paths = {path.stem: path for path in cells}
    if len(paths) < len(cells):
        raise DataError(f"{cells[0].parent}: two datasets have the same file name; a dataset is named by it")
    weights, hashes = inverse_medians(vocabulary.medians), hash_genes(vocabulary.gene_ids)
    datasets = [_scan(paths[name], vocabulary, hashes) for name in sorted(paths)]
    corpus, split = _divide(datasets, options)
    obs, columns = _joint_obs(datasets, corpus)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    splits: dict[str, SplitEntry] = {}
    sources = [RowFile(dataset.path) for dataset in datasets]
    for number, name in enumerate(SPLITS):
        order = np.flatnonzero(split == number)
        order = order[permutation(len(order), options.seed, SHARDS, number)]
        shards: list[ShardEntry] = []
        for first in range(0, len(order), options.cells_per_shard):
            some = order[first : first + options.cells_per_shard]
            path = out.parent / f"{name}-{len(shards):05d}.h5ad"
            shards.append(_write_shard(path, corpus[some], obs.iloc[some], datasets, sources, vocabulary, weights))
        splits[name] = SplitEntry(len(order), sum(shard.nnz for shard in shards), tuple(shards))
    _remove_others(out.parent, {shard.name for entry in splits.values() for shard in entry.shards})
    return _write_manifest(out, vocabulary, options, columns, datasets, splits)


def _write_manifest(
    out: Path,
    vocabulary: Vocabulary,
    options: ShardOptions,
    columns: list[str],
    datasets: list[_Dataset],
    splits: dict[str, SplitEntry],
) -> Manifest:
    medians = hashlib.sha256(vocabulary.medians.astype("<f4").tobytes()).hexdigest()
    fields = {
        "vocabulary": {"digest": vocabulary.digest, "n_genes": vocabulary.n_genes, "medians_digest": medians},
        "seed": options.seed,
        "split": {"by": options.split_by, "val_frac": options.val_frac, "test_frac": options.test_frac},
        "obs_columns": columns,
        "left_out": {dataset.name: int((dataset.nnz == 0).sum()) for dataset in datasets},
        "splits": splits,
    }
    unnamed = Manifest(path=out, fingerprint="", **fields)  # type: ignore[arg-type]
    manifest = Manifest(path=out, fingerprint=unnamed.expected_fingerprint(), **fields)  # type: ignore[arg-type]
    manifest.write()  # last: its existence means the shards are complete
    return manifest


def _scan(path: Path, vocabulary: Vocabulary, gene_hashes: np.ndarray) -> _Dataset:
    hashes, nnz, largest = [], [], []
    with open_counts(path) as reader:
        target = vocabulary.rows_of(reader.var_names)
        for block in reader.rows(_BLOCK):
            counts = select_columns(block, target, vocabulary.n_genes)
            hashes.append(hash_cells(counts.indptr, counts.indices, counts.data, gene_hashes))
            nnz.append(np.diff(counts.indptr))
            largest.append(counts.max(axis=1).toarray().ravel())
        return _Dataset(
            path.stem, path, target, reader.obs, np.concatenate(hashes), np.concatenate(nnz), np.concatenate(largest)
        )


def _divide(datasets: list[_Dataset], options: ShardOptions) -> tuple[_Cells, np.ndarray]:
    """The cells that have a gene of the vocabulary, and the split of each."""
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
            "was it made from these datasets?"
        )
    if options.split_by is None:
        hashes = np.concatenate([dataset.hashes for dataset in datasets])[keep]
        split = split_by_content(hashes, options.seed, options.val_frac, options.test_frac)
    else:
        values = np.concatenate([_values(dataset, options.split_by) for dataset in datasets])[keep]
        split = split_by_value(values, options.split_by, options.seed, options.val_frac, options.test_frac)
    return corpus[keep], split


def _values(dataset: _Dataset, column: str) -> np.ndarray:
    """The column as text, `dataset` being the dataset's name."""
    if column == _OWN_COLUMN:
        return np.full(len(dataset.obs), dataset.name, object)
    require_column(column, dataset.obs.columns, str(dataset.path))
    values = dataset.obs[column]
    if values.isna().any():
        raise DataError(
            f"{dataset.path}: {int(values.isna().sum()):,} cells have no {column!r} (shard.split_by), so no split; "
            "fill the column in, or split by another"
        )
    return values.astype(str).to_numpy(object)


def _joint_obs(datasets: list[_Dataset], corpus: _Cells) -> tuple[pd.DataFrame, list[str]]:
    """obs of all cells and its columns: the union over datasets, text as categories, numbers as they are.

    Where a dataset lacks a column, its cells have NaN: no category, or not a number.
    """
    names = list(dict.fromkeys(str(column) for dataset in datasets for column in dataset.obs.columns))
    frame = pd.DataFrame(index=pd.RangeIndex(len(corpus.row)))
    where = np.array([dataset.name for dataset in datasets], object)[corpus.dataset]
    frame[_OWN_COLUMN] = pd.Categorical(where, categories=[dataset.name for dataset in datasets])
    rows = [corpus.row[corpus.dataset == number] for number in range(len(datasets))]
    for name in names:
        parts = [dataset.obs.get(name) for dataset in datasets]
        # the user's own column of that name is kept beside the one that every shard has
        frame[name if name != _OWN_COLUMN else f"{_OWN_COLUMN}_original"] = _joint_column(parts, rows)
    cells = np.concatenate([dataset.obs.index.to_numpy(object)[r] for dataset, r in zip(datasets, rows)])
    frame.index = pd.Index([f"{a}:{b}" for a, b in zip(where, cells)], dtype=object)
    return frame, list(frame.columns)


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
    for part, some in zip(parts, rows):
        if part is None:
            columns.append(np.full(len(some), None if dtype is None else np.nan, object if dtype is None else dtype))
        elif dtype is None:
            chosen = part.iloc[some].astype(object)
            columns.append(chosen.astype(str).where(chosen.notna(), None).to_numpy(object))
        elif dtype is np.float64:
            columns.append(part.iloc[some].to_numpy(np.float64, na_value=np.nan))
        else:
            columns.append(part.iloc[some].to_numpy(dtype))
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
    if nnz > _MOST_NONZEROS:
        raise DataError(f"{path}: {nnz:,} nonzeros in one shard, at most {_MOST_NONZEROS:,}; lower cells_per_shard")
    content = hashlib.sha256("\n".join(obs.index).encode())
    var = pd.DataFrame(
        {"symbol": vocabulary.symbols, "n_cells": vocabulary.n_cells, "median": vocabulary.medians},
        index=pd.Index(vocabulary.gene_ids, name="gene_id", dtype=object),
    )

    def blocks() -> Iterator[sp.csr_matrix]:
        for block in _ordered_blocks(cells, datasets, sources, vocabulary.n_genes, weights):
            counted = (block.indptr.astype("<i8"), block.indices.astype("<i4"), block.data.astype("<u4"))
            for array in counted:
                content.update(array.tobytes())
            yield block

    with atomic_path(path) as temporary:
        write_cells(temporary, obs, var, blocks(), nnz, dtype)
        _narrow_indptr(temporary)
    return ShardEntry(path.name, len(obs), nnz, dtype.name, sha256_file(path), content.hexdigest())


def _narrow_indptr(path: Path) -> None:
    """int32, as the indices are: rows in rank order are not sorted, and scipy sorts only where both have one type."""
    with h5py.File(path, "r+") as file:
        indptr = file["X/indptr"][:].astype("<i4")
        del file["X/indptr"]
        file["X"].create_dataset("indptr", data=indptr)


def _ordered_blocks(
    cells: _Cells, datasets: list[_Dataset], sources: list[RowFile], n_genes: int, weights: np.ndarray
) -> Iterator[sp.csr_matrix]:
    """Rows of a shard over the vocabulary's genes, each in rank order, some at a time."""
    starts, genes, counts = _gather(cells, sources)
    target = np.concatenate([dataset.target for dataset in datasets])
    columns = np.concatenate([[0], np.cumsum([source.n_vars for source in sources])])[cells.dataset]
    for first in range(0, len(cells.row), _BLOCK):
        edges = starts[first : first + _BLOCK + 1]
        of = slice(edges[0], edges[-1])
        row = target[genes[of] + np.repeat(columns[first : first + _BLOCK], np.diff(edges))]
        keep = (row >= 0) & (counts[of] > 0)
        indptr = np.concatenate([[0], np.cumsum(keep)])[edges - edges[0]]
        if (np.diff(indptr) != cells.nnz[first : first + _BLOCK]).any():
            raise DataError(f"{sources[0].path.parent}: a cells file changed while shards were made from it; run again")
        ordered, of_gene = rank_order_rows(indptr, row[keep], counts[of][keep], weights)
        yield sp.csr_matrix((of_gene, ordered, indptr), shape=(len(indptr) - 1, n_genes))


def _gather(cells: _Cells, sources: list[RowFile]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows as they lie in their files: starts, columns (int32), counts (uint32), in the order of `cells`."""
    lengths = np.zeros(len(cells.row), np.int64)
    for number, source in enumerate(sources):
        mine = cells.dataset == number
        lengths[mine] = np.diff(source.indptr)[cells.row[mine]]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    genes, counts = np.empty(starts[-1], np.int32), np.empty(starts[-1], np.uint32)

    def read(task: tuple[int, np.ndarray]) -> None:
        number, places = task
        source, row = sources[number], cells.row[places]
        for run in np.split(places, np.flatnonzero(np.diff(row) != 1) + 1):
            spans = [slice(starts[place], starts[place + 1]) for place in run]
            start, stop = source.indptr[cells.row[run[0]]], source.indptr[cells.row[run[-1]] + 1]
            source.read_genes(int(start), [genes[span] for span in spans])
            some = np.empty(stop - start, source.dtype)
            source.read_counts(int(start), [some])
            for span, at in zip(spans, np.cumsum([0, *lengths[run]])):
                counts[span] = some[at : at + span.stop - span.start]

    tasks = []
    for number in range(len(sources)):
        places = np.flatnonzero(cells.dataset == number)
        places = places[np.argsort(cells.row[places])]  # the order on disk, which disks and read-ahead like
        tasks += [(number, places[first : first + _BLOCK]) for first in range(0, len(places), _BLOCK)]
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(read, tasks))
    return starts, genes, counts


def _remove_others(folder: Path, names: set[str]) -> None:
    """Shards of an earlier, larger set."""
    for path in folder.iterdir():
        if _SHARD_NAME.fullmatch(path.name) and path.name not in names:
            path.unlink()
