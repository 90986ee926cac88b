"""Order of the cells in an epoch, computed without reading shards.

- block: `block_cells` consecutive cells of a shard; a shard's last block may be shorter
- lane: a share of the epoch's blocks, read by one data rank; lanes differ by at most one cell
- window: `window_blocks` blocks of a lane, or pieces of blocks, whose cells are shuffled together in
  training

Full blocks are dealt round-robin to the lanes. Blocks of an incomplete round, and all shorter blocks,
are split so that every lane gets a share. In training, the blocks are permuted before that. A step takes
`step_cells_per_lane` cells of each lane, or with `equal_steps` an equal share of the epoch. It takes
the same cells for any number of data ranks. The order is a function of (seed, epoch, lane, window), so
any step is reached without replaying earlier ones.

With a `LevelSampler`, some cells are read several times in an epoch, and others not at all. A block is
then read in passes: pass k reads those of its cells that are read at least k times. The passes of all
blocks are permuted, so two reads of a cell are usually far apart. Each lane gets a contiguous share of
the permuted reads, which may begin or end inside a pass. A window is then as many cells of a lane as
`window_blocks` full blocks have.
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
from cellmill.data.stream.level_sampler import LevelSampler

# last number in the `position` of each permutation of an epoch, so that the three are independent
_FULL_BLOCKS = 0
_SHORT_BLOCKS = 1
_PASSES = 2


class DataRank(NamedTuple):
    """A data-parallel rank; tensor- and pipeline-parallel peers share it."""

    rank: int
    n_ranks: int  # number of data-parallel ranks


ONLY_RANK = DataRank(0, 1)


def lanes_of_ranks(n_lanes: int, n_ranks: int) -> np.ndarray:
    """List the lanes that each of `n_ranks` data ranks reads, `(ranks, lanes of a rank)` int64.

    Rank r reads each lane l with l % n_ranks == r.
    """
    return np.arange(n_lanes).reshape(-1, n_ranks).T


@dataclass(frozen=True)
class OrderOptions:
    """The options that fix the order of cells, in any split."""

    stream: Stream  # the section of the configuration
    global_batch: int  # cells per optimizer step over all ranks, a multiple of `stream.lanes`
    seed: int
    # True: epochs without end, shuffled by `seed`; `CellStream` reads the cells that `train_frac` keeps,
    # by their weights. False (validation): one epoch. Each cell of the `OrderRule` is read once, and
    # `seed` has no effect
    is_training: bool = True


@dataclass(frozen=True)
class OrderRule:
    """The rule for the order of a split's cells in any epoch."""

    options: OrderOptions
    shard_cells: tuple[int, ...]  # number of cells in each shard
    max_cells: int | None = None  # read only this many cells, the first in disk order; None for all
    level_sampler: LevelSampler | None = None  # None: each cell is read once in an epoch

    @classmethod
    def for_counting(cls, options: TrainOptions, n_cells: int) -> OrderRule:
        """Make a rule that counts the steps of a run and their cells, without the corpus.

        It has the `n_cells` training cells in one shard, so its order is not the run's.
        """
        train = options.train
        return cls(OrderOptions(options.stream, train.global_batch, train.seed), (n_cells,))

    @property
    def n_lanes(self) -> int:
        return self.options.stream.lanes

    @cached_property
    def n_cells(self) -> int:
        total = sum(self.shard_cells)
        return total if self.max_cells is None else min(total, self.max_cells)

    @property
    def n_shards(self) -> int:
        """Number of shards with cells that an epoch may read: the first in disk order."""
        return int(np.searchsorted(row_offsets(self.shard_cells), self.n_cells))

    @property
    def step_cells_per_lane(self) -> int:
        """Cells that a step takes of each lane, without `equal_steps`."""
        return self.options.global_batch // self.n_lanes

    @property
    def steps_per_epoch(self) -> int:
        longest = -(-self.n_cells // self.n_lanes)  # lanes differ by one cell at most
        return -(-longest // self.step_cells_per_lane)

    @property
    def max_step_cells(self) -> int:
        """Cells of the largest step."""
        if self.options.stream.equal_steps:
            return -(-self.n_cells // self.steps_per_epoch)
        return min(self.options.global_batch, self.n_cells)

    def count_cells_before(self, step: int | np.ndarray) -> np.ndarray:
        """Count the cells of each lane that an epoch's steps before `step` take, `(lanes,)` int64.

        If `step` is `steps_per_epoch`, these are all cells. Steps of shape `(n, 1)` give `(n, lanes)`.
        """
        if not self.options.stream.equal_steps:
            return np.minimum(step * self.step_cells_per_lane, self.deal_to_lanes(self.n_cells))
        return self.deal_to_lanes(step * self.n_cells // self.steps_per_epoch)

    def find_steps(self, lane: int, positions: np.ndarray) -> np.ndarray:
        """Find the step of an epoch that takes each of some cells of a lane, `(cells,)` int64.

        `positions`, `(cells,)`, are the positions of these cells in the lane.
        """
        if not self.options.stream.equal_steps:
            return positions // self.step_cells_per_lane
        # cells are dealt one to each lane in turn: the number dealt up to and including each, from 1
        n_dealt = positions * self.n_lanes + lane + 1
        # the first step with (step + 1) * n_cells // steps_per_epoch >= n_dealt. If 4 steps take 10 cells,
        # 2, 5, 7 and 10 are dealt by their ends: the cell with `n_dealt` 3 is the first of step 1
        return (n_dealt * self.steps_per_epoch - 1) // self.n_cells

    def deal_to_lanes(self, n_cells: int | np.ndarray) -> np.ndarray:
        """Count the cells of each lane if `n_cells` are dealt round-robin, `(lanes,)`."""
        # (n_cells - lane) / lanes, rounded up
        return -((np.arange(self.n_lanes) - n_cells) // self.n_lanes)


class CellSpans(NamedTuple):
    """Spans of cells: each is some consecutive cells of a shard. Arrays are `(spans,)` int64."""

    shards: np.ndarray  # number of the shard in its split
    starts: np.ndarray  # row of the first cell in the shard
    cells_per_span: np.ndarray

    @classmethod
    def join(cls, pieces: list[CellSpans]) -> CellSpans:
        """Join the spans of all `pieces`, piece after piece."""
        return cls(*map(np.concatenate, zip(*pieces)))

    def slice_cells(self, start: int, stop: int) -> CellSpans:
        """Return the spans of cells `start:stop`, numbered span after span."""
        # the cells low:high of each span are kept. Of spans of 4, 4 and 3 cells, `slice_cells(2, 9)`
        # keeps 2:4, 0:4 and 0:1
        n_before = np.cumsum(self.cells_per_span) - self.cells_per_span  # cells of earlier spans
        low = np.clip(start - n_before, 0, self.cells_per_span)
        high = np.clip(stop - n_before, 0, self.cells_per_span)
        sliced = CellSpans(self.shards, self.starts + low, high - low)
        return choose_rows(sliced, high > low)


class EpochOrder:
    """Order of one epoch: windows of cells, by lane. The windows of a lane are numbered from 0.

    A subclass lists the spans of cells in each window.

    Attributes: `window_offsets` has, for each lane, the position of the first cell of each window and
    the lane's number of cells, `(windows + 1,)`. `lane_cells` has the number of cells in each lane, the
    same in every epoch.
    """

    def __init__(self, rule: OrderRule, epoch: int, window_offsets: list[np.ndarray]):
        self.rule = rule
        self.epoch = epoch
        self.window_offsets = window_offsets
        self.lane_cells = [int(offsets[-1]) for offsets in window_offsets]

    def n_windows(self, lane: int) -> int:
        return len(self.window_offsets[lane]) - 1

    def find_window(self, lane: int, position: int) -> int:
        """Find the number of the window that has the cell at `position` in a lane; `n_windows` at its end."""
        return int(np.searchsorted(self.window_offsets[lane], position, side="right")) - 1

    def window_spans(self, lane: int, window_number: int) -> CellSpans:
        """List the spans of cells in a window of `lane`."""
        raise NotImplementedError

    def find_shards(self, lanes: list[int], start: int, stop: int) -> set[int]:
        """Find the numbers of the shards that `lanes` need in steps `start:stop` of the epoch.

        A lane needs all shards of each window that has cells of these steps.
        """
        lane_starts = self.rule.count_cells_before(start).tolist()
        lane_stops = self.rule.count_cells_before(stop).tolist()
        shards = set[int]()
        for lane in lanes:
            if lane_starts[lane] == lane_stops[lane]:
                continue
            first = self.find_window(lane, lane_starts[lane])
            last = self.find_window(lane, lane_stops[lane] - 1)
            for window_number in range(first, last + 1):
                shards.update(self.window_spans(lane, window_number).shards.tolist())
        return shards

    def window_order(self, lane: int, window_number: int) -> np.ndarray:
        """Return the order of a window's cells: indices into its concatenated spans, `(cells,)` int64."""
        start, stop = self.window_offsets[lane][window_number : window_number + 2].tolist()
        if not self.rule.options.is_training:
            return np.arange(stop - start)
        seed = self.rule.options.seed
        return permutation(stop - start, seed, WINDOW, window_number, lane, self.epoch)


class PlainOrder(EpochOrder):
    """Order of one epoch that reads each cell once."""

    def __init__(self, rule: OrderRule, epoch: int):
        seed = rule.options.seed
        stream = rule.options.stream
        blocks = _list_blocks(rule)
        is_full = blocks.cells_per_span == stream.block_cells
        full = np.flatnonzero(is_full)
        short = np.flatnonzero(~is_full)
        if rule.options.is_training:
            full = full[permutation(len(full), seed, BLOCKS, epoch, _FULL_BLOCKS)]
            short = short[permutation(len(short), seed, BLOCKS, epoch, _SHORT_BLOCKS)]
        # deal full blocks to the lanes in complete rounds; each row has the blocks of one lane
        n_dealt = len(full) // rule.n_lanes * rule.n_lanes
        dealt = full[:n_dealt].reshape(-1, rule.n_lanes).T
        # split the other blocks so that lanes differ by at most one cell
        rest = choose_rows(blocks, np.concatenate([full[n_dealt:], short]))
        rest_offsets = row_offsets(rule.deal_to_lanes(int(rest.cells_per_span.sum()))).tolist()
        self._spans: list[CellSpans] = []  # for each lane: whole blocks, then pieces of blocks
        window_offsets = []
        for dealt_to_lane, (start, stop) in zip(dealt, pairwise(rest_offsets)):
            whole = choose_rows(blocks, dealt_to_lane)
            spans = CellSpans.join([whole, rest.slice_cells(start, stop)])
            self._spans.append(spans)
            # spans of 4, 4, 4 and 3 cells begin at 0, 4, 8 and 12. With two in a window, windows begin at
            # 0 and 8, and the lane ends at 15
            span_offsets = row_offsets(spans.cells_per_span)
            window_starts = span_offsets[:-1][:: stream.window_blocks]
            window_offsets.append(np.append(window_starts, span_offsets[-1]))
        super().__init__(rule, epoch, window_offsets)

    def window_spans(self, lane: int, window_number: int) -> CellSpans:
        n_spans = self.rule.options.stream.window_blocks
        first = window_number * n_spans
        return choose_rows(self._spans[lane], slice(first, first + n_spans))


def _list_blocks(rule: OrderRule) -> CellSpans:
    """List the blocks of all shards as spans; the last block of a shard may be shorter."""
    block_cells = rule.options.stream.block_cells
    n_left = rule.n_cells
    blocks = []
    for shard, shard_cells in enumerate(rule.shard_cells):
        n_read = min(shard_cells, n_left)
        starts = np.arange(0, n_read, block_cells)
        cells_per_block = np.minimum(n_read - starts, block_cells)
        blocks.append(CellSpans(np.full_like(starts, shard), starts, cells_per_block))
        n_left -= n_read
    return CellSpans.join(blocks)


class BlockPasses(NamedTuple):
    """Passes over blocks. Cells are numbered over all shards. Arrays are `(passes,)` int64."""

    starts: np.ndarray  # first cell of the block
    stops: np.ndarray  # the cell after its last
    # k of the pass, from 1 (see the module)
    pass_numbers: np.ndarray
    cells_per_pass: np.ndarray


class WeightedOrder(EpochOrder):
    """Order of one epoch by a rule with a `level_sampler`.

    Cells are numbered over all shards. Reads are numbered over the permuted passes: read 0 is of the
    first cell that the first pass reads.
    """

    def __init__(self, rule: OrderRule, epoch: int):
        assert rule.level_sampler is not None
        seed = rule.options.seed
        stream = rule.options.stream
        self._shard_offsets = row_offsets(rule.shard_cells)
        n_cells = int(self._shard_offsets[-1])
        times_read = rule.level_sampler.draw_times_read(seed, epoch, epoch * rule.steps_per_epoch)
        # cells that have no weight are not read
        self._times_read = np.pad(times_read, (0, n_cells - len(times_read)))
        passes = _list_passes(rule, self._times_read)
        permuted = permutation(len(passes.starts), seed, BLOCKS, epoch, _PASSES)
        self._passes = choose_rows(passes, permuted)
        self._pass_offsets = row_offsets(self._passes.cells_per_pass)  # first read of each pass
        lane_cells = rule.deal_to_lanes(rule.n_cells).tolist()
        self._lane_offsets = row_offsets(lane_cells)  # first read of each lane
        window_cells = stream.window_blocks * stream.block_cells
        window_offsets = [np.append(np.arange(0, n, window_cells), n) for n in lane_cells]
        super().__init__(rule, epoch, window_offsets)

    def window_spans(self, lane: int, window_number: int) -> CellSpans:
        positions = self.window_offsets[lane][window_number : window_number + 2]
        start, stop = (self._lane_offsets[lane] + positions).tolist()
        return self._find_spans(self._list_cells(start, stop))

    def _list_cells(self, start: int, stop: int) -> np.ndarray:
        """List the cells of reads `start:stop`, `(reads,)` int64."""
        # list the cells of all passes that overlap these reads, then slice the list
        overlapping = np.searchsorted(self._pass_offsets, [start, stop - 1], side="right") - 1
        first, last = overlapping.tolist()
        cells_of_passes = []
        passes = choose_rows(self._passes, slice(first, last + 1))
        for first_cell, stop_cell, pass_number, _ in iterate_rows(passes):
            is_read = self._times_read[first_cell:stop_cell] >= pass_number
            cells_of_passes.append(first_cell + np.flatnonzero(is_read))
        n_skipped = start - int(self._pass_offsets[first])
        return np.concatenate(cells_of_passes)[n_skipped : n_skipped + stop - start]

    def _find_spans(self, cells: np.ndarray) -> CellSpans:
        """Find the spans of `cells`: a span goes on while the next cell follows in the same shard."""
        shard = np.searchsorted(self._shard_offsets, cells, side="right") - 1
        goes_on = (np.diff(cells) == 1) & (np.diff(shard) == 0)
        first_of_span = np.flatnonzero(np.append(True, ~goes_on))
        shard_of_span = shard[first_of_span]
        starts = cells[first_of_span] - self._shard_offsets[shard_of_span]
        return CellSpans(shard_of_span, starts, np.diff(first_of_span, append=len(cells)))


def _list_passes(rule: OrderRule, times_read: np.ndarray) -> BlockPasses:
    """List the passes over all blocks: pass 1 over each block that has it, then pass 2 and so on.

    `times_read`, `(cells,)`, is how often each cell is read.
    """
    block_cells = rule.options.stream.block_cells
    shards = zip(row_offsets(rule.shard_cells), rule.shard_cells)
    starts = np.concatenate([first + np.arange(0, n, block_cells) for first, n in shards])
    stops = np.append(starts[1:], len(times_read))
    passes: list[BlockPasses] = []
    # cells that the next pass reads: ever fewer, because few cells are read often. With `labelled_frac`,
    # and far fewer cells with a level than without, there are about as many passes as reads
    remaining = np.flatnonzero(times_read)
    while len(remaining):
        pass_number = len(passes) + 1
        block_of_cell = np.searchsorted(starts, remaining, side="right") - 1
        # index in `remaining` of each block's first cell
        first_of_block = np.flatnonzero(np.diff(block_of_cell, prepend=-1))
        block = block_of_cell[first_of_block]
        cells_per_pass = np.diff(first_of_block, append=len(remaining))
        pass_numbers = np.full_like(block, pass_number)
        passes.append(BlockPasses(starts[block], stops[block], pass_numbers, cells_per_pass))
        remaining = remaining[times_read[remaining] > pass_number]
    return BlockPasses(*map(np.concatenate, zip(*passes)))


def make_epoch_order(rule: OrderRule, epoch: int) -> EpochOrder:
    """Make the order of an epoch by `rule`."""
    order_class = PlainOrder if rule.level_sampler is None else WeightedOrder
    return order_class(rule, epoch)


class OrderCache:
    """Cache of the orders of two epochs, since lanes do not all end an epoch at the same time."""

    def __init__(self, rule: OrderRule) -> None:
        self._rule = rule
        self._orders: dict[int, EpochOrder] = {}

    def get(self, epoch: int) -> EpochOrder:
        """Return the order of `epoch`, from the cache if it is there."""
        if epoch not in self._orders:
            # keep only the order of the previous epoch
            self._orders = {n: order for n, order in self._orders.items() if n == epoch - 1}
            self._orders[epoch] = make_epoch_order(self._rule, epoch)
        return self._orders[epoch]
