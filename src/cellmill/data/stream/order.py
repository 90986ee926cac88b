"""Order of the cells in an epoch, as pure arithmetic: nothing is read.

The order is a function of (seed, epoch, lane, window) alone, so any step is reached without
replaying earlier ones. Blocks of contiguous cells are permuted and dealt to `lanes`; within a lane,
cells are permuted in windows of blocks. Blocks that do not fill a round of lanes are cut by cell,
so lanes differ by at most one cell. A global batch takes `per_lane` cells of each lane, or with
`equal_steps` an even part of the epoch: the same set of cells for any number of ranks. With cells
preshuffled on disk, a batch has the donor entropy of a true shuffle (3.26 of 3.27 bits).

An epoch may also read some cells several times and others not at all, by the level of an obs column
(`Repeats`), with the same number of cells, N. A cell of a level with n cells has the weight
`min(max_repeats, s * n ** -exponent)`, with s such that all weights add up to N: exponent 0 reads
every cell once, 1 every level equally often. With `labelled_frac` the L cells with a level have
such weights that add up to L, times `labelled_frac * N / L`, and the other cells share the rest.
Each cell is read the whole part of its weight or once more; which ones are read once more is drawn
anew each epoch. A block then occurs as often as its most repeated cell: copy k has the cells that
are read at least k times, so copies of a cell are apart. The copies are dealt to lanes in
contiguous parts, and a window has as many cells as `window_blocks` full blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from cellmill.config.options import TrainOptions
from cellmill.config.run import Stream
from cellmill.data.keys import BLOCKS, REPEATS, WINDOW, permutation, random_words

# last word of the key of the permutation of copies; 0 and 1 are for full and short blocks
COPIES = 2


@dataclass(frozen=True, eq=False)
class Repeats:
    """Repeats of the first cells of a split, those that a run reads."""

    # (cells,) int: number of each cell's level, from 1; 0 for cells without a level
    levels: np.ndarray
    stream: Stream

    def counts(self, seed: int, epoch: int, first_step: int) -> np.ndarray:
        """(cells,) uint32: how often each cell is read in an epoch that begins at optimizer step
        `first_step`.
        """
        counts = np.zeros(len(self.levels), np.uint32)
        for level, (cells, total) in enumerate(
            zip(self._by_level, self._totals(first_step).tolist())
        ):
            if len(cells):
                counts[cells], more = divmod(total, len(cells))
                if more:
                    drawn = random_words(len(cells), seed, REPEATS, epoch, level)
                    counts[cells[np.argpartition(drawn, more - 1)[:more]]] += 1
        return counts

    def _totals(self, first_step: int) -> np.ndarray:
        """Cells that are read of each level, (levels,) int64, in an epoch from `first_step` on: in
        sum the split's.
        """
        stream = self.stream
        part = (
            1.0
            if not stream.weight_warmup_steps
            else min(1.0, first_step / stream.weight_warmup_steps)
        )
        before = self._weights(stream.weight_start_exponent)
        after = self._weights(stream.weight_exponent)
        exact = self._sizes * ((1 - part) * before + part * after)
        totals = np.floor(exact).astype(np.int64)
        # whole cells: the largest remainders are rounded up
        left = len(self.levels) - int(totals.sum())
        totals[np.argsort(totals - exact, kind="stable")[:left]] += 1
        return totals

    def _weights(self, exponent: float) -> np.ndarray:
        sizes = self._sizes
        n = len(self.levels)
        most = self.stream.max_repeats
        frac = self.stream.labelled_frac
        known = n - int(sizes[0])
        if frac is None or not known:
            # exactly 1 for exponent 0, where a quotient of sums may not be
            return weights(sizes, exponent, most) if exponent else np.ones(len(sizes))
        labelled = frac * n if known < n else n
        found = weights(np.append(0, sizes[1:]), exponent, most) * labelled / known
        found[0] = (n - labelled) / max(n - known, 1)
        return found

    @cached_property
    def _sizes(self) -> np.ndarray:
        return np.bincount(self.levels)

    @cached_property
    def _by_level(self) -> list[np.ndarray]:
        """Cells of each level."""
        return np.split(np.argsort(self.levels, kind="stable"), np.cumsum(self._sizes)[:-1])


def weights(sizes: np.ndarray, exponent: float, most: float) -> np.ndarray:
    """Weight of a cell of each level, (levels,) float64: `min(most, s * size ** -exponent)`, 1 on
    the mean of cells.

    `sizes`, (levels,), are numbers of cells, and may be 0; `most` is at least 1.
    """
    relative = np.maximum(sizes, 1.0) ** -exponent
    capped = np.zeros(len(sizes), bool)
    while True:  # each round caps at least one level more
        left = sizes.sum() - most * sizes[capped].sum()
        free = float((sizes * relative)[~capped].sum())
        result = np.where(capped, most, relative * (left / free if free else 0.0))
        above = ~capped & (sizes > 0) & (result > most)
        if not above.any():
            return result
        capped |= above


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
        evenly = -(-self.n_cells // self.steps_per_epoch)
        return evenly if self.stream.equal_steps else min(self.global_batch, self.n_cells)

    def lanes_before(self, step: int | np.ndarray) -> np.ndarray:
        """Cells of each lane before step `step` of an epoch, `(lanes,)` int64; for its number of
        steps, all.

        For steps `(n, 1)`, `(n, lanes)`.
        """
        if not self.stream.equal_steps:
            return np.minimum(step * self.per_lane, self.deal(self.n_cells))
        return self.deal(step * self.n_cells // self.steps_per_epoch)

    def steps_of(self, lane: int, places: np.ndarray) -> np.ndarray:
        """Steps of an epoch that take the cells at `places` of a lane, `(cells,)` int64 each."""
        if not self.stream.equal_steps:
            return places // self.per_lane
        # the step before the first whose cells, dealt one by one, are more than those up to this
        # one
        return ((places * self.stream.lanes + lane + 1) * self.steps_per_epoch - 1) // self.n_cells

    def deal(self, cells: int | np.ndarray) -> np.ndarray:
        """Cells of each lane if `cells` are dealt one by one."""
        return -((np.arange(self.stream.lanes) - cells) // self.stream.lanes)


def epoch_of(options: TrainOptions, n_cells: int) -> EpochLayout:
    """Return the layout of the epochs of a run over `n_cells` training cells, for its steps and
    their cells.
    """
    return EpochLayout(
        (n_cells,), options.stream, options.train.global_batch, options.train.seed, shuffle=True
    )


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
        stream, size = layout.stream, layout.stream.block_cells
        left = layout.n_cells
        blocks = []
        for shard, cells in enumerate(layout.shard_cells):
            n_read = min(cells, left)
            first = np.arange(0, n_read, size)
            blocks.append(
                np.stack([np.full(len(first), shard), first, np.minimum(n_read - first, size)], 1)
            )
            left -= n_read
        every = np.concatenate(blocks)
        full = every[every[:, 2] == size]
        short = every[every[:, 2] < size]
        if layout.shuffle:
            full = full[permutation(len(full), layout.seed, BLOCKS, epoch, 0)]
            short = short[permutation(len(short), layout.seed, BLOCKS, epoch, 1)]
        dealt = len(full) // stream.lanes * stream.lanes
        rest = np.concatenate([full[dealt:], short])
        cuts = np.cumsum([0, *layout.deal(int(rest[:, 2].sum()))]).tolist()
        self._lanes = [
            np.concatenate([full[lane : dealt : stream.lanes], _cut(rest, start, stop)])
            for lane, (start, stop) in enumerate(pairwise(cuts))
        ]
        self.lane_cells: list[int] = []
        self.borders: list[np.ndarray] = []
        for runs in self._lanes:
            ends = np.cumsum(runs[:, 2])
            window_ends = ends[stream.window_blocks - 1 :: stream.window_blocks]
            self.borders.append(np.unique(np.concatenate([[0], window_ends, ends[-1:]])))
            self.lane_cells.append(int(self.borders[-1][-1]))

    def window_runs(self, lane: int, window: int) -> np.ndarray:
        """Runs of cells in window `window` of `lane`."""
        size = self.layout.stream.window_blocks
        return self._lanes[lane][window * size : (window + 1) * size]

    def window_order(self, lane: int, window: int) -> np.ndarray:
        """Permutation of the cells of the window's concatenated runs."""
        cells = int(self.borders[lane][window + 1] - self.borders[lane][window])
        if not self.layout.shuffle:
            return np.arange(cells)
        return permutation(cells, self.layout.seed, WINDOW, window, lane, self.epoch)


def _cut(runs: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Cells `start:stop` of the concatenated runs."""
    shard, first, n = runs.T
    before = np.cumsum(n) - n
    low = np.clip(start - before, 0, n)
    high = np.clip(stop - before, 0, n)
    return np.stack([shard, first + low, high - low], 1)[high > low]


class RepeatedEpoch(Epoch):
    """Order of one epoch of a layout with `repeats`."""

    def __init__(self, layout: EpochLayout, epoch: int):
        assert layout.repeats is not None
        self.layout = layout
        self.epoch = epoch
        size = layout.stream.block_cells
        counts = layout.repeats.counts(layout.seed, epoch, epoch * layout.steps_per_epoch)
        self._first_cell = np.cumsum([0, *layout.shard_cells])
        self._counts = np.pad(counts, (0, int(self._first_cell[-1]) - len(counts)))
        # first cell of each block, counted over all shards
        shards = zip(self._first_cell, layout.shard_cells)
        starts = np.concatenate([first + np.arange(0, n, size) for first, n in shards])
        stops = np.append(starts[1:], self._first_cell[-1])
        # first cell and end of the block, number from 1, and cells: of copies with any
        copies: list[np.ndarray] = []
        left = np.flatnonzero(self._counts)  # few cells may have many copies
        while len(left):
            block = np.searchsorted(starts, left, side="right") - 1
            begins = np.flatnonzero(np.diff(block, prepend=-1))
            number = np.full(len(begins), len(copies) + 1)
            cells = np.diff(np.append(begins, len(left)))
            copies.append(np.stack([starts[block[begins]], stops[block[begins]], number, cells], 1))
            left = left[self._counts[left] > len(copies)]
        every = np.concatenate(copies)
        every = every[permutation(len(every), layout.seed, BLOCKS, epoch, COPIES)]
        self._copies = every[:, :3]
        self._ends = np.concatenate([[0], np.cumsum(every[:, 3])])
        self.lane_cells = layout.deal(layout.n_cells).tolist()
        self._lane_first = np.cumsum([0, *self.lane_cells])
        window = layout.stream.window_blocks * size
        self.borders = [np.append(np.arange(0, cells, window), cells) for cells in self.lane_cells]

    def window_runs(self, lane: int, window: int) -> np.ndarray:
        """Runs of cells in window `window` of `lane`."""
        low, high = (
            int(self._lane_first[lane] + border)
            for border in self.borders[lane][window : window + 2]
        )
        first, last = (np.searchsorted(self._ends, [low, high - 1], side="right") - 1).tolist()
        cells_of_copies = [
            start + np.flatnonzero(self._counts[start:stop] >= number)
            for start, stop, number in self._copies[first : last + 1].tolist()
        ]
        before = int(self._ends[first])
        # counted over all shards
        cells = np.concatenate(cells_of_copies)[low - before : high - before]
        shard = np.searchsorted(self._first_cell, cells, side="right") - 1
        begins = np.flatnonzero(np.append(True, (np.diff(cells) != 1) | (np.diff(shard) != 0)))
        first_cell = cells[begins] - self._first_cell[shard[begins]]
        return np.stack([shard[begins], first_cell, np.diff(np.append(begins, len(cells)))], 1)


def epoch_order(layout: EpochLayout, epoch: int) -> Epoch:
    """Return the order of an epoch of `layout`."""
    return Epoch(layout, epoch) if layout.repeats is None else RepeatedEpoch(layout, epoch)
