"""Assignment of cells to train, val and test: by a hash of a cell's counts, or by the values of an obs column.

The hash is of a cell's unordered (gene id, count) pairs and the seed: a cell falls into the same split in any file,
row or column order, so duplicates are never in two splits.
"""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from cellmill.errors import DataError, did_you_mean


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
        pairs = gene_hashes[genes[nonzeros]]
        pairs ^= _SMALL_COUNTS[of_counts] if small else splitmix64(of_counts.astype(np.uint64))
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


def split_by_content(hashes: np.ndarray, seed: int, val_frac: float, test_frac: float) -> np.ndarray:
    """Split of each cell, as int8 index into `SPLITS`. Raises DataError when one is empty."""
    mixed = splitmix64(hashes ^ splitmix64(np.array([seed], np.uint64)))
    uniform = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    split = np.where(uniform < test_frac, 2, np.where(uniform < test_frac + val_frac, 1, 0)).astype(np.int8)
    for index, name, frac in ((0, "train", 1 - val_frac - test_frac), (1, "val", val_frac), (2, "test", test_frac)):
        if frac > 0 and not (split == index).any():
            remedy = f"raise shard.{name}_frac, change shard.seed" if index else "lower val_frac or test_frac"
            raise DataError(
                f"the {name} split of {len(hashes):,} cells ({len(np.unique(hashes)):,} distinct) is empty "
                f"at a fraction of {frac:g}; {remedy} or add cells"
            )
    return split


def split_by_value(
    values: np.ndarray, column: str, seed: int, val_frac: float, test_frac: float, train_values: Sequence[str] = ()
) -> np.ndarray:
    """Split of each cell, as int8 index into `SPLITS`; cells with the same value (text) stay together.

    Values are sorted by a seeded hash; the first fraction of them, at least one, goes to test, the next to val. Those
    in `train_values` go to train, and count for no fraction. Raises DataError when there are too few, and for one of
    `train_values` that no cell has.
    """
    unique = sorted(set(values))
    if missing := sorted({*train_values} - {*unique}):
        raise DataError(
            f"shard.train_values: no cell of the corpus has {column} {missing[0]!r}; "
            f"{did_you_mean(missing[0], [str(value) for value in unique])}"
        )
    if train_values:
        kept = np.isin(values.astype(str), [*train_values])
        if kept.all() and val_frac + test_frac > 0:
            raise DataError(
                f"shard.train_values has every value of {column}, so none is left for val and test; leave one out, or "
                "set shard.val_frac and test_frac to 0"
            )
        split = np.zeros(len(values), np.int8)
        split[~kept] = split_by_value(values[~kept], column, seed, val_frac, test_frac)
        return split
    number = {value: i for i, value in enumerate(unique)}
    code = np.array([number[value] for value in values])
    order = sorted(range(len(unique)), key=lambda i: (hash_text(str(unique[i]), seed), str(unique[i])))
    n_test, n_val = (max(1, round(frac * len(unique))) if frac > 0 else 0 for frac in (test_frac, val_frac))
    if n_test + n_val >= len(unique):
        values_text = f"only the value {str(unique[0])!r}" if len(unique) == 1 else f"only {len(unique)} values"
        splits = " and ".join(name for name, n in (("train", 1), ("val", n_val), ("test", n_test)) if n)
        raise DataError(
            f"shard.split_by {column!r} has {values_text}, too few to split into {splits}; "
            "split by another column, set a fraction to 0, or leave split_by null"
        )
    of_value = np.zeros(len(unique), np.int8)
    of_value[order[:n_test]] = 2
    of_value[order[n_test : n_test + n_val]] = 1
    return of_value[code]


def require_column(column: str, columns: Iterable[str], source: str) -> None:
    """Raise DataError when the obs `columns` of `source` lack `column`."""
    known = sorted({*columns, "dataset"})
    if column not in known:
        raise DataError(f"{source}: no obs column {column!r} (shard.split_by); {did_you_mean(column, known)}")
