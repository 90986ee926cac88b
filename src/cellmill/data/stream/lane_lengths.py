"""Numbers of genes of the cells in the lanes of other ranks, in stream order.

Every rank needs them at each step, to know how many micro-batches the other ranks cut. They are
kept in one table with a row per lane, so that a step costs a few numpy calls for any number of
lanes.
"""

from collections.abc import Iterator, Sequence

import numpy as np


class LaneLengths:
    """Lengths of the cells of some lanes, from the lengths of each lane's windows, `(cells,)` each.

    `skipped` is the number of cells that each lane leaves out of its first window.

    Lanes end their windows at the same step; looking all of them up then took over a second for
    1,024 lanes. So each step looks up about as many cells as it takes.
    """

    def __init__(self, windows: Sequence[Iterator[np.ndarray]], skipped: Sequence[int]) -> None:
        self._windows = windows
        self._table = np.zeros((len(windows), 0), np.int32)
        # (lanes,): column of each lane's next cell, and the column after its last
        self._start = np.zeros(len(windows), np.int64)
        self._stop = np.zeros(len(windows), np.int64)
        self._next_lane = 0
        self._n_due = int(sum(skipped))  # cells to look up before the next step
        for lane in range(len(windows)):
            self._look_up(lane)
        self._start += np.minimum(np.array(skipped, np.int64), self._stop)
        # room for a second window; widened later, a step would wait for the copy
        self._widen(2 * self._table.shape[1])

    def take(self, n: np.ndarray) -> np.ndarray:
        """Lengths of the next `n` cells, `(lanes,)` int64, lane by lane: `(n.sum(),)` int32."""
        self._n_due += int(n.sum())
        self._look_up_due()
        while (self._stop - self._start < n).any():
            lane = int((self._stop - self._start < n).argmax())
            if not self._look_up(lane):
                raise IndexError(f"lane {lane} has fewer than {n[lane]} cells left")
        # for each cell taken: its lane, and its column counted from the lane's start
        columns = np.arange(n.max())
        lanes, column = np.nonzero(columns < n[:, None])
        lengths = self._table[lanes, self._start[lanes] + column]
        self._start += n
        return lengths

    def _look_up_due(self) -> None:
        """Look up windows, lane after lane, of about as many cells as are due."""
        while self._n_due > 0:
            n_cells = self._look_up(self._next_lane)
            # at the end of a lane, look no further ahead
            self._n_due = self._n_due - n_cells if n_cells else 0
            self._next_lane = (self._next_lane + 1) % len(self._windows)

    def _look_up(self, lane: int) -> int:
        """Add the lane's next window to its row; return its number of cells, 0 at the end."""
        lengths = next(self._windows[lane], None)
        if lengths is None:
            return 0
        start = self._start[lane]
        stop = self._stop[lane]
        left = self._table[lane, start:stop]
        joined = np.concatenate([left, lengths])
        self._widen(len(joined))
        self._table[lane, : len(joined)] = joined
        self._start[lane] = 0
        self._stop[lane] = len(joined)
        return len(lengths)

    def _widen(self, columns: int) -> None:
        n_more = columns - self._table.shape[1]
        if n_more > 0:
            after = (0, n_more)
            self._table = np.pad(self._table, ((0, 0), after))
