"""Numbers of genes of the cells in the lanes of other ranks, step after step in each lane.

From these numbers every rank computes, at each step, how many micro-batches the other ranks make. One
table with a row per lane holds them, so that a step costs a few numpy calls for any number of lanes.

All lanes need their next window at about the same step. Looking up all of these windows in one step
took over a second for 1,024 lanes. So they are looked up ahead, lane after lane: each step looks up
windows of about as many cells as it takes.
"""

from collections.abc import Iterator, Sequence

import numpy as np


class GenesPerCellQueue:
    """Queue of the numbers of genes of cells, for each of some lanes.

    For each lane, `genes_by_window` has an iterator that yields the numbers of genes of the cells of
    each window, `(cells,)`. `skipped` has the number of cells to leave out of each lane's first window. Row
    k of the table holds lane k.
    """

    def __init__(
        self, genes_by_window: Sequence[Iterator[np.ndarray]], skipped: Sequence[int]
    ) -> None:
        self._genes_by_window = genes_by_window
        self._table = np.zeros((len(genes_by_window), 0), np.int32)
        # (lanes,): column of each lane's next cell, and the column after its last
        self._starts = np.zeros(len(genes_by_window), np.int64)
        self._stops = np.zeros(len(genes_by_window), np.int64)
        # cells looked up after each lane's first window, over all lanes
        self._n_looked_up = 0
        # cells taken, over all lanes. Skipped cells count as taken, so that a resumed run looks as far
        # ahead as one that never stopped
        self._n_taken = sum(skipped)
        for row in range(len(genes_by_window)):
            self._append_window(row)
        self._starts += np.array(skipped, np.int64)
        # make room for a second window now: to widen the table later, a step would have to copy it
        self._widen(2 * self._table.shape[1])
        self._next_row = 0  # row whose next window is looked up first

    def take(self, n_cells: np.ndarray) -> np.ndarray:
        """Take the next `n_cells` cells of each lane, `(lanes,)` int64.

        Returns their numbers of genes, `(n_cells.sum(),)` int32, lane by lane.
        """
        self._n_taken += int(n_cells.sum())
        self._look_ahead()
        # a lane that is short of cells cannot wait for its turn
        is_short = self._stops - self._starts < n_cells
        for row in np.flatnonzero(is_short).tolist():
            while self._stops[row] - self._starts[row] < n_cells[row]:
                n_found = self._append_window(row)
                assert n_found, "cells of a step are in no window"
                self._n_looked_up += n_found
        # which of the positions from each row's start on are taken
        is_taken = np.arange(n_cells.max()) < n_cells[:, None]
        rows, positions = np.nonzero(is_taken)
        genes_per_cell = self._table[rows, self._starts[rows] + positions]
        self._starts += n_cells
        return genes_per_cell

    def _look_ahead(self) -> None:
        """Look up the next windows, lane after lane, until as many cells are looked up as were taken.

        Ends earlier at a lane that has ended; the next step goes on with the lane after it.
        """
        while self._n_looked_up < self._n_taken:
            n_found = self._append_window(self._next_row)
            self._next_row = (self._next_row + 1) % len(self._genes_by_window)
            self._n_looked_up += n_found
            if not n_found:
                break

    def _append_window(self, row: int) -> int:
        """Look up the next window of a lane, and append it to the lane's row.

        Returns the window's number of cells, or 0 if the lane has ended.
        """
        genes_per_cell = next(self._genes_by_window[row], None)
        if genes_per_cell is None:
            return 0
        left = self._table[row, self._starts[row] : self._stops[row]]
        joined = np.concatenate([left, genes_per_cell])
        self._widen(len(joined))
        self._table[row, : len(joined)] = joined
        self._starts[row] = 0
        self._stops[row] = len(joined)
        return len(genes_per_cell)

    def _widen(self, n_columns: int) -> None:
        """Widen the table to at least `n_columns`."""
        n_more = n_columns - self._table.shape[1]
        if n_more > 0:
            self._table = np.pad(self._table, [(0, 0), (0, n_more)])
