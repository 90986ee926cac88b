"""Which cells train, validate and test: by a hash of what a cell holds, or by an obs column kept whole.

The hash is of a cell's (gene id, count) pairs and the seed, in no order: the same cell falls into the same split
whatever file, place or column order it comes in, so duplicates never stand on both sides.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable

import numpy as np

from cellmill.errors import DataError

SPLITS = ("train", "val", "test")


def splitmix64(values: np.ndarray) -> np.ndarray:
    """A bijective mix of uint64 (Steele, Lea and Flood 2014, finalizer of SplittableRandom)."""
    with np.errstate(over="ignore"):
        z = values + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def hash_text(text: str, seed: int = 0) -> int:
    """A 64-bit hash of a text, the same on every machine."""
    key = seed.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, key=key).digest(), "little")


def hash_genes(gene_ids: Iterable[str]) -> np.ndarray:
    """One uint64 for each gene id, to hand to `hash_cells`."""
    return np.array([hash_text(name) for name in gene_ids], np.uint64)


def hash_cells(starts: np.ndarray, genes: np.ndarray, counts: np.ndarray, gene_hashes: np.ndarray) -> np.ndarray:
    """One uint64 for each cell: of its set of (gene id, count) pairs, in whatever order and columns they come.

    Parameters
    ----------
    starts, genes, counts
        Rows of CSR: `(cells + 1,)`, `(nonzeros,)`, `(nonzeros,)`; `genes` index `gene_hashes`.
    """
    pairs = splitmix64(gene_hashes[genes] ^ splitmix64(counts.astype(np.uint64)))
    total = np.zeros(len(pairs) + 1, np.uint64)
    np.cumsum(pairs, out=total[1:])  # wraps, and so do the differences: each cell's sum modulo 2**64
    return splitmix64(total[starts[1:]] - total[starts[:-1]])


def split_by_content(hashes: np.ndarray, seed: int, val_frac: float, test_frac: float) -> np.ndarray:
    """The split of each cell, as int8 index into `SPLITS`. Raises DataError where one comes out empty."""
    mixed = splitmix64(hashes ^ splitmix64(np.array([seed], np.uint64)))
    place = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    split = np.where(place < test_frac, 2, np.where(place < test_frac + val_frac, 1, 0)).astype(np.int8)
    for index, name, frac in ((0, "train", 1 - val_frac - test_frac), (1, "val", val_frac), (2, "test", test_frac)):
        if frac > 0 and not (split == index).any():
            where = f"raise shard.{name}_frac, take another shard.seed" if index else "lower val_frac or test_frac"
            raise DataError(
                f"the {name} split of {len(hashes):,} cells ({len(np.unique(hashes)):,} distinct) came out empty "
                f"at a fraction of {frac:g}; {where} or add cells"
            )
    return split


def split_by_value(values: np.ndarray, column: str, seed: int, val_frac: float, test_frac: float) -> np.ndarray:
    """The split of each cell, as int8 index into `SPLITS`, so that cells of one value (text) stay together.

    The values are put in the order of a hash with the seed; a share of them, at least one, is taken for test, then
    one for val. Raises DataError where there are too few.
    """
    unique, code = np.unique(values, return_inverse=True)
    order = sorted(range(len(unique)), key=lambda i: (hash_text(str(unique[i]), seed), str(unique[i])))
    n_test, n_val = (max(1, round(frac * len(unique))) if frac > 0 else 0 for frac in (test_frac, val_frac))
    if n_test + n_val >= len(unique):
        what = f"only the value {str(unique[0])!r}" if len(unique) == 1 else f"only {len(unique)} values"
        wanted = " and ".join(name for name, n in (("train", 1), ("val", n_val), ("test", n_test)) if n)
        raise DataError(
            f"shard.split_by {column!r} has {what}, too few to part into {wanted}; "
            "split by another column, set a fraction to 0, or leave split_by null"
        )
    of_value = np.zeros(len(unique), np.int8)
    of_value[order[:n_test]] = 2
    of_value[order[n_test : n_test + n_val]] = 1
    return of_value[code]


def require_column(column: str, columns: Iterable[str], where: str) -> None:
    """Raises DataError naming the nearest column when `columns` lack `column`."""
    known = sorted({*columns, "dataset"})
    if column not in known:
        near = difflib.get_close_matches(column, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
        raise DataError(f"{where}: no obs column {column!r} (shard.split_by); {hint}")
