"""Numbers of every cell of a split, in arrays beside the manifest, so that a process opens only the shards it reads.

    SPLIT-offsets.npy   `(n_obs + shards,)` int32: indptr of X of each shard in turn
    SPLIT-hashes.npy    `(2, n_obs)` uint64: halves of the cells' `hash_cells`, ascending
    SPLIT-levels.npy    `(columns, n_obs)` uint16: number of each cell's level of the manifest's `obs_levels`, in order

They are mapped into memory: a page is read when a number on it is, and is shared by the processes of a node. Shards of
earlier versions have no such files, and are opened instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from cellmill.data.manifest import REMEDY, Manifest
from cellmill.errors import DataError
from cellmill.files import atomic_path, remove_incomplete
from cellmill.registry import in_one_line

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
