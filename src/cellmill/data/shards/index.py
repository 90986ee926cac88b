"""Index beside the manifest: numbers of every cell of a split, so that a process opens only the shards it reads.

    SPLIT-offsets.npy   `(n_obs + shards,)` int32: indptr of X of each shard in turn
    SPLIT-hashes.npy    `(2, n_obs)` uint64: halves of the cells' `hash_cells`, ascending
    SPLIT-levels.npy    `(columns, n_obs)` uint16: number of each cell's level of the manifest's `obs_levels`, in order

The arrays are mapped into memory: a page is read on first use, and is shared by the processes of a node. Shards of
earlier versions have no such files, and are opened instead.

Level i of an obs column is number i + 1, equal in every run, layout and split of a corpus and in exported models; 0 is
unknown: a value that the corpus does not have. Where the corpus has cells without a value, the last level stands for
a missing value.

Numeric obs columns that an objective predicts, such as an age or a protein's count, are read from the obs of the shards
when a stream is opened, and kept in memory: 8 bytes per cell and column. A missing value is NaN.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from cellmill.config.plugin import in_one_line
from cellmill.data.shards.manifest import REMEDY, Manifest
from cellmill.errors import DataError
from cellmill.files import atomic_path, remove_incomplete

OFFSETS, HASHES, LEVELS = "offsets", "hashes", "levels"


def index_name(split: str, kind: str) -> str:
    """Name of the file of a split."""
    return f"{split}-{kind}.npy"


@contextmanager
def new_array(path: Path, shape: tuple[int, ...], dtype: str) -> Iterator[np.ndarray]:
    """An array to fill, which is complete at `path` when the block ends without an error."""
    remove_incomplete(path)
    with atomic_path(path) as temporary:
        array = np.lib.format.open_memmap(temporary, "w+", dtype, shape)
        yield array
        array.flush()


def open_array(path: Path, shape: tuple[int, ...], dtype: str | np.dtype[Any], remedy: str) -> np.ndarray:
    """Map an array of `new_array`, read-only. Raises DataError, ending in `remedy`, if it is not of `shape`."""
    if not path.is_file():
        raise DataError(f"{path}: {'not a file' if path.exists() else 'no such file'}; {remedy}")
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # a damaged header raises almost anything
        raise DataError(f"{path}: damaged: {in_one_line(error)}; {remedy}") from None
    if array.shape != shape or array.dtype != np.dtype(dtype):
        raise DataError(f"{path}: expected {dtype} of shape {shape}, got {array.dtype.str} of {array.shape}; {remedy}")
    return array.view(np.ndarray)  # slices of a memmap are slow to make


def open_index(manifest: Manifest, split: str, kind: str) -> np.ndarray | None:
    """Map an array of a split; None for shards of an earlier version."""
    entry = manifest.splits[split]
    if kind not in entry.index:
        return None
    shape, dtype = {
        OFFSETS: ((entry.n_obs + len(entry.shards),), "<i4"),
        HASHES: ((2, entry.n_obs), "<u8"),
        LEVELS: ((len(manifest.obs_levels), entry.n_obs), "<u2"),
    }[kind]
    return open_array(manifest.shard_path(entry.index[kind]), shape, dtype, REMEDY)


class LevelNumbers:
    """Numbers of levels of some obs columns, by cell: `[cells]` is `(cells, columns)` int32.

    `columns` are the numbers of all cells, `n_levels` how many levels each has. Raises DataError, naming the file
    `path`, for a number that is none of a level.
    """

    def __init__(self, path: Path, columns: Sequence[np.ndarray], n_levels: Sequence[int]):
        self._path, self._columns, self._n_levels = path, columns, np.array(n_levels, np.int32)

    def __getitem__(self, cells: np.ndarray | slice) -> np.ndarray:
        numbers = np.stack([column[cells] for column in self._columns], axis=1).astype(np.int32)
        if ((numbers < 1) | (numbers > self._n_levels)).any():
            raise DataError(f"{self._path}: damaged: it has numbers of no level of the manifest; {REMEDY}")
        return numbers


def open_levels(manifest: Manifest, split: str, levels: Mapping[str, Any]) -> LevelNumbers | None:
    """Level numbers of the columns `levels`, in their order; None for shards of an earlier version."""
    numbers = open_index(manifest, split, LEVELS)
    if numbers is None:
        return None
    # in the order of a list: another program may have sorted the keys of `obs_levels`
    known = [name for name in dict.fromkeys(manifest.obs_columns) if name in manifest.obs_levels]
    path, n_levels = manifest.shard_path(manifest.splits[split].index[LEVELS]), [len(own) for own in levels.values()]
    return LevelNumbers(path, [numbers[known.index(name)] for name in levels], n_levels)


def hash_order(hashes: np.ndarray) -> np.ndarray:
    """Order of `hashes`, `(n, 2)` uint64, by the first half, then the second; equal ones keep their order."""
    return np.lexsort((hashes[:, 1], hashes[:, 0]))


def are_in(hashes: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    """Mask, bool, of the `hashes`, `(n, 2)`, that `ordered`, `(2, m)` in ascending order, has too."""
    low, high = (np.searchsorted(ordered[0], hashes[:, 0], side=side) for side in ("left", "right"))
    found = np.zeros(len(hashes), bool)
    for i in np.flatnonzero(high > low).tolist():  # nearly always one entry
        found[i] = (ordered[1, low[i] : high[i]] == hashes[i, 1]).any()
    return found


def read_numbers(manifest: Manifest, split: str, columns: Iterable[str]) -> np.ndarray:
    """Numbers of the cells of a split, `(cells, columns)` float64. Opens all of its shards.

    Raises DataError when a column is not of numbers.
    """
    names = list(columns)
    paths = [manifest.shard_path(shard) for shard in manifest.entry(split).shards]
    # by name: a launcher, which waits for hours, needs h5py for such columns alone
    module = importlib.import_module("cellmill.data.shards.obs")
    read_shard: Callable[[Path, list[str]], np.ndarray] = module.read_shard_numbers
    return np.concatenate([read_shard(path, names) for path in paths])


MISSING = "<missing>"
DATASET = "dataset"
"""Column of shards that cellmill adds: the name of a cell's dataset."""


def level_numbers(codes: np.ndarray, values: Iterable[Any], levels: Sequence[str]) -> np.ndarray:
    """Return numbers of levels, int32, of cells whose value is `values[code]`; code -1 is a missing value."""
    number = {level: i for i, level in enumerate(levels, start=1)}
    table = [*(number.get(text_of(value), 0) for value in values), number.get(MISSING, 0)]
    return np.array(table, np.int32)[codes]


def text_of(value: Any) -> str:
    """Text of a value; whole numbers have no decimals, as a column with missing values is stored as floats."""
    is_whole = isinstance(value, float | np.floating) and float(value).is_integer()
    return str(int(value)) if is_whole else str(value)


def read_level_numbers(
    manifest: Manifest, split: str, levels: Mapping[str, Sequence[str]]
) -> LevelNumbers | np.ndarray:
    """Numbers of the cells of a split, in the order of `levels`: `[cells]` is `(cells, columns)` int32.

    Shards of an earlier version are all opened for it. Raises DataError when one cannot be read.
    """
    numbers = open_levels(manifest, split, levels)
    if numbers is not None:
        return numbers
    paths = [manifest.shard_path(shard) for shard in manifest.entry(split).shards]
    # by name: a launcher, which waits for hours, needs no h5py for shards of today
    read_shard: Callable[..., np.ndarray] = importlib.import_module("cellmill.data.shards.obs").read_shard
    return np.concatenate([read_shard(path, levels) for path in paths])
