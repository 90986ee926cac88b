"""Arithmetic on CSR blocks of counts: selecting columns, row sums, counts per 10,000."""

from typing import Any

import numpy as np
import scipy.sparse as sp

TARGET_SUM = 10_000.0  # counts of a cell after normalisation, as `target_sum` of `scanpy.pp.normalize_total`


def select_columns(block: sp.csr_matrix, target: np.ndarray, n_columns: int) -> sp.csr_matrix:
    """Move column j of `block` to column `target[j]` (int32); -1 drops it.

    Columns with the same target are summed. The result is canonical.
    """
    columns = target[block.indices]
    keep = columns >= 0
    if keep.all():
        indptr, data = block.indptr, block.data
    else:
        indptr = np.concatenate([[0], np.cumsum(keep)])[block.indptr]
        columns, data = columns[keep], block.data[keep]
    moved = sp.csr_matrix((data, columns, indptr), shape=(block.shape[0], n_columns))
    if not moved.has_canonical_format:
        moved = moved.copy()  # sorting is in place, and the values may be the block's own
        moved.sum_duplicates()
    return moved


def summed(block: sp.csr_matrix) -> sp.csr_matrix:
    """A canonical copy of `block`: of a sequence its composition."""
    block = block.copy()
    block.sum_duplicates()
    return block


def row_sums(block: sp.csr_matrix, values: np.ndarray | None = None) -> np.ndarray:
    """Exact int64 sum of each row of `block`, of its counts or of other `values` at the same positions."""
    total = np.concatenate([[0], np.cumsum(block.data if values is None else values, dtype=np.int64)])
    return np.diff(total[block.indptr])


def counts_per_10k(counts: np.ndarray, indptr: np.ndarray, dtype: type[np.floating[Any]] = np.float64) -> np.ndarray:
    """Scale each row of counts to a sum of 10,000; return `(nonzeros,)` of `dtype`.

    `counts`, `(nonzeros,)`, are of any integer type, above zero. Rows, which may be empty, start at `indptr`,
    `(cells + 1,)`, the first at 0.
    """
    filled = np.flatnonzero(np.diff(indptr))
    values = counts.astype(dtype)
    if not len(filled):
        return values
    first = indptr[:-1][filled]
    scale = dtype(TARGET_SUM) / np.add.reduceat(counts, first, dtype=np.int64).astype(dtype)
    # a loop, because a temporary as long as the counts costs more in allocation than the arithmetic
    for start, stop, factor in zip(first.tolist(), [*first[1:].tolist(), len(values)], scale):
        values[start:stop] *= factor
    return values
