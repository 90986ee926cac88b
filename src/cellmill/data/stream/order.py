"""Order of the cells in an epoch, as pure arithmetic: nothing is read.

The order is a function of (seed, epoch, lane, window) alone, so any step is reached without replaying earlier ones.
Blocks of contiguous cells are permuted and dealt to `lanes`; within a lane, cells are permuted in windows of blocks.
Blocks that do not fill a round of lanes are cut by cell, so lanes differ by at most one cell. A global batch takes
`per_lane` cells of each lane, or with `equal_steps` an even part of the epoch: the same set of cells for any number of
ranks. With cells preshuffled on disk, a batch has the donor entropy of a true shuffle (3.26 of 3.27 bits).

An epoch may also read some cells several times and others not at all, by the level of an obs column (`Repeats`), with
the same number of cells, N. A cell of a level with n cells has the weight `min(max_repeats, s * n ** -exponent)`, with
s such that all weights add up to N: exponent 0 reads every cell once, 1 every level equally often. With `labelled_frac`
the L cells with a level have such weights that add up to L, times `labelled_frac * N / L`, and the other cells share
the rest. Each cell is read the whole part of its weight or once more; which ones are read once more is drawn anew each
epoch. A block then occurs as often as its most repeated cell: copy k has the cells that are read at least k times, so
copies of a cell are apart. The copies are dealt to lanes in contiguous parts, and a window has as many cells as
`window_blocks` full blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from cellmill.config.options import TrainOptions
from cellmill.config.run import Stream


def random_words(n: int, seed: int, purpose: int, *position: int) -> np.ndarray:
    """Return `n` random uint64, a function of the arguments alone (at most three of `position`).

    They are raw words, which numpy keeps stable between versions, unlike Generator.permutation.
    """
    counter = np.zeros(4, np.uint64)  # Philox itself increments the lowest word
    counter[1 : 1 + len(position)] = position
    return np.random.Philox(key=np.array([seed, purpose], np.uint64), counter=counter).random_raw(n)


def permutation(n: int, seed: int, purpose: int, *position: int) -> np.ndarray:
    """Permutation of `n`, int64, a function of its arguments alone (at most three of `position`)."""
    words = random_words(n, seed, purpose, *position)
    order = np.argsort(words)  # half the time of a stable sort, and equal without ties
    ordered = words[order]
    return np.argsort(words, kind="stable") if (ordered[1:] == ordered[:-1]).any() else order


REPEATS = 4  # purpose of the words that choose cells


@dataclass(frozen=True, eq=False)
class Repeats:
    """Repeats of the first cells of a split, those that a run reads."""

    levels: np.ndarray  # (cells,) int: number of each cell's level, from 1; 0 for cells without a level
    stream: Stream

    def counts(self, seed: int, epoch: int, first_step: int) -> np.ndarray:
        """(cells,) uint32: how often each cell is read in an epoch that begins at optimizer step `first_step`."""
        counts = np.zeros(len(self.levels), np.uint32)
        for level, total in enumerate(self.totals(first_step)):
            end = int(self._sizes[: level + 1].sum())
            cells = self._by_level[end - int(self._sizes[level]) : end]
            if not len(cells):
                continue
            each, more = divmod(total, len(cells))
            counts[cells] = each
            if more:
                drawn = random_words(len(cells), seed, REPEATS, epoch, level)
                counts[cells[np.argpartition(drawn, more - 1)[:more]]] += 1
        return counts

    def totals(self, first_step: int) -> list[int]:
        """Cells that are read of each level in an epoch that begins at `first_step`; their sum is the split's cells."""
        stream = self.stream
        part = 1.0 if not stream.weight_warmup_steps else min(1.0, first_step / stream.weight_warmup_steps)
        before, after = self._weights(stream.weight_start_exponent), self._weights(stream.weight_exponent)
        exact = self._sizes * ((1 - part) * before + part * after)
        totals = np.floor(exact).astype(np.int64)
        # whole cells: the largest remainders are rounded up
        left = len(self.levels) - int(totals.sum())
        totals[np.argsort(totals - exact, kind="stable")[:left]] += 1
        return [int(total) for total in totals]

    def _weights(self, exponent: float) -> np.ndarray:
        sizes, n, most = self._sizes, len(self.levels), self.stream.max_repeats
        frac, known = self.stream.labelled_frac, n - int(sizes[0])
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
    def _by_level(self) -> np.ndarray:
        return np.argsort(self.levels, kind="stable")


def weights(sizes: np.ndarray, exponent: float, most: float) -> np.ndarray:
    """Weight of a cell of each level, (levels,) float64: `min(most, s * size ** -exponent)`, 1 on the mean of cells.

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


BLOCKS, WINDOW, SHARDS = 1, 2, 3  # purpose of a permutation: part of its key


@dataclass(frozen=True)
class Runs:
    """Runs of contiguous cells: number of the shard, first cell in it and number of cells; all int64."""

    shard: np.ndarray
    first: np.ndarray
    n: np.ndarray

    def __getitem__(self, item: slice | np.ndarray) -> Runs:
        return Runs(self.shard[item], self.first[item], self.n[item])

    def __add__(self, other: Runs) -> Runs:
        return _joined([self, other])

    def cut(self, start: int, stop: int) -> Runs:
        """Cells `start:stop` of the concatenated runs."""
        ends = np.cumsum(self.n)
        low = np.clip(start - (ends - self.n), 0, self.n)
        high = np.clip(stop - (ends - self.n), 0, self.n)
        return Runs(self.shard, self.first + low, high - low)[high > low]


@dataclass(frozen=True)
class EpochLayout:
    """Everything but the epoch that defines the order of a split's cells."""

    shard_cells: tuple[int, ...]  # number of cells in each shard
    lanes: int
    block_cells: int
    window_blocks: int
    global_batch: int
    seed: int
    shuffle: bool
    max_cells: int | None = None
    equal_steps: bool = False
    repeats: Repeats | None = None  # None reads each cell once; see `RepeatedEpoch`

    @cached_property
    def n_cells(self) -> int:
        total = sum(self.shard_cells)
        return total if self.max_cells is None else min(total, self.max_cells)

    @property
    def per_lane(self) -> int:
        """Cells per lane and global batch."""
        return self.global_batch // self.lanes

    @property
    def steps_per_epoch(self) -> int:
        longest = -(-self.n_cells // self.lanes)  # lanes differ by one cell at most
        return -(-longest // self.per_lane)

    @property
    def most_cells(self) -> int:
        """Cells of the largest step."""
        return -(-self.n_cells // self.steps_per_epoch) if self.equal_steps else min(self.global_batch, self.n_cells)

    def lanes_before(self, step: int | np.ndarray) -> np.ndarray:
        """Cells of each lane before step `step` of an epoch, `(lanes,)` int64; for its number of steps, all.

        For steps `(n, 1)`, `(n, lanes)`.
        """
        if not self.equal_steps:
            return np.minimum(step * self.per_lane, self.deal(self.n_cells))
        return self.deal(step * self.n_cells // self.steps_per_epoch)

    def steps_of(self, lane: int, places: np.ndarray) -> np.ndarray:
        """Steps of an epoch that take the cells at `places` of a lane, `(cells,)` int64 each."""
        if not self.equal_steps:
            return places // self.per_lane
        # the step before the first whose cells, dealt one by one, are more than those up to this one
        return ((places * self.lanes + lane + 1) * self.steps_per_epoch - 1) // self.n_cells

    def before(self, step: int) -> int:
        """Cells of all lanes before step `step` of an epoch."""
        return int(self.lanes_before(step).sum())

    def deal(self, cells: int | np.ndarray) -> np.ndarray:
        """Cells of each lane if `cells` are dealt one by one."""
        return -((np.arange(self.lanes) - cells) // self.lanes)


def epoch_of(options: TrainOptions, n_cells: int) -> EpochLayout:
    """Return the layout of the epochs of a run over `n_cells` training cells, for its steps and their cells."""
    stream, train = options.stream, options.train
    order = (stream.lanes, stream.block_cells, stream.window_blocks, train.global_batch, train.seed)
    return EpochLayout((n_cells,), *order, shuffle=True, equal_steps=stream.equal_steps)


class Epoch:
    """Order of one epoch.

    Attributes: `lanes`, one `Runs` each; `lane_cells`, the number of cells in each; `borders`, for each lane the first
    cell of each of its windows, followed by the lane's number of cells.
    """

    def __init__(self, layout: EpochLayout, epoch: int):
        self.layout, self.epoch = layout, epoch
        full, short = _blocks(layout)
        if layout.shuffle:
            full = full[permutation(len(full.n), layout.seed, BLOCKS, epoch, 0)]
            short = short[permutation(len(short.n), layout.seed, BLOCKS, epoch, 1)]
        dealt = len(full.n) // layout.lanes * layout.lanes
        rest = full[dealt:] + short
        cuts = np.cumsum([0, *layout.deal(int(rest.n.sum()))]).tolist()
        self.lanes = [
            full[lane : dealt : layout.lanes] + rest.cut(cuts[lane], cuts[lane + 1]) for lane in range(layout.lanes)
        ]
        self.lane_cells = [int(runs.n.sum()) for runs in self.lanes]
        self.borders = []
        for runs in self.lanes:
            ends = np.cumsum(runs.n)
            window_ends = ends[layout.window_blocks - 1 :: layout.window_blocks]
            self.borders.append(np.unique(np.concatenate([[0], window_ends, ends[-1:]])))

    def window_runs(self, lane: int, window: int) -> Runs:
        """Runs of cells in window `window` of `lane`."""
        size = self.layout.window_blocks
        return self.lanes[lane][window * size : (window + 1) * size]

    def window_order(self, lane: int, window: int) -> np.ndarray:
        """Permutation of the cells of the window's concatenated runs."""
        cells = int(self.borders[lane][window + 1] - self.borders[lane][window])
        if not self.layout.shuffle:
            return np.arange(cells)
        return permutation(cells, self.layout.seed, WINDOW, window, lane, self.epoch)


def _blocks(layout: EpochLayout) -> tuple[Runs, Runs]:
    """Full blocks of the first `n_cells` cells, and the shorter blocks at the ends of shards."""
    left, size = layout.n_cells, layout.block_cells
    full, short = [], []
    for shard, cells in enumerate(layout.shard_cells):
        cells = min(cells, left)
        left -= cells
        whole = cells // size
        full.append(_runs(shard, np.arange(whole) * size, size))
        short.append(_runs(shard, np.arange(whole * size, cells, size), cells % size))
    return _joined(full), _joined(short)


def _runs(shard: int, first: np.ndarray, n: int) -> Runs:
    return Runs(np.full(len(first), shard), first, np.full(len(first), n))


def _joined(runs: list[Runs]) -> Runs:
    return Runs(*(np.concatenate([getattr(r, name) for r in runs]) for name in ("shard", "first", "n")))


COPIES = 2  # last word of the key of the permutation of copies; 0 and 1 are for full and short blocks


class RepeatedEpoch(Epoch):
    """Order of one epoch of a layout with `repeats`, without `lanes`."""

    def __init__(self, layout: EpochLayout, epoch: int):
        assert layout.repeats is not None
        self.layout, self.epoch = layout, epoch
        counts = layout.repeats.counts(layout.seed, epoch, epoch * layout.steps_per_epoch)
        self._first_cell = np.concatenate([[0], np.cumsum(layout.shard_cells)])
        self._counts = np.pad(counts, (0, int(self._first_cell[-1]) - len(counts)))
        starts, sizes = self._blocks()
        block, self._copy, n = self._copies(starts)
        order = permutation(len(block), layout.seed, BLOCKS, epoch, COPIES)
        self._copy, self._n = self._copy[order], n[order]
        self._starts, self._sizes = starts[block[order]], sizes[block[order]]
        self._ends = np.cumsum(self._n)
        self.lane_cells = layout.deal(layout.n_cells).tolist()
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

    def _blocks(self) -> tuple[np.ndarray, np.ndarray]:
        """First cell of each block of the split, counted over all shards, and number of its cells."""
        size = self.layout.block_cells
        starts = [first + np.arange(0, n, size) for first, n in zip(self._first_cell, self.layout.shard_cells)]
        joined = np.concatenate(starts).astype(np.int64)
        return joined, np.diff(np.append(joined, self._first_cell[-1]))

    def _copies(self, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Block, number from 1, and cells of each copy that has any."""
        parts: list[tuple[np.ndarray, ...]] = []
        left = np.flatnonzero(self._counts)  # few cells may have many copies
        while len(left):
            block = np.searchsorted(starts, left, side="right") - 1
            begins = np.flatnonzero(np.diff(block, prepend=-1))
            parts.append((block[begins], np.full(len(begins), len(parts) + 1), np.diff(np.append(begins, len(left)))))
            left = left[self._counts[left] > len(parts)]
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


def epoch_order(layout: EpochLayout, epoch: int) -> Epoch:
    """Return the order of an epoch of `layout`."""
    return Epoch(layout, epoch) if layout.repeats is None else RepeatedEpoch(layout, epoch)
