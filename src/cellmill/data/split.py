"""The split of cells into train, val and test, by a cell's content or by its value in an obs column.

It is a pure function. The vocabulary stage calls it before the shards are planned, so that genes and
medians come from training cells.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from cellmill.data import compiled_loops
from cellmill.data.keys import SECOND_HASH, hash_text, splitmix64
from cellmill.errors import DataError, did_you_mean

# hashes of the counts below 2**16: looking one up takes a third of the time of computing it
_SMALL_COUNTS = splitmix64(np.arange(1 << 16, dtype=np.uint64))
# cells hashed at a time: their numbers fit into a core's cache, a third less time than with 1,024
_CELLS_AT_ONCE = 32


def hash_genes(gene_ids: Iterable[str]) -> np.ndarray:
    """Hash each gene id for `hash_cells`, `(genes,)` uint64."""
    return np.array([hash_text(name) for name in gene_ids], np.uint64)


def hash_cells(
    offsets: np.ndarray, genes: np.ndarray, counts: np.ndarray, gene_hashes: np.ndarray
) -> np.ndarray:
    """Hash the (gene id, count) pairs of each cell, in any order, to 128 bits: `(cells, 2)` uint64.

    Cells are CSR rows: `offsets`, `(cells + 1,)`, and `genes` and `counts`, `(nonzeros,)`. `genes` are
    indices into `gene_hashes`. The first half of a hash decides the split. Cells with equal hashes are
    equal: among a billion different cells two collide with probability 10^-21.
    """
    return splitmix64(sum_pairs(offsets, genes, counts, gene_hashes))


def hash_pairs(gene_hashes: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Hash pairs of a gene and a count, uint64: what each adds to the first of the sums of `sum_pairs`."""
    return splitmix64(gene_hashes ^ splitmix64(counts.astype(np.uint64)))


def sum_pairs(
    offsets: np.ndarray, genes: np.ndarray, counts: np.ndarray, gene_hashes: np.ndarray
) -> np.ndarray:
    """Sum two hashes of each cell's pairs modulo 2**64, `(cells, 2)` uint64.

    The sums do not depend on the order of the pairs. Arguments are as in `hash_cells`.
    """
    sums = np.zeros((len(offsets) - 1, 2), np.uint64)
    loops = compiled_loops.COMPILED.loops_for(len(counts))
    if loops is not None and counts.dtype in ("uint16", "uint32"):
        offsets = np.require(offsets, np.int64, ["C", "W"])
        genes = np.require(genes, np.int32, ["C", "W"])
        counts = np.require(counts, counts.dtype, ["C", "W"])
        loops.sum_hashes(offsets, genes, counts, gene_hashes, _SMALL_COUNTS, sums)
    else:
        _sum_hashes(offsets, genes, counts, gene_hashes, sums)
    return sums


def _sum_hashes(
    offsets: np.ndarray,
    genes: np.ndarray,
    counts: np.ndarray,
    gene_hashes: np.ndarray,
    sums: np.ndarray,
) -> None:
    """Fill `sums`, zeros of `(cells, 2)`, by numpy; see `sum_pairs`."""
    are_small = not len(counts) or counts.max() < len(_SMALL_COUNTS)
    for first in range(0, len(sums), _CELLS_AT_ONCE):
        block_offsets = offsets[first : first + _CELLS_AT_ONCE + 1]
        nonzeros = slice(block_offsets[0], block_offsets[-1])
        block_counts = counts[nonzeros]
        pairs = gene_hashes.take(genes[nonzeros])
        if are_small:
            pairs ^= _SMALL_COUNTS.take(block_counts)
        else:
            pairs ^= splitmix64(block_counts.astype(np.uint64))
        filled = np.flatnonzero(np.diff(block_offsets))
        if not len(filled):
            continue
        starts = block_offsets[filled] - block_offsets[0]
        splitmix64(pairs, in_place=True)
        sums[first + filled, 0] = np.add.reduceat(pairs, starts)
        pairs ^= SECOND_HASH
        splitmix64(pairs, in_place=True)
        sums[first + filled, 1] = np.add.reduceat(pairs, starts)


def split_of_hashes(hashes: np.ndarray, seed: int, val_frac: float, test_frac: float) -> np.ndarray:
    """Assign cells to splits by their hashes, `(cells,)` int8: indices into `SPLITS`.

    A cell's split does not depend on other cells.
    """
    mixed = splitmix64(hashes ^ splitmix64(np.array([seed], np.uint64)))
    uniform = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    split = np.zeros(len(hashes), np.int8)
    split[uniform < test_frac + val_frac] = 1
    split[uniform < test_frac] = 2
    return split


def split_by_content(
    hashes: np.ndarray, seed: int, val_frac: float, test_frac: float
) -> np.ndarray:
    """Do the same as `split_of_hashes`. Raises DataError if a split with a fraction above 0 is empty."""
    split = split_of_hashes(hashes, seed, val_frac, test_frac)
    for index, name, frac in (
        (0, "train", 1 - val_frac - test_frac),
        (1, "val", val_frac),
        (2, "test", test_frac),
    ):
        if frac > 0 and not (split == index).any():
            remedy = "lower val_frac or test_frac"
            if name != "train":
                remedy = f"raise shard.{name}_frac, change shard.seed"
            raise DataError(
                f"the {name} split of {len(hashes):,} cells ({len(np.unique(hashes)):,} distinct) is empty "
                f"at a fraction of {frac:g}; {remedy} or add cells"
            )
    return split


def split_by_value(
    values: np.ndarray,
    column: str,
    seed: int,
    val_frac: float,
    test_frac: float,
    train_values: Sequence[str] = (),
) -> np.ndarray:
    """Assign cells to splits by a value, `(cells,)` int8: indices into `SPLITS`.

    `values`, `(cells,)`, are text; cells with the same value stay together. Values are sorted by a
    seeded hash. A fraction of them, at least one, goes to test, and the next to val. Values in
    `train_values` go to train, and count for no fraction. Raises DataError if there are too few values,
    or if no cell has one of `train_values`.
    """
    code, unique = pd.factorize(values, sort=True)
    missing = sorted({*train_values} - {*unique})
    if missing:
        hint = did_you_mean(missing[0], unique.tolist())
        raise DataError(
            f"shard.train_values: no cell of the corpus has {column} {missing[0]!r}; {hint}"
        )
    order = [i for i, value in enumerate(unique) if value not in train_values]
    order.sort(key=lambda i: (hash_text(unique[i], seed), unique[i]))
    n_test = max(1, round(test_frac * len(order))) if test_frac > 0 else 0
    n_val = max(1, round(val_frac * len(order))) if val_frac > 0 else 0
    if not order and n_test + n_val:
        raise DataError(
            f"shard.train_values has every value of {column}, so none is left for val and test; leave one out, or "
            "set shard.val_frac and test_frac to 0"
        )
    if n_test + n_val > len(order) - (not train_values):
        values_text = f"only {len(unique)} values"
        if len(unique) == 1:
            values_text = f"only the value {str(unique[0])!r}"
        splits = ["train"] + ["val"] * (n_val > 0) + ["test"] * (n_test > 0)
        raise DataError(
            f"shard.split_by {column!r} has {values_text}, too few to split into {' and '.join(splits)}; "
            "split by another column, set a fraction to 0, or leave split_by null"
        )
    split_of_value = np.zeros(len(unique), np.int8)
    split_of_value[order[:n_test]] = 2
    split_of_value[order[n_test : n_test + n_val]] = 1
    return split_of_value[code]
