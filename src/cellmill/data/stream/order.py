"""Order of the cells in an epoch, computed without reading shards.

- block: `block_cells` contiguous cells of a shard; a shard's last block may be shorter
- lane: a share of the blocks, read by one rank; lanes differ by at most one cell
- window: `window_blocks` blocks of a lane, whose cells are shuffled together

Full blocks are permuted and dealt round-robin to the lanes. Those of an incomplete round, and all
shorter blocks, are cut so that all lanes get a share. A step takes `lane_batch` cells of each lane,
or with `equal_steps` an equal share of the epoch, and it takes the same cells for any number of
ranks. The order is a function of (seed, epoch, lane, window), so any step is reached without
replaying earlier ones.

With `Repeats` some cells are read several times. The epoch then repeats a block: repeat k has the
cells that are read at least k times. Repeats are permuted like blocks, so two reads of a cell are
usually far apart. Each lane gets a contiguous part of them, and a window has as many cells as
`window_blocks` full blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cellmill.config.options import TrainOptions
from cellmill.config.run import Stream
from cellmill.data.keys import BLOCKS, WINDOW, permutation
from cellmill.data.rows import choose_rows, iterate_rows, row_offsets
from cellmill.data.stream.repeats import Repeats

# last number in the key of a permutation of blocks, so that these have independent permutations
FULL = 0  # full blocks
SHORT = 1  # shorter blocks
REPEATED = 2  # repeats of blocks


class DataRank(NamedTuple):
    """A data-parallel rank; tensor- and pipeline-parallel peers share it."""

    rank: int
    world_size: int  # number of data-parallel ranks


ONLY_RANK = DataRank(0, 1)


def lanes_of_ranks(n_lanes: int, world_size: int) -> np.ndarray:
    """List the lanes that each of `world_size` data ranks reads, `(ranks, lanes of a rank)` int64.

    Rank r has the lanes l with l % world_size == r.
    """
    return np.arange(n_lanes).reshape(-1, world_size).T


@dataclass(frozen=True)
class OrderOptions:
    """How a run orders cells, whatever the split.

    `stream` is the section of the configuration. `global_batch`, the cells per optimizer step over
    all ranks, is a multiple of `stream.lanes`.
    """

    stream: Stream
    global_batch: int
    seed: int
    shuffle: bool = True  # False: every epoch in one fixed order


@dataclass(frozen=True)
class OrderRule:
    """The rule for the order of a split's cells in any epoch."""

    options: OrderOptions
    shard_cells: tuple[int, ...]  # number of cells in each shard
    max_cells: int | None = None  # only the first cells in disk order
    repeats: Repeats | None = None  # None reads each cell once; see `RepeatedEpoch`

    @classmethod
    def for_run(cls, options: TrainOptions, n_cells: int) -> OrderRule:
        """Make a rule to count the steps of a run over `n_cells` training cells, and the cells of each."""
        train = options.train
        return cls(OrderOptions(options.stream, train.global_batch, train.seed), (n_cells,))

    @property
    def stream(self) -> Stream:
        return self.options.stream

    @property
    def n_lanes(self) -> int:
        return self.options.stream.lanes

    @cached_property
    def n_cells(self) -> int:
        total = sum(self.shard_cells)
        return total if self.max_cells is None else min(total, self.max_cells)

    @property
    def lane_batch(self) -> int:
        """Cells of a global batch that come from one lane."""
        return self.options.global_batch // self.n_lanes

    @property
    def steps_per_epoch(self) -> int:
        longest = -(-self.n_cells // self.n_lanes)  # lanes differ by one cell at most
        return -(-longest // self.lane_batch)

    @property
    def max_step_cells(self) -> int:
        """Cells of the largest step."""
        if self.stream.equal_steps:
            return -(-self.n_cells // self.steps_per_epoch)
        return min(self.options.global_batch, self.n_cells)

    def cells_before(self, step: int | np.ndarray) -> np.ndarray:
        """Count the cells of each lane that steps before `step` of an epoch take, `(lanes,)` int64.

        `steps_per_epoch` gives all cells of the epoch. Steps of shape `(n, 1)` give `(n, lanes)`.
        """
        if not self.stream.equal_steps:
            return np.minimum(step * self.lane_batch, self.cells_per_lane(self.n_cells))
        return self.cells_per_lane(step * self.n_cells // self.steps_per_epoch)

    def find_steps(self, lane: int, positions: np.ndarray) -> np.ndarray:
        """Find the step of an epoch that takes each cell of a lane: cells `positions`, `(cells,)`."""
        if not self.stream.equal_steps:
            return positions // self.lane_batch
        # number of cells dealt, one to each lane in turn, up to and including each of these
        dealt = positions * self.n_lanes + lane + 1
        # the first step with (step + 1) * n_cells // steps_per_epoch >= dealt
        return (dealt * self.steps_per_epoch - 1) // self.n_cells

    def cells_per_lane(self, n_cells: int | np.ndarray) -> np.ndarray:
        """Count the cells of each lane if `n_cells` are dealt round-robin, `(lanes,)`."""
        # (n_cells - lane) / lanes, rounded up
        return -((np.arange(self.n_lanes) - n_cells) // self.n_lanes)


class CellRuns(NamedTuple):
    """Runs of contiguous cells of a shard; `(runs,)` int64 each."""

    shards: np.ndarray  # number of the shard in its split
    starts: np.ndarray  # row of the first cell in the shard
    n_cells: np.ndarray

    @classmethod
    def join(cls, parts: list[CellRuns]) -> CellRuns:
        """Join the runs of all parts, one part after the other."""
        return cls(*map(np.concatenate, zip(*parts)))

    def cut(self, start: int, stop: int) -> CellRuns:
        """Cut out cells `start:stop`, numbered run after run."""
        n = self.n_cells
        before = np.cumsum(n) - n  # cells of earlier runs
        # start and stop of the part of each run that is kept
        low = np.clip(start - before, 0, n)
        high = np.clip(stop - before, 0, n)
        parts = CellRuns(self.shards, self.starts + low, high - low)
        return choose_rows(parts, high > low)


class BlockRepeats(NamedTuple):
    """Repeats of blocks. Cells are numbered over all shards; `(repeats,)` int64 each."""

    starts: np.ndarray  # first cell of the block
    stops: np.ndarray  # the cell after its last
    min_reads: np.ndarray  # the repeat has the cells read at least this often
    n_cells: np.ndarray  # cells in the repeat


class EpochOrder:
    """Order of one epoch: windows of cells, by lane.

    A subclass lists the runs of cells in each window. Attributes: `window_offsets` has, for each
    lane, the first cell of each window and the lane's number of cells, `(windows + 1,)`;
    `lane_cells`, the number of cells in each lane.
    """

    def __init__(self, rule: OrderRule, epoch: int, window_offsets: list[np.ndarray]):
        self.rule = rule
        self.epoch = epoch
        self.window_offsets = window_offsets
        self.lane_cells = [int(offsets[-1]) for offsets in window_offsets]

    def n_windows(self, lane: int) -> int:
        return len(self.window_offsets[lane]) - 1

    def find_window(self, lane: int, cell: int) -> int:
        """Find the number of the window that has cell `cell` of a lane."""
        return int(np.searchsorted(self.window_offsets[lane], cell, side="right")) - 1

    def window_runs(self, lane: int, window: int) -> CellRuns:
        """List the runs of the cells in window `window` of `lane`."""
        raise NotImplementedError

    def shards_in_steps(self, lanes: list[int], start: int, stop: int) -> set[int]:
        """List the numbers of the shards of the windows of `lanes` that have cells in steps `start:stop`."""
        start_cells = self.rule.cells_before(start).tolist()
        stop_cells = self.rule.cells_before(stop).tolist()
        shards = set[int]()
        for lane in lanes:
            if start_cells[lane] == stop_cells[lane]:
                continue
            first = self.find_window(lane, start_cells[lane])
            last = self.find_window(lane, stop_cells[lane] - 1)
            for window in range(first, last + 1):
                shards.update(self.window_runs(lane, window).shards.tolist())
        return shards

    def window_order(self, lane: int, window: int) -> np.ndarray:
        """Permute the cells of a window: indices into its concatenated runs, `(cells,)` int64."""
        start, stop = self.window_offsets[lane][window : window + 2].tolist()
        if not self.rule.options.shuffle:
            return np.arange(stop - start)
        return permutation(stop - start, self.rule.options.seed, WINDOW, window, lane, self.epoch)


class PlainEpoch(EpochOrder):
    """Order of one epoch that reads each cell once."""

    def __init__(self, rule: OrderRule, epoch: int):
        n_lanes = rule.n_lanes
        blocks = _list_blocks(rule)
        is_full = blocks.n_cells == rule.stream.block_cells
        full = np.flatnonzero(is_full)
        short = np.flatnonzero(~is_full)
        if rule.options.shuffle:
            full = full[permutation(len(full), rule.options.seed, BLOCKS, epoch, FULL)]
            short = short[permutation(len(short), rule.options.seed, BLOCKS, epoch, SHORT)]
        # deal full blocks round-robin; cut the rest so that lanes differ by at most one cell
        n_dealt = len(full) // n_lanes * n_lanes
        rest = choose_rows(blocks, np.concatenate([full[n_dealt:], short]))
        rest_offsets = row_offsets(rule.cells_per_lane(int(rest.n_cells.sum()))).tolist()
        self._runs: list[CellRuns] = []  # of each lane: whole blocks, then cut pieces
        window_offsets = []
        for lane, (start, stop) in enumerate(pairwise(rest_offsets)):
            dealt = choose_rows(blocks, full[lane:n_dealt:n_lanes])
            runs = CellRuns.join([dealt, rest.cut(start, stop)])
            offsets = row_offsets(runs.n_cells)
            self._runs.append(runs)
            window_offsets.append(np.append(offsets[: -1 : rule.stream.window_blocks], offsets[-1]))
        super().__init__(rule, epoch, window_offsets)

    def window_runs(self, lane: int, window: int) -> CellRuns:
        size = self.rule.stream.window_blocks
        return choose_rows(self._runs[lane], slice(window * size, (window + 1) * size))


def _list_blocks(rule: OrderRule) -> CellRuns:
    """List the blocks of all shards as runs; the last block of a shard may be shorter."""
    size = rule.stream.block_cells
    n_left = rule.n_cells
    blocks = []
    for shard, n_cells in enumerate(rule.shard_cells):
        n_read = min(n_cells, n_left)
        starts = np.arange(0, n_read, size)
        n_in_block = np.minimum(n_read - starts, size)
        blocks.append(CellRuns(np.full_like(starts, shard), starts, n_in_block))
        n_left -= n_read
    return CellRuns.join(blocks)


class RepeatedEpoch(EpochOrder):
    """Order of one epoch by a rule with `repeats`. Cells are numbered over all shards."""

    def __init__(self, rule: OrderRule, epoch: int):
        assert rule.repeats is not None
        self._shard_offsets = row_offsets(rule.shard_cells)
        n_cells = int(self._shard_offsets[-1])
        times_read = rule.repeats.times_read(rule.options.seed, epoch, epoch * rule.steps_per_epoch)
        self._times_read = np.pad(times_read, (0, n_cells - len(times_read)))
        repeats = _list_repeats(rule, self._times_read)
        n_repeats = len(repeats.min_reads)
        shuffled = permutation(n_repeats, rule.options.seed, BLOCKS, epoch, REPEATED)
        self._repeats = choose_rows(repeats, shuffled)
        self._repeat_offsets = row_offsets(self._repeats.n_cells)
        lane_cells = rule.cells_per_lane(rule.n_cells).tolist()
        self._lane_offsets = row_offsets(lane_cells)
        size = rule.stream.window_blocks * rule.stream.block_cells
        super().__init__(rule, epoch, [np.append(np.arange(0, n, size), n) for n in lane_cells])

    def window_runs(self, lane: int, window: int) -> CellRuns:
        span = self._lane_offsets[lane] + self.window_offsets[lane][window : window + 2]
        return self._find_runs(self._list_cells(*span.tolist()))

    def _list_cells(self, start: int, stop: int) -> np.ndarray:
        """List the ids of reads `start:stop` of the epoch, numbered repeat after repeat."""
        # list the cells of all repeats that overlap the span, then cut them to it
        first_last = np.searchsorted(self._repeat_offsets, [start, stop - 1], side="right") - 1
        first, last = first_last.tolist()
        ids_of_repeats = []
        in_span = choose_rows(self._repeats, slice(first, last + 1))
        for first_id, stop_id, min_reads, _ in iterate_rows(in_span):
            is_read = self._times_read[first_id:stop_id] >= min_reads
            ids_of_repeats.append(first_id + np.flatnonzero(is_read))
        n_skipped = start - int(self._repeat_offsets[first])
        return np.concatenate(ids_of_repeats)[n_skipped : n_skipped + stop - start]

    def _find_runs(self, cell_ids: np.ndarray) -> CellRuns:
        """Find the runs of `cell_ids`: a run continues while the next cell follows in the same shard."""
        shard = np.searchsorted(self._shard_offsets, cell_ids, side="right") - 1
        continues = (np.diff(cell_ids) == 1) & (np.diff(shard) == 0)
        starts = np.flatnonzero(np.append(True, ~continues))
        shard = shard[starts]
        first_cell = cell_ids[starts] - self._shard_offsets[shard]
        return CellRuns(shard, first_cell, np.diff(starts, append=len(cell_ids)))


def _list_repeats(rule: OrderRule, times_read: np.ndarray) -> BlockRepeats:
    """List each block as often as its most repeated cell is read by `times_read`, `(cells,)`."""
    size = rule.stream.block_cells
    shards = zip(row_offsets(rule.shard_cells), rule.shard_cells)
    starts = np.concatenate([first + np.arange(0, n, size) for first, n in shards])
    stops = np.append(starts[1:], len(times_read))
    repeats: list[BlockRepeats] = []
    # cells with a further repeat: fewer each round, because few cells are read often
    remaining = np.flatnonzero(times_read)
    while len(remaining):
        min_reads = len(repeats) + 1
        block_of_cell = np.searchsorted(starts, remaining, side="right") - 1
        # index of the first of these cells in each block
        first_of_block = np.flatnonzero(np.diff(block_of_cell, prepend=-1))
        block = block_of_cell[first_of_block]
        n_read = np.diff(first_of_block, append=len(remaining))
        reads = np.full_like(block, min_reads)
        repeats.append(BlockRepeats(starts[block], stops[block], reads, n_read))
        remaining = remaining[times_read[remaining] > min_reads]
    return BlockRepeats(*map(np.concatenate, zip(*repeats)))


def make_epoch_order(rule: OrderRule, epoch: int) -> EpochOrder:
    """Make the order of an epoch by `rule`."""
    kind = PlainEpoch if rule.repeats is None else RepeatedEpoch
    return kind(rule, epoch)


class OrderCache:
    """Cache of the orders of two epochs, since lanes do not all end an epoch at the same time."""

    def __init__(self, rule: OrderRule) -> None:
        self._rule = rule
        self._orders: dict[int, EpochOrder] = {}

    def get(self, epoch: int) -> EpochOrder:
        """Return the order of `epoch`, from the cache if it is there."""
        if epoch not in self._orders:
            self._orders = {n: order for n, order in self._orders.items() if n == epoch - 1}
            self._orders[epoch] = make_epoch_order(self._rule, epoch)
        return self._orders[epoch]
