"""Arrays with an entry for every cell of a split: the index of the shards, and the vectors of a teacher.

The index is next to the manifest. With it, a process opens only the shards that it reads:

    SPLIT-offsets.npy   `(n_obs + shards,)` int32: `PackedCellFile.indptr` of all shards, shard after shard
    SPLIT-borders.npy   `(2 * n_obs + shards,)` uint32: `PackedCellFile.part_offsets` of all shards, shard after shard
    SPLIT-hashes.npy    `(2, n_obs)` uint64: first and second half of each cell's hash (`hash_cells`). The hashes ascend
    SPLIT-levels.npy    `(columns, n_obs)` uint16: level code of each cell. The columns are those of the manifest's
                        `obs_levels`, in the order of `obs_columns`
    SPLIT-numbers.npy   `(columns, n_obs)` float64: number of each cell; NaN is missing. The columns are those of the
                        manifest's `obs_numbers`, in the order of `obs_columns`

Stage `teach` writes the vectors that a teacher model gives to cells. Objective `distill` reads them:

    vectors.npy     `(cells, width)` float32: vectors of the training cells, then of the validation cells, in the order
                    of the shards. A vector is NaN where the teacher has none. Over the training cells each column has
                    mean 0 and standard deviation 1, so that a loss weighs all columns alike
    vectors.json    a `TeacherVectors`. It is written last

All arrays are mapped into memory: a page is read on first use, and the processes of a node share it.

Level number i of an obs column, counted from 0, has code i + 1. The code is the same in every run, layout and split of
a corpus, and in exported models. Code 0 is an unknown value, which the corpus does not have. If the corpus has cells
without a value, the last level stands for a missing value. Numbers are what an objective predicts, such as an age or a
protein's count.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cellmill.config import check_options
from cellmill.config.parts.objective import TeacherVectors
from cellmill.config.plugin import in_one_line
from cellmill.data.rows import row_offsets
from cellmill.data.shards.manifest import (
    REMEDY,
    TRAINING_SPLITS,
    IndexEntry,
    IndexKind,
    Manifest,
    name_index_file,
)
from cellmill.errors import DataError
from cellmill.files import atomic_path, read_json, remove_incomplete, sha256_file

ABOUT = "vectors.json"
TABLE = "vectors.npy"
INDEX_DTYPES = {
    "offsets": "<i4",
    "borders": "<u4",
    "hashes": "<u8",
    "levels": "<u2",
    "numbers": "<f8",
}
# a shard has at most this many nonzeros, because its indptr is int32
MAX_NONZEROS = np.iinfo(np.int32).max


@contextmanager
def new_array(
    path: Path, shape: tuple[int, ...], dtype: str | np.dtype[Any]
) -> Iterator[np.ndarray]:
    """Yield a new array to fill. The file appears at `path` when the `with` block ends without an error."""
    remove_incomplete(path)
    with atomic_path(path) as temporary:
        array = np.lib.format.open_memmap(temporary, "w+", dtype, shape)
        yield array
        array.flush()


def open_array(
    path: Path, shape: tuple[int, ...], dtype: str | np.dtype[Any], remedy: str
) -> np.ndarray:
    """Map the array at `path`, which `new_array` made, into memory. The array is read-only.

    Raises DataError if the file is missing or damaged, or if the array is not of `shape` and `dtype`. The
    message ends in `remedy`.
    """
    if not path.is_file():
        raise DataError(f"{path}: {'not a file' if path.exists() else 'no such file'}; {remedy}")
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # a damaged header raises almost anything
        raise DataError(f"{path}: damaged: {in_one_line(error)}; {remedy}") from None
    if array.shape != shape or array.dtype != np.dtype(dtype):
        raise DataError(
            f"{path}: expected {dtype} of shape {shape}, got {array.dtype.str} of {array.shape}; {remedy}"
        )
    return array.view(np.ndarray)  # slices of a memmap are slow to make


def new_index(
    folder: Path, split: str, kind: IndexKind, shape: tuple[int, ...]
) -> AbstractContextManager[np.ndarray]:
    """Return a context that yields a new array of the index to fill, as `new_array` does."""
    return new_array(folder / name_index_file(split, kind), shape, INDEX_DTYPES[kind])


def make_index_entry(folder: Path, split: str, kind: IndexKind) -> IndexEntry:
    """Make the manifest's entry for an array of the index whose file is complete."""
    path = folder / name_index_file(split, kind)
    return IndexEntry(name=path.name, sha256=sha256_file(path))


def write_split_index(
    folder: Path, split: str, nnz: np.ndarray, hashes: np.ndarray, cells_per_shard: int
) -> dict[IndexKind, IndexEntry]:
    """Write the arrays `offsets` and `hashes` of a split, and return their entries in the manifest.

    `nnz`, `(cells,)`, has the number of nonzeros of each cell, and `hashes`, `(cells, 2)` uint64, has its
    hash. The cells are in the order in which the shards have them. A split without cells has no arrays.
    Raises DataError if a shard has more than `MAX_NONZEROS` nonzeros.
    """
    if not len(nnz):
        return {}
    nnz_by_shard = np.split(nnz, range(cells_per_shard, len(nnz), cells_per_shard))
    indptr_by_shard = [row_offsets(shard) for shard in nnz_by_shard]
    largest = max(int(indptr[-1]) for indptr in indptr_by_shard)
    if largest > MAX_NONZEROS:
        raise DataError(
            f"{folder}: {largest:,} nonzeros in a shard, the limit is {MAX_NONZEROS:,}; lower shard.cells_per_shard"
        )
    with new_index(folder, split, "offsets", (len(nnz) + len(nnz_by_shard),)) as indptr:
        np.concatenate(indptr_by_shard, out=indptr, casting="unsafe")
    with new_index(folder, split, "hashes", (2, len(nnz))) as sorted_hashes:
        sorted_hashes[:] = hashes[np.lexsort(hashes.T[::-1])].T
    return {kind: make_index_entry(folder, split, kind) for kind in ("offsets", "hashes")}


def open_index(manifest: Manifest, split: str, kind: IndexKind) -> np.ndarray:
    """Map an array of the index into memory.

    Raises DataError if the split has no cells, or if the file is missing or damaged.
    """
    entry = manifest.entry(split)
    shape = {
        "offsets": (entry.n_obs + len(entry.shards),),
        "borders": (2 * entry.n_obs + len(entry.shards),),
        "hashes": (2, entry.n_obs),
        "levels": (len(manifest.obs_levels), entry.n_obs),
        "numbers": (len(manifest.obs_numbers), entry.n_obs),
    }[kind]
    path = manifest.shard_path(entry.index[kind])
    return open_array(path, shape, INDEX_DTYPES[kind], REMEDY)


class CellColumns:
    """Level codes or numbers of some obs columns, for the cells of a split.

    An object is indexed by cell ids or a slice. This gives `(cells, columns)`: int32 for `kind` levels, and
    float64 for `kind` numbers. `names` are the names of the columns. `Manifest.levels` or
    `Manifest.fingerprint_with` must have accepted the names before.

    Indexing raises DataError if a code is not the code of a level. The message names the file.
    """

    def __init__(
        self,
        manifest: Manifest,
        split: str,
        kind: Literal["levels", "numbers"],
        names: Iterable[str],
    ):
        names = list(names)
        self._path = manifest.shard_path(manifest.splits[split].index[kind])
        self._n_levels: np.ndarray | None = None
        stored_columns = list(manifest.obs_numbers)
        if kind == "levels":
            levels = manifest.obs_levels
            stored_columns = list(levels)
            self._n_levels = np.array([len(levels[name]["levels"]) for name in names], np.int32)
        # columns are stored in the order of the list `obs_columns`. The keys of `obs_levels` may be in another
        # order, because a program may have sorted the keys of the JSON object
        stored_columns.sort(key=manifest.obs_columns.index)
        stored = open_index(manifest, split, kind)
        self._columns = [stored[stored_columns.index(name)] for name in names]

    def __getitem__(self, cells: np.ndarray | slice) -> np.ndarray:
        values = np.stack([column[cells] for column in self._columns], axis=1)
        if self._n_levels is None:
            return values
        if ((values < 1) | (values > self._n_levels)).any():
            raise DataError(
                f"{self._path}: damaged: it has codes of no level of the manifest; {REMEDY}"
            )
        return values.astype(np.int32)


def open_vectors(
    folder: Path, manifest: Manifest, verify: bool = False
) -> tuple[TeacherVectors, dict[str, np.ndarray]]:
    """Open the vectors of a teacher. Returns the record about them, and the vectors by split.

    The vectors of a split are `(cells, width)` float32. With `verify` their bytes are hashed. Raises UserError
    if the vectors are missing or damaged, or if they were made for other shards.
    """
    path = folder / ABOUT
    about: TeacherVectors = check_options(TeacherVectors, read_json(path), str(path))
    remedy = "run teach again"
    if about.shards != manifest.fingerprint:
        raise DataError(
            f"{path}: expected vectors of shards {manifest.fingerprint[:12]}, got of {about.shards[:12]}; {remedy}"
        )
    table_path = folder / TABLE
    n_train, n_val = (manifest.splits[split].n_obs for split in TRAINING_SPLITS)
    table = open_array(table_path, (n_train + n_val, about.width), "<f4", remedy)
    if verify:
        sha256 = sha256_file(table_path)
        if sha256 != about.sha256:
            raise DataError(
                f"{table_path}: expected sha256 {about.sha256[:12]}, got {sha256[:12]}: changed; {remedy}"
            )
    return about, {"train": table[:n_train], "val": table[n_train:]}


def are_in(hashes: np.ndarray, sorted_hashes: np.ndarray) -> np.ndarray:
    """Return True for each hash that is among known hashes, `(cells,)` bool.

    `hashes`, `(cells, 2)`, has the first and the second half of each hash. `sorted_hashes`,
    `(2, known hashes)`, has the halves of the known hashes, in ascending order.

    `sorted_hashes` may also have only first halves, `(1, known hashes)`. Then only first halves are compared, and
    `hashes` may be `(cells, 1)`.
    """
    starts = np.searchsorted(sorted_hashes[0], hashes[:, 0], side="left")
    stops = np.searchsorted(sorted_hashes[0], hashes[:, 0], side="right")
    is_in = stops > starts
    if len(sorted_hashes) == 1:
        return is_in
    for i in np.flatnonzero(is_in).tolist():
        # known hashes with the same first half: nearly always a single one
        second_halves = sorted_hashes[1, starts[i] : stops[i]]
        is_in[i] = (second_halves == hashes[i, 1]).any()
    return is_in
