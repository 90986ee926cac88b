"""Order of the cells in an epoch, as pure arithmetic: nothing is read.

A block is a run of contiguous cells of a shard; a lane is a share of the blocks, read by one rank;
a window is the blocks of a lane that are shuffled together. The order is a function of (seed,
epoch, lane, window) only, so any step is reached without replaying earlier ones. Blocks of
contiguous cells are permuted and dealt to `lanes`; within a lane, cells are permuted in windows of
blocks. Blocks that do not fill a round of lanes are cut by cell, so lanes differ by at most one
cell. A global batch takes `per_lane` cells of each lane, or with `equal_steps` an even part of the
epoch: the same set of cells for any number of ranks. With cells preshuffled on disk, a batch has
the donor entropy of a true shuffle (3.26 of 3.27 bits).

With `Repeats` some cells are read several times. A block then occurs as often as its most repeated
cell: copy k has the cells that are read at least k times, so copies of a cell are apart. The copies
are dealt to lanes in contiguous parts, and a window has as many cells as `window_blocks` full
blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from cellmill.config.options import TrainOptions
from cellmill.config.run import Stream
from cellmill.data.keys import BLOCKS, WINDOW, permutation
from cellmill.data.rows import row_offsets
from cellmill.data.stream.repeats import Repeats

# last word of the key of a permutation of blocks
FULL = 0
SHORT = 1
COPIES = 2


@dataclass(frozen=True)
class EpochLayout:
    """Everything but the epoch that defines the order of a split's cells."""

    shard_cells: tuple[int, ...]  # number of cells in each shard
    stream: Stream
    global_batch: int
    seed: int
    shuffle: bool
    max_cells: int | None = None
    repeats: Repeats | None = None  # None reads each cell once; see `RepeatedEpoch`

    @classmethod
    def of_run(cls, options: TrainOptions, n_cells: int) -> EpochLayout:
        """Layout of a run over `n_cells` training cells, for its steps and the cells of each."""
        train = options.train
        return cls((n_cells,), options.stream, train.global_batch, train.seed, shuffle=True)

    @cached_property
    def n_cells(self) -> int:
        total = sum(self.shard_cells)
        return total if self.max_cells is None else min(total, self.max_cells)

    @property
    def per_lane(self) -> int:
        """Cells per lane and global batch."""
        return self.global_batch // self.stream.lanes

    @property
    def steps_per_epoch(self) -> int:
        longest = -(-self.n_cells // self.stream.lanes)  # lanes differ by one cell at most
        return -(-longest // self.per_lane)

    @property
    def most_cells(self) -> int:
        """Cells of the largest step."""
        if self.stream.equal_steps:
            return -(-self.n_cells // self.steps_per_epoch)
        return min(self.global_batch, self.n_cells)

    def lanes_before(self, step: int | np.ndarray) -> np.ndarray:
        """Cells of each lane before step `step` of an epoch, `(lanes,)` int64.

        Step `steps_per_epoch` has all cells before it. Steps `(n, 1)` give `(n, lanes)`.
        """
        if not self.stream.equal_steps:
            return np.minimum(step * self.per_lane, self.deal(self.n_cells))
        return self.deal(step * self.n_cells // self.steps_per_epoch)

    def steps_of(self, lane: int, cells: np.ndarray) -> np.ndarray:
        """Step of an epoch that takes each of `cells`, positions in a lane; `(cells,)` int64."""
        if not self.stream.equal_steps:
            return cells // self.per_lane
        # number of cells dealt, one to each lane in turn, up to and including each of these
        dealt = cells * self.stream.lanes + lane + 1
        # the first step with (step + 1) * n_cells // steps_per_epoch >= dealt
        return (dealt * self.steps_per_epoch - 1) // self.n_cells

    def deal(self, cells: int | np.ndarray) -> np.ndarray:
        """Cells of each lane if `cells` are dealt one by one, `(lanes,)`."""
        # (cells - lane) / lanes, rounded up
        return -((np.arange(self.stream.lanes) - cells) // self.stream.lanes)


class Epoch:
    """Order of one epoch.

    Attributes: `lane_cells`, the number of cells in each lane; `borders`, for each lane the first cell of each of its
    windows, followed by the lane's number of cells.

    Runs of contiguous cells are `(runs, 3)` int64: number of the shard, first cell in it and number
    of cells.
    """

    def __init__(self, layout: EpochLayout, epoch: int):
        self.layout = layout
        self.epoch = epoch
        self.lane_cells: list[int] = []
        self.borders: list[np.ndarray] = []
        self._lanes: list[np.ndarray] = []  # runs of each lane
        lanes = layout.stream.lanes
        window_blocks = layout.stream.window_blocks
        blocks = _blocks_of(layout)
        is_full = blocks[:, 2] == layout.stream.block_cells
        full = blocks[is_full]
        short = blocks[~is_full]
        if layout.shuffle:
            full = full[permutation(len(full), layout.seed, BLOCKS, epoch, FULL)]
            short = short[permutation(len(short), layout.seed, BLOCKS, epoch, SHORT)]
        # blocks go round the lanes; those that do not fill a round are cut by cell
        n_dealt = len(full) // lanes * lanes
        rest = np.concatenate([full[n_dealt:], short])
        n_rest = int(rest[:, 2].sum())
        cuts = row_offsets(layout.deal(n_rest)).tolist()
        for lane, (start, stop) in enumerate(pairwise(cuts)):
            dealt = full[lane:n_dealt:lanes]
            runs = np.concatenate([dealt, _cut_runs(rest, start, stop)])
            ends = row_offsets(runs[:, 2])
            borders = np.append(ends[:-1:window_blocks], ends[-1])
            self._lanes.append(runs)
            self.borders.append(borders)
            self.lane_cells.append(int(borders[-1]))

    def n_windows(self, lane: int) -> int:
        return len(self.borders[lane]) - 1

    def window_with(self, lane: int, cell: int) -> int:
        """Number of the window with cell `cell` of a lane."""
        return int(np.searchsorted(self.borders[lane], cell, side="right")) - 1

    def window_runs(self, lane: int, window: int) -> np.ndarray:
        """Runs of cells in window `window` of `lane`."""
        size = self.layout.stream.window_blocks
        return self._lanes[lane][window * size : (window + 1) * size]

    def window_order(self, lane: int, window: int) -> np.ndarray:
        """Permutation of the cells of the window's concatenated runs."""
        borders = self.borders[lane]
        n_cells = int(borders[window + 1] - borders[window])
        if not self.layout.shuffle:
            return np.arange(n_cells)
        return permutation(n_cells, self.layout.seed, WINDOW, window, lane, self.epoch)


def _blocks_of(layout: EpochLayout) -> np.ndarray:
    """Runs of the blocks of all shards; the last block of a shard may be shorter."""
    size = layout.stream.block_cells
    n_left = layout.n_cells
    blocks = []
    for shard, n_cells in enumerate(layout.shard_cells):
        n_read = min(n_cells, n_left)
        first = np.arange(0, n_read, size)
        blocks.append(
            _stack_runs(np.full_like(first, shard), first, np.minimum(n_read - first, size))
        )
        n_left -= n_read
    return np.concatenate(blocks)


def _cut_runs(runs: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Cells `start:stop` of the concatenated runs."""
    shard, first, n = runs.T
    before = np.cumsum(n) - n  # cells of earlier runs
    # what each run keeps of itself
    low = np.clip(start - before, 0, n)
    high = np.clip(stop - before, 0, n)
    return _stack_runs(shard, first + low, high - low)[high > low]


def _stack_runs(*columns: np.ndarray) -> np.ndarray:
    return np.stack(columns, axis=1)


class RepeatedEpoch(Epoch):
    """Order of one epoch of a layout with `repeats`. Cells are numbered over all shards."""

    def __init__(self, layout: EpochLayout, epoch: int):
        assert layout.repeats is not None
        self.layout = layout
        self.epoch = epoch
        size = layout.stream.block_cells
        self._shard_start = row_offsets(layout.shard_cells)
        n_cells = int(self._shard_start[-1])
        counts = layout.repeats.counts(layout.seed, epoch, epoch * layout.steps_per_epoch)
        self._counts = np.pad(counts, (0, n_cells - len(counts)))
        # first cell of each block, and the cell after its last
        shards = zip(self._shard_start, layout.shard_cells)
        starts = np.concatenate([first + np.arange(0, n, size) for first, n in shards])
        stops = np.append(starts[1:], n_cells)
        # each copy is a row: first cell and end of its block, its number from 1, cells in it
        copies: list[np.ndarray] = []
        # cells with a further copy: fewer each round, because few cells have many copies
        left = np.flatnonzero(self._counts)
        while len(left):
            number = len(copies) + 1
            block_of_cell = np.searchsorted(starts, left, side="right") - 1
            # the first of these cells in each block
            begins = np.flatnonzero(np.diff(block_of_cell, prepend=-1))
            block = block_of_cell[begins]
            n_copied = np.diff(begins, append=len(left))
            numbers = np.full_like(block, number)
            copies.append(_stack_runs(starts[block], stops[block], numbers, n_copied))
            left = left[self._counts[left] > number]
        shuffled = np.concatenate(copies)
        shuffled = shuffled[permutation(len(shuffled), layout.seed, BLOCKS, epoch, COPIES)]
        self._copies = shuffled[:, :3]
        self._copy_start = row_offsets(shuffled[:, 3])
        self.lane_cells = layout.deal(layout.n_cells).tolist()
        self._lane_start = row_offsets(self.lane_cells)
        window = layout.stream.window_blocks * size
        self.borders = [np.append(np.arange(0, n, window), n) for n in self.lane_cells]

    def window_runs(self, lane: int, window: int) -> np.ndarray:
        """Runs of cells in window `window` of `lane`."""
        span = self._lane_start[lane] + self.borders[lane][window : window + 2]
        low, high = span.tolist()
        # the copies that hold the window's cells, and the cells in them
        first_last = np.searchsorted(self._copy_start, [low, high - 1], side="right") - 1
        first, last = first_last.tolist()
        copied = []
        for start, stop, number in self._copies[first : last + 1].tolist():
            is_copied = self._counts[start:stop] >= number
            copied.append(start + np.flatnonzero(is_copied))
        skipped = low - int(self._copy_start[first])
        cells = np.concatenate(copied)[skipped : skipped + high - low]
        # a run continues while the next cell follows in the same shard
        shard = np.searchsorted(self._shard_start, cells, side="right") - 1
        continues = (np.diff(cells) == 1) & (np.diff(shard) == 0)
        begins = np.flatnonzero(np.append(True, ~continues))
        shard = shard[begins]
        first_cell = cells[begins] - self._shard_start[shard]
        return _stack_runs(shard, first_cell, np.diff(begins, append=len(cells)))


def epoch_order(layout: EpochLayout, epoch: int) -> Epoch:
    """Return the order of an epoch of `layout`."""
    kind = Epoch if layout.repeats is None else RepeatedEpoch
    return kind(layout, epoch)
