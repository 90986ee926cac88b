"""Whole numbers that are normalised values rounded, not counts.

Three signs, from up to 4,096 cells with at least 50 detected genes each. Counts have none: nearly every such cell has
a gene with one count, cells differ in depth by far more, and a cell of 300 genes has one with more than 10 counts (at
least 15 in six datasets of blood, cell lines and brain). Counts downsampled to one depth share the second, so it is a
warning and no error.
"""

import numpy as np
import scipy.sparse as sp

from cellmill.data.count_matrix import row_sums

_CELLS = 4096
_FEWEST = 20  # cells; fewer say nothing
_GENES = 50
_MANY_GENES, _LOW_COUNT = 300, 10  # log(1 + counts per 10,000) is at most 9.2
_SPREAD = 1.3  # 95th percentile of the cells' sums over the 5th


class RoundedCounts:
    """Collector of the first cells that are read, and what they show."""

    def __init__(self) -> None:
        self._sums: list[np.ndarray] = []
        self._smallest: list[np.ndarray] = []
        self._largest: list[np.ndarray] = []  # of cells with `_MANY_GENES` genes
        self._n_cells = 0

    def add(self, counts: sp.csr_matrix) -> None:
        """Add cells of a canonical CSR block without stored zeros."""
        rows = np.flatnonzero(np.diff(counts.indptr) >= _GENES)[: _CELLS - self._n_cells]
        if len(rows):
            block = counts[rows]
            self._sums.append(row_sums(block))
            self._smallest.append(np.minimum.reduceat(block.data, block.indptr[:-1]))
            largest = np.maximum.reduceat(block.data, block.indptr[:-1])
            self._largest.append(largest[np.diff(block.indptr) >= _MANY_GENES])
            self._n_cells += len(rows)

    def sign(self) -> str | None:
        """The sign that the cells show, in words; None if none."""
        if self._n_cells < _FEWEST:
            return None
        sums, smallest, largest = map(np.concatenate, (self._sums, self._smallest, self._largest))
        low, high = np.quantile(sums, (0.05, 0.95))
        if (above_one := float((smallest > 1).mean())) > 0.5:
            return f"{above_one:.0%} of cells have no gene with a count of 1"
        if len(largest) >= _FEWEST and (low_counts := float((largest <= _LOW_COUNT).mean())) > 0.95:
            return (
                f"{low_counts:.0%} of cells of {_MANY_GENES} genes have no count above {_LOW_COUNT}, as in logarithms"
            )
        if high < _SPREAD * low:
            return f"the sums of 90% of cells lie between {low:,.0f} and {high:,.0f}"
        return None
