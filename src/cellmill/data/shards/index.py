"""Index beside the manifest: values of every cell of a split, so that a process opens only the shards it reads.

    SPLIT-offsets.npy   `(n_obs + shards,)` int32: indptr of X of each shard in turn
    SPLIT-hashes.npy    `(2, n_obs)` uint64: halves of the cells' `hash_cells`, ascending
    SPLIT-levels.npy    `(columns, n_obs)` uint16: number of each cell's level of the manifest's `obs_levels`, in order
    SPLIT-numbers.npy   `(columns, n_obs)` float64: values of the manifest's `obs_numbers`, in order; NaN is missing

The arrays are mapped into memory: a page is read on first use, and is shared by the processes of a node.

Level i of an obs column is number i + 1, equal in every run, layout and split of a corpus and in exported models; 0 is
unknown: a value that the corpus does not have. Where the corpus has cells without a value, the last level stands for
a missing value. Numbers are what an objective predicts, such as an age or a protein's count.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cellmill.config.plugin import in_one_line
from cellmill.data.shards.manifest import REMEDY, Kind, Manifest
from cellmill.errors import DataError
from cellmill.files import atomic_path, remove_incomplete

MISSING = "<missing>"
DATASET = "dataset"  # column of shards that cellmill adds: the name of a cell's dataset


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


def open_index(manifest: Manifest, split: str, kind: Kind) -> np.ndarray:
    """Map an array of a split. Raises DataError when the split has no cells."""
    entry = manifest.entry(split)
    shape, dtype = {
        "offsets": ((entry.n_obs + len(entry.shards),), "<i4"),
        "hashes": ((2, entry.n_obs), "<u8"),
        "levels": ((len(manifest.obs_levels), entry.n_obs), "<u2"),
        "numbers": ((len(manifest.obs_numbers), entry.n_obs), "<f8"),
    }[kind]
    return open_array(manifest.shard_path(entry.index[kind]), shape, dtype, REMEDY)


class CellColumns:
    """Levels (int32) or numbers (float64) of some obs columns by cell: `[cells]` is `(cells, columns)`.

    `names` have been found by `Manifest.levels` or `fingerprint_with`. Reading a number of no level raises DataError
    naming the file.
    """

    def __init__(self, manifest: Manifest, split: str, kind: Literal["levels", "numbers"], names: Iterable[str]):
        names, stored = list(names), open_index(manifest, split, kind)
        self._path, is_levels = manifest.shard_path(manifest.splits[split].index[kind]), kind == "levels"
        levels = manifest.obs_levels
        self._n_levels = np.array([len(levels[name]["levels"]) for name in names], np.int32) if is_levels else None
        # in the order of a list: another program may have sorted the keys of an object
        order = sorted(levels if is_levels else manifest.obs_numbers, key=manifest.obs_columns.index)
        self._columns = [stored[order.index(name)] for name in names]

    def __getitem__(self, cells: np.ndarray | slice) -> np.ndarray:
        values = np.stack([column[cells] for column in self._columns], axis=1)
        if self._n_levels is None:
            return values
        if ((values < 1) | (values > self._n_levels)).any():
            raise DataError(f"{self._path}: damaged: it has numbers of no level of the manifest; {REMEDY}")
        return values.astype(np.int32)


def splitmix64(values: np.ndarray) -> np.ndarray:
    """Bijective mix of uint64 (Steele, Lea and Flood 2014, finalizer of SplittableRandom)."""
    mixed = values.copy()
    _mix(mixed)
    return mixed


def _mix(values: np.ndarray) -> None:
    """`splitmix64` in place, which takes half of the time."""
    shifted = np.empty_like(values)
    values += np.uint64(0x9E3779B97F4A7C15)
    for bits, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        np.right_shift(values, np.uint64(bits), out=shifted)
        values ^= shifted
        if factor > 1:
            values *= np.uint64(factor)


def hash_text(text: str, seed: int = 0) -> int:
    """64-bit hash of a text, the same on every machine."""
    key = seed.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, key=key).digest(), "little")


def hash_genes(gene_ids: Iterable[str]) -> np.ndarray:
    """One uint64 per gene id, for `hash_cells`."""
    return np.array([hash_text(name) for name in gene_ids], np.uint64)


_SMALL_COUNTS = splitmix64(np.arange(1 << 16, dtype=np.uint64))  # looked up in a third of the time
_SECOND = np.uint64(0x243F6A8885A308D3)  # key of the second half of a cell's hash: digits of pi
_HASHED = 32  # cells at a time, whose numbers fit into a core's cache: a third less time than with 1,024


def hash_cells(starts: np.ndarray, genes: np.ndarray, counts: np.ndarray, gene_hashes: np.ndarray) -> np.ndarray:
    """128 bits per cell, `(cells, 2)` uint64, of its set of (gene id, count) pairs in any order.

    CSR rows: `starts` `(cells + 1,)`, `genes` and `counts` `(nonzeros,)`; `genes` index `gene_hashes`. The first half
    decides the split. Equal hashes are equal cells: among a billion different ones two collide with probability 10^-21.
    """
    small = not len(counts) or counts.max() < len(_SMALL_COUNTS)
    sums = np.zeros((len(starts) - 1, 2), np.uint64)
    for first in range(0, len(sums), _HASHED):
        cells = slice(first, first + _HASHED)
        lengths = np.diff(starts[first : first + _HASHED + 1])
        nonzeros = slice(starts[first], starts[first] + lengths.sum())
        of_counts = counts[nonzeros]
        pairs = gene_hashes.take(genes[nonzeros])
        pairs ^= _SMALL_COUNTS.take(of_counts) if small else splitmix64(of_counts.astype(np.uint64))
        _mix(pairs)
        filled = np.flatnonzero(lengths)
        at = (starts[cells] - starts[first])[filled]
        sums[cells][filled, 0] = np.add.reduceat(pairs, at) if len(filled) else 0
        pairs ^= _SECOND
        _mix(pairs)
        sums[cells][filled, 1] = np.add.reduceat(pairs, at) if len(filled) else 0
    return splitmix64(sums)  # sums modulo 2**64: the order of a cell's pairs does not matter


def places(starts: np.ndarray) -> np.ndarray:
    """Place from 0 of each entry in its row, int64; rows start at `starts`, `(rows + 1,)`."""
    return np.arange(starts[-1]) - np.repeat(starts[:-1], np.diff(starts))


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


def level_numbers(codes: np.ndarray, values: Iterable[Any], levels: Sequence[str]) -> np.ndarray:
    """Return numbers of levels, int32, of cells whose value is `values[code]`; code -1 is a missing value."""
    number = {level: i for i, level in enumerate(levels, start=1)}
    table = [*(number.get(text_of(value), 0) for value in values), number.get(MISSING, 0)]
    return np.array(table, np.int32)[codes]


def text_of(value: Any) -> str:
    """Text of a value; whole numbers have no decimals, as a column with missing values is stored as floats."""
    is_whole = isinstance(value, float | np.floating) and float(value).is_integer()
    return str(int(value)) if is_whole else str(value)
