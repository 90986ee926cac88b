"""Order of the cells in an epoch, as pure arithmetic: nothing is read.

The order is a pure function of (seed, epoch, lane, window), so any step of any epoch is reached without replaying
earlier ones. Blocks of contiguous cells are permuted and dealt to `lanes`; within a lane, cells are permuted in
windows of blocks. Blocks that do not fill a round of lanes are cut by cell, so lanes differ by at most one cell. A
global batch takes a fixed number of cells from each lane and is therefore the same set of cells for any number of
ranks: `per_lane`, and at the end of an epoch what is left, or with `equal_steps` an even part of the epoch. With cells
preshuffled on disk, a batch has the donor entropy of a true shuffle (3.26 of 3.27 bits).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cellmill.config.options import TrainOptions
from cellmill.data.random_words import permutation
from cellmill.data.repeats import Repeats

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
    repeats: Repeats | None = None  # None reads each cell once; see `data.repeated_epoch`

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

    def lanes_before(self, step: int) -> np.ndarray:
        """Cells of each lane before step `step` of an epoch, `(lanes,)` int64; for its number of steps, all."""
        if not self.equal_steps:
            return np.minimum(step * self.per_lane, self._dealt(self.n_cells))
        return self._dealt(step * self.n_cells // self.steps_per_epoch)

    def steps_of(self, lane: int, places: np.ndarray) -> np.ndarray:
        """Steps of an epoch that take the cells at `places` of a lane, `(cells,)` int64 each."""
        if not self.equal_steps:
            return places // self.per_lane
        # the step before the first whose cells, dealt one by one, are more than those up to this one
        return ((places * self.lanes + lane + 1) * self.steps_per_epoch - 1) // self.n_cells

    def before(self, step: int) -> int:
        """Cells of all lanes before step `step` of an epoch."""
        return int(self.lanes_before(step).sum())

    def _dealt(self, cells: int) -> np.ndarray:
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
        share, extra = divmod(int(rest.n.sum()), layout.lanes)
        cuts = np.cumsum([0] + [share + (lane < extra) for lane in range(layout.lanes)]).tolist()
        self.lanes = [
            full[lane : dealt : layout.lanes] + rest.cut(cuts[lane], cuts[lane + 1]) for lane in range(layout.lanes)
        ]
        self.lane_cells = [int(runs.n.sum()) for runs in self.lanes]
        self.borders = [_borders(runs, layout.window_blocks) for runs in self.lanes]

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


def _borders(runs: Runs, window_blocks: int) -> np.ndarray:
    ends = np.cumsum(runs.n)
    return np.unique(np.concatenate([[0], ends[window_blocks - 1 :: window_blocks], ends[-1:]]))
