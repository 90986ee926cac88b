"""Numbers of genes of the cells in other ranks' lanes, without reading a cell.

Every rank needs them at each step, to know how many micro-batches the others cut. They are kept in one table with a row
per lane, so that a step costs a few numpy calls for any number of lanes. Windows of lanes end at the same step: looking
up 1,024 of them only when needed took more than a second at once. So lanes get their next window early, one after
another, at each step as many cells as the step consumes.
"""

from collections.abc import Iterator, Sequence

import numpy as np


class LaneLengths:
    """Lengths of the cells of some lanes in stream order, from the lengths of each lane's windows, `(cells,)` each.

    `skipped` are the cells of its first window that each lane does not take.
    """

    def __init__(self, windows: Sequence[Iterator[np.ndarray]], skipped: Sequence[int]) -> None:
        self._windows = windows
        self._kept = np.zeros((len(windows), 0), np.int32)
        self._at = np.zeros(len(windows), np.int64)  # of each lane, the next cell's column in the table
        self._end = np.zeros(len(windows), np.int64)
        self._next, self._due = 0, int(sum(skipped))
        for lane in range(len(windows)):
            self._look_up(lane)
        self._at += np.minimum(np.array(skipped, np.int64), self._end)
        self._widen(2 * self._kept.shape[1])  # at once: a step would wait for the copy

    def take(self, n: np.ndarray) -> np.ndarray:
        """Lengths of the next `n` cells of the lanes, `(lanes,)` int64: `(lanes, n.max())` int32, 0 behind the last."""
        if not len(n):
            return np.zeros((0, 0), np.int32)
        self._due += int(n.sum())
        while self._due > 0:
            found = self._look_up(self._next)
            self._due = self._due - found if found else 0
            self._next = (self._next + 1) % len(n)
        while len(short := np.flatnonzero(self._end - self._at < n)):
            for lane in short.tolist():
                if not self._look_up(lane):
                    raise IndexError(f"lane {lane} has fewer than {n[lane]} cells left")
        columns = np.arange(n.max())
        taken = self._kept[np.arange(len(n))[:, None], np.minimum(self._at[:, None] + columns, self._kept.shape[1] - 1)]
        taken[columns >= n[:, None]] = 0
        self._at += n
        return taken

    def _look_up(self, lane: int) -> int:
        """Add the lane's next window to its row; returns its number of cells, 0 at the end."""
        lengths = next(self._windows[lane], None)
        if lengths is None:
            return 0
        left = int(self._end[lane] - self._at[lane])
        self._widen(left + len(lengths))
        row = self._kept[lane]
        row[:left] = row[self._at[lane] : self._end[lane]].copy()
        row[left : left + len(lengths)] = lengths
        self._at[lane], self._end[lane] = 0, left + len(lengths)
        return len(lengths)

    def _widen(self, cells: int) -> None:
        if cells > self._kept.shape[1]:
            wider = np.zeros((len(self._kept), cells), np.int32)
            wider[:, : self._kept.shape[1]] = self._kept
            self._kept = wider
