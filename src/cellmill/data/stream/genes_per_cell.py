"""Numbers of genes of the cells in the lanes of other data ranks.

At each step, every rank computes how many micro-batches the other ranks make. For this it needs the number
of genes of each of their cells. One table holds these numbers, with a row per lane. So a step costs only a
few numpy calls, however many lanes there are.

All lanes need their next window at about the same step. Looking up the windows of all lanes in this one
step took over a second for 1,024 lanes. So windows are looked up ahead, one lane after the other: a step
that takes n cells looks up windows with about n cells.
"""

from collections.abc import Iterator, Sequence

import numpy as np


class GenesPerCellQueue:
    """Queue with the number of genes of each cell, for several lanes.

    `genes_by_window` has an iterator for each lane. The iterator yields an array `(cells,)` for each window
    of the lane, with the number of genes of each cell in the window. `n_skipped` has the number of cells to
    leave out of each lane's first window. Row k of the table belongs to lane k of these sequences.
    """

    def __init__(
        self, genes_by_window: Sequence[Iterator[np.ndarray]], n_skipped: Sequence[int]
    ) -> None:
        self._genes_by_window = genes_by_window
        self._table = np.zeros((len(genes_by_window), 0), np.int32)
        # (lanes,): column of each lane's next cell, and the column after the lane's last cell
        self._starts = np.zeros(len(genes_by_window), np.int64)
        self._stops = np.zeros(len(genes_by_window), np.int64)
        # number of cells that were looked up, over all lanes, without the first window of each lane
        self._n_looked_up = 0
        # number of cells that were taken, over all lanes. Skipped cells count as taken, so that a resumed
        # run looks as far ahead as a run that never stopped
        self._n_taken = sum(n_skipped)
        for row in range(len(genes_by_window)):
            self._append_window(row)
        self._starts += np.array(n_skipped, np.int64)
        # make room for a second window now. Otherwise a later step would have to copy the whole table
        self._widen(2 * self._table.shape[1])
        self._next_row = 0  # `_look_ahead` continues with this row

    def take(self, n_cells: np.ndarray) -> np.ndarray:
        """Take the next cells of each lane, and return the number of genes of each cell.

        `n_cells`, `(lanes,)` int64, has the number of cells to take from each lane. Returns an array
        `(cells of all lanes,)` int32, lane after lane.
        """
        self._n_taken += int(n_cells.sum())
        self._look_ahead()
        # a lane with too few cells needs its next window now, before its turn
        is_short = self._stops - self._starts < n_cells
        for row in np.flatnonzero(is_short).tolist():
            while self._stops[row] - self._starts[row] < n_cells[row]:
                n_found = self._append_window(row)
                assert n_found, "cells of a step are in no window"
                self._n_looked_up += n_found
        # row k takes n_cells[k] entries: lanes that take 2 and 1 cells have rows 0 0 1 and positions 0 1 0
        is_taken = np.arange(n_cells.max()) < n_cells[:, None]
        rows, positions = np.nonzero(is_taken)
        genes_per_cell = self._table[rows, self._starts[rows] + positions]
        self._starts += n_cells
        return genes_per_cell

    def _look_ahead(self) -> None:
        """Look up the next windows, one lane after the other.

        Stops when the number of cells that were looked up has reached the number of cells that were taken.
        Also stops at a lane without a further window. The next step then continues with the next lane.
        """
        while self._n_looked_up < self._n_taken:
            n_found = self._append_window(self._next_row)
            self._next_row = (self._next_row + 1) % len(self._genes_by_window)
            self._n_looked_up += n_found
            if not n_found:
                break

    def _append_window(self, row: int) -> int:
        """Look up the next window of a lane, and append its numbers of genes to the lane's row.

        Returns the number of cells of the window, or 0 if the lane has no further window.
        """
        genes_per_cell = next(self._genes_by_window[row], None)
        if genes_per_cell is None:
            return 0
        # move the cells that are not yet taken to the start of the row, and the new cells behind them
        remaining = self._table[row, self._starts[row] : self._stops[row]]
        joined = np.concatenate([remaining, genes_per_cell])
        self._widen(len(joined))
        self._table[row, : len(joined)] = joined
        self._starts[row] = 0
        self._stops[row] = len(joined)
        return len(genes_per_cell)

    def _widen(self, n_columns: int) -> None:
        """Widen the table to at least `n_columns` columns."""
        n_more = n_columns - self._table.shape[1]
        if n_more > 0:
            self._table = np.pad(self._table, [(0, 0), (0, n_more)])
