"""Order of the cells in an epoch that reads some cells several times, and others not at all.

As in `data.shuffle`, blocks of contiguous cells are permuted and cells are permuted in windows. A block stands in the
epoch as often as its most repeated cell: its first copy has the cells that are read at least once, its second copy
those that are read at least twice, and so on, so that copies of a cell are apart. The copies are dealt to lanes in
contiguous parts that differ by one cell at most, and a window has as many cells as `window_blocks` full blocks.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from cellmill.data.random_words import permutation
from cellmill.data.shuffle import BLOCKS, WINDOW, Epoch, EpochLayout, Runs

COPIES = 2  # last word of the key of the permutation of copies; 0 and 1 are those of full and short blocks


class RepeatedEpoch:
    """Order of one epoch of a layout with `repeats`; has the attributes and methods of `Epoch` that readers use."""

    def __init__(self, layout: EpochLayout, epoch: int):
        assert layout.repeats is not None
        self.layout, self.epoch = layout, epoch
        self._counts = layout.repeats.counts(layout.seed, epoch, epoch * layout.steps_per_epoch)
        self._first_cell = np.concatenate([[0], np.cumsum(layout.shard_cells)])
        starts, sizes = self._blocks()
        block, self._copy, n = self._copies(starts)
        order = permutation(len(block), layout.seed, BLOCKS, epoch, COPIES)
        self._copy, self._n = self._copy[order], n[order]
        self._starts, self._sizes = starts[block[order]], sizes[block[order]]
        self._ends = np.cumsum(self._n)
        share, extra = divmod(layout.n_cells, layout.lanes)
        self.lane_cells = [share + (lane < extra) for lane in range(layout.lanes)]
        self._lane_first = np.concatenate([[0], np.cumsum(self.lane_cells)])
        window = layout.window_blocks * layout.block_cells
        self.borders = [np.append(np.arange(0, cells, window), cells) for cells in self.lane_cells]

    def window_runs(self, lane: int, window: int) -> Runs:
        """Runs of cells in window `window` of `lane`."""
        low, high = (int(self._lane_first[lane] + at) for at in self.borders[lane][window : window + 2])
        first, last = np.searchsorted(self._ends, [low, high - 1], side="right").tolist()
        cells = np.concatenate([self._cells(copy) for copy in range(first, last + 1)])
        before = int(self._ends[first] - self._n[first])
        return self._runs(cells[low - before : high - before])

    def window_order(self, lane: int, window: int) -> np.ndarray:
        """Permutation of the cells of the window's concatenated runs."""
        cells = int(self.borders[lane][window + 1] - self.borders[lane][window])
        return permutation(cells, self.layout.seed, WINDOW, window, lane, self.epoch)

    def _blocks(self) -> tuple[np.ndarray, np.ndarray]:
        """First cell of each block of the split, counted over all shards, and number of its cells."""
        size = self.layout.block_cells
        starts = [first + np.arange(0, n, size) for first, n in zip(self._first_cell, self.layout.shard_cells)]
        joined = np.concatenate(starts).astype(np.int64)
        return joined, np.diff(np.append(joined, self._first_cell[-1]))

    def _copies(self, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Block, number from 1, and cells of each copy that has any."""
        parts = []
        for copy in range(1, int(self._counts.max(initial=0)) + 1):
            n = np.add.reduceat(self._counts >= copy, starts, dtype=np.int64)
            block = np.flatnonzero(n)
            parts.append((block, np.full(len(block), copy), n[block]))
        blocks, copies, cells = (np.concatenate(arrays) for arrays in zip(*parts))
        return blocks, copies, cells

    def _cells(self, at: int) -> np.ndarray:
        """Cells of a copy, counted over all shards."""
        start = int(self._starts[at])
        return start + np.flatnonzero(self._counts[start : start + int(self._sizes[at])] >= self._copy[at])

    def _runs(self, cells: np.ndarray) -> Runs:
        shard = np.searchsorted(self._first_cell, cells, side="right") - 1
        begins = np.flatnonzero(np.append(True, (np.diff(cells) != 1) | (np.diff(shard) != 0)))
        shard = shard[begins]
        return Runs(shard, cells[begins] - self._first_cell[shard], np.diff(np.append(begins, len(cells))))


def shards_read(layout: EpochLayout, lanes: list[int], step: int, stop: int) -> np.ndarray:
    """Mask, `(shards,)` bool, of the shards that `lanes` read in steps `step` to `stop`, counted over all epochs.

    A layout that does not shuffle reads its one epoch, whatever the steps.
    """
    read, per_epoch = np.zeros(len(layout.shard_cells), bool), layout.steps_per_epoch
    if not layout.shuffle:
        step, stop = 0, per_epoch
    for epoch in range(step // per_epoch, -(-stop // per_epoch)):
        order = epoch_order(layout, epoch)
        first, last = (layout.lanes_before(min(max(at - epoch * per_epoch, 0), per_epoch)) for at in (step, stop))
        for lane in lanes:
            for window, (low, high) in enumerate(pairwise(order.borders[lane].tolist())):
                if high > first[lane] and low < last[lane]:
                    read[order.window_runs(lane, window).shard] = True
            if read.all():
                return read
    return read


def epoch_order(layout: EpochLayout, epoch: int) -> Epoch | RepeatedEpoch:
    """Return the order of an epoch of `layout`."""
    return Epoch(layout, epoch) if layout.repeats is None else RepeatedEpoch(layout, epoch)
