"""Numbers of genes of the cells in the lanes of other ranks, each lane in the order of its steps.

From them every rank computes, at each step, how many micro-batches the other ranks cut. One table
with a row per lane has them, so that a step costs a few numpy calls for any number of lanes.
"""

from collections.abc import Iterator, Sequence

import numpy as np


class GenesPerCellQueue:
    """Queue of the numbers of genes of cells, for each of some lanes, looked up ahead of the steps.

    `windows` has an iterator per lane, which yields the numbers of genes of the cells of each window,
    `(cells,)`. `skipped` has, per lane, the number of cells to leave out of the first window. Rows of
    the table are lanes in this order.

    All lanes need their next window at the same step, and looking all of them up at once took over a
    second for 1,024 lanes. So each step looks up about as many cells as it takes.
    """

    def __init__(self, windows: Sequence[Iterator[np.ndarray]], skipped: Sequence[int]) -> None:
        self._windows = windows
        self._table = np.zeros((len(windows), 0), np.int32)
        # (lanes,): column of each lane's next cell, and the column after its last
        self._starts = np.zeros(len(windows), np.int64)
        self._stops = np.zeros(len(windows), np.int64)
        self._next_row = 0
        # cells to look up before the next step. Count skipped cells as taken: a resumed run then looks
        # as far ahead as one that was never stopped
        self._n_due = sum(skipped)
        for row in range(len(windows)):
            self._look_up(row)
        self._starts += np.array(skipped, np.int64)
        # make room for a second window now, since a step that widens the table waits for a copy
        self._widen(2 * self._table.shape[1])

    def take(self, n_cells: np.ndarray) -> np.ndarray:
        """Take the next `n_cells` cells of each lane, `(lanes,)` int64.

        Returns their numbers of genes, `(n_cells.sum(),)` int32, lane by lane.
        """
        self._n_due += int(n_cells.sum())
        # look up windows, lane after lane, of about as many cells as are due
        while self._n_due > 0:
            n_found = self._look_up(self._next_row)
            self._n_due -= n_found
            if n_found == 0:  # a lane has ended: look no further ahead
                self._n_due = 0
            self._next_row = (self._next_row + 1) % len(self._windows)
        while (self._stops - self._starts < n_cells).any():
            row = int((self._stops - self._starts < n_cells).argmax())
            if not self._look_up(row):
                raise IndexError(f"row {row} has fewer than {n_cells[row]} cells left")
        # for each cell taken: its row, and its column counted from the row's start
        columns = np.arange(n_cells.max())
        rows, column = np.nonzero(columns < n_cells[:, None])
        genes_per_cell = self._table[rows, self._starts[rows] + column]
        self._starts += n_cells
        return genes_per_cell

    def _look_up(self, row: int) -> int:
        """Add the next window of a lane to its row. Return the window's number of cells, 0 at the end."""
        genes_per_cell = next(self._windows[row], None)
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
