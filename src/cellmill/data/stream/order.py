"""Order of the cells in an epoch, computed without reading shards.

- block: `block_cells` consecutive cells of a shard. The last block of a shard may be shorter
- lane: a share of the epoch's blocks, read by one data rank. The sizes of two lanes differ by at most one
  cell
- window: `window_blocks` blocks of a lane, or pieces of blocks. In training, the cells of a window are
  shuffled together

In training, the blocks are permuted first. Full blocks are then dealt to the lanes in rounds: each lane gets
one block per round. The blocks of an incomplete round, and all shorter blocks, are split so that every lane
gets a share.

A step takes `step_cells_per_lane` cells of each lane. With `equal_steps`, each step takes an equal share of the
epoch's cells, rounded to whole cells. A step takes the same cells for any number of data ranks. The order is a function
of the seed, the epoch, the lane and the window, so a run reaches any step without replaying earlier steps.

With a `LevelSampler`, some cells are read several times in an epoch, and others not at all. A block is then
read in passes: pass k reads the cells that are read at least k times in the epoch. The passes of all blocks
are permuted, so two reads of a cell are usually far apart. Each lane gets a contiguous share of the permuted
reads. A share may begin or end inside a pass. A window then has as many cells as `window_blocks` full blocks.
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
from cellmill.data.rows import choose_rows, positions_in_rows, row_offsets
from cellmill.data.stream.level_sampler import LevelSampler

# last part of the key of each permutation of blocks or passes, so that these permutations differ
_FULL_BLOCKS = 0
_SHORT_BLOCKS = 1
_PASSES = 2

# `WeightedOrder` lists the cells of several passes at once: their blocks have about this many cells at most
_MAX_CELLS_AT_ONCE = 1 << 16


class DataRank(NamedTuple):
    """A data-parallel rank. Tensor- and pipeline-parallel peers have the same data rank."""

    rank: int
    n_ranks: int  # number of data-parallel ranks


ONLY_RANK = DataRank(0, 1)


def list_lanes_by_rank(n_lanes: int, n_ranks: int) -> np.ndarray:
    """List the lanes that each data rank reads, `(ranks, lanes of a rank)` int64.

    Rank r reads each lane l with l % n_ranks == r.
    """
    return np.arange(n_lanes).reshape(-1, n_ranks).T


@dataclass(frozen=True)
class OrderOptions:
    """The options that fix the order of cells, in any split."""

    stream: Stream  # section `stream` of the configuration
    global_batch: int  # cells per optimizer step over all ranks, a multiple of `stream.lanes`
    seed: int
    # True for training: endless epochs, shuffled by `seed`. False: one epoch in a fixed order, in which each
    # cell is read once; `seed`, `train_frac` and weights then have no effect
    is_training: bool = True


@dataclass(frozen=True)
class OrderRule:
    """The rule for the order of a split's cells in any epoch."""

    options: OrderOptions
    shard_cells: tuple[int, ...]  # number of cells in each shard
    # an epoch reads only this many cells, the first in disk order. None: it reads all cells
    max_cells: int | None = None
    level_sampler: LevelSampler | None = None  # None: each cell is read once in an epoch

    @classmethod
    def for_counting(cls, options: TrainOptions, n_cells: int) -> OrderRule:
        """Make a rule that counts the steps of a run and the cells of each step, without the corpus.

        The rule has `n_cells` training cells in one shard. So the order of cells is not the order in the run.
        """
        train = options.train
        return cls(OrderOptions(options.stream, train.global_batch, train.seed), (n_cells,))

    @property
    def n_lanes(self) -> int:
        return self.options.stream.lanes

    @cached_property
    def n_cells(self) -> int:
        """Number of cells of an epoch."""
        total = sum(self.shard_cells)
        return total if self.max_cells is None else min(total, self.max_cells)

    @property
    def step_cells_per_lane(self) -> int:
        """Number of cells that a step takes of each lane, without `equal_steps`."""
        return self.options.global_batch // self.n_lanes

    @property
    def steps_per_epoch(self) -> int:
        longest_lane = -(-self.n_cells // self.n_lanes)  # number of cells, rounded up
        return -(-longest_lane // self.step_cells_per_lane)

    @property
    def max_step_cells(self) -> int:
        """Number of cells of the largest step."""
        if self.options.stream.equal_steps:
            return -(-self.n_cells // self.steps_per_epoch)
        return min(self.options.global_batch, self.n_cells)

    def count_readable_shards(self) -> int:
        """Count the shards that have cells which an epoch may read."""
        shard_offsets = row_offsets(self.shard_cells)
        # the shards of the first `n_cells` cells
        n_shards = int(np.searchsorted(shard_offsets, self.n_cells))
        if self.level_sampler is None:
            return n_shards
        is_readable = self.level_sampler.find_readable_cells()
        return int(np.logical_or.reduceat(is_readable, shard_offsets[:n_shards]).sum())

    def count_cells_before(self, step: int | np.ndarray) -> np.ndarray:
        """Count the cells that the steps before `step` take of each lane in an epoch, `(lanes,)` int64.

        If `step` is `steps_per_epoch`, these are all cells of the lane. `step` may also be an array of
        shape `(steps, 1)`. The result then has shape `(steps, lanes)`.
        """
        if not self.options.stream.equal_steps:
            return np.minimum(step * self.step_cells_per_lane, self.deal_to_lanes(self.n_cells))
        return self.deal_to_lanes(step * self.n_cells // self.steps_per_epoch)

    def find_steps(self, lane: int, positions: np.ndarray) -> np.ndarray:
        """Find the step of an epoch that takes each of some cells of a lane, `(cells,)` int64.

        `positions`, `(cells,)`, has the positions of these cells in the lane.
        """
        if not self.options.stream.equal_steps:
            return positions // self.step_cells_per_lane
        # the cells of an epoch are dealt one by one to the lanes in turn. This is the number of cells that
        # are dealt up to and including each of these cells
        n_dealt = positions * self.n_lanes + lane + 1
        # find the first step with (step + 1) * n_cells // steps_per_epoch >= n_dealt. If 4 steps take 10
        # cells, 2, 5, 7 and 10 cells are dealt by the ends of steps 0 to 3. So the cell with `n_dealt` 3 is
        # the first cell of step 1
        return (n_dealt * self.steps_per_epoch - 1) // self.n_cells

    def deal_to_lanes(self, n_cells: int | np.ndarray) -> np.ndarray:
        """Count the cells of each lane if `n_cells` cells are dealt one by one to the lanes, `(lanes,)`."""
        # (n_cells - lane) / lanes, rounded up
        return -((np.arange(self.n_lanes) - n_cells) // self.n_lanes)


class CellSpans(NamedTuple):
    """Spans of cells. A span is consecutive cells of one shard. Arrays are `(spans,)` int64."""

    shards: np.ndarray  # number of the shard in its split
    starts: np.ndarray  # row of the first cell in the shard
    cells_per_span: np.ndarray

    @classmethod
    def join(cls, pieces: list[CellSpans]) -> CellSpans:
        """Join the spans of all `pieces`, piece after piece."""
        return cls(*map(np.concatenate, zip(*pieces)))

    def slice_cells(self, start: int, stop: int) -> CellSpans:
        """Return the spans of cells `start:stop`. Cells are numbered span after span."""
        # the cells to keep of each span. If the spans have 4, 4 and 3 cells, `slice_cells(2, 9)` keeps cells
        # 2:4, 0:4 and 0:1 of these spans
        n_before = np.cumsum(self.cells_per_span) - self.cells_per_span  # cells of earlier spans
        kept_starts = np.clip(start - n_before, 0, self.cells_per_span)
        kept_stops = np.clip(stop - n_before, 0, self.cells_per_span)
        sliced = CellSpans(self.shards, self.starts + kept_starts, kept_stops - kept_starts)
        return choose_rows(sliced, kept_stops > kept_starts)


class EpochOrder:
    """Order of the cells in one epoch: for each lane its windows, and for each window its cells.

    The windows of a lane are numbered from 0. A subclass lists the spans of cells in each window.

    Attributes:

    - `window_offsets`: for each lane an array `(windows + 1,)`. It has the position of each window's first
      cell in the lane. The last entry is the number of cells of the lane
    - `lane_cells`: the number of cells of each lane. It is the same in every epoch
    """

    def __init__(self, rule: OrderRule, epoch: int, window_offsets: list[np.ndarray]):
        self.rule = rule
        self.epoch = epoch
        self.window_offsets = window_offsets
        self.lane_cells = [int(offsets[-1]) for offsets in window_offsets]

    def n_windows(self, lane: int) -> int:
        """Return the number of windows of a lane."""
        return len(self.window_offsets[lane]) - 1

    def find_window(self, lane: int, position: int) -> int:
        """Find the number of the window that has the cell at `position` in a lane.

        Returns `n_windows(lane)` if `position` is the number of cells of the lane.
        """
        return int(np.searchsorted(self.window_offsets[lane], position, side="right")) - 1

    def list_window_spans(self, lane: int, window_number: int) -> CellSpans:
        """List the spans of cells in a window of `lane`."""
        raise NotImplementedError

    def find_shards(self, lanes: list[int], start: int, stop: int) -> set[int]:
        """Find the numbers of the shards that `lanes` need in steps `start:stop` of the epoch.

        A lane reads whole windows. So it needs all shards of each window that has cells of these steps.
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
                spans = self.list_window_spans(lane, window_number)
                shards.update(spans.shards.tolist())
        return shards

    def make_window_order(self, lane: int, window_number: int) -> np.ndarray:
        """Return the order in which a window's cells are read, `(cells,)` int64.

        Entry i is the index of the cell that is read at position i of the window. Indices number the cells of
        the window span after span. In training the order is random.
        """
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

        # deal full blocks to the lanes in complete rounds. Each row of `dealt` has the blocks of one lane
        n_dealt = len(full) // rule.n_lanes * rule.n_lanes
        dealt = full[:n_dealt].reshape(-1, rule.n_lanes).T

        # split the other blocks among the lanes so that the sizes of two lanes differ by at most one cell
        rest = choose_rows(blocks, np.concatenate([full[n_dealt:], short]))
        rest_offsets = row_offsets(rule.deal_to_lanes(int(rest.cells_per_span.sum()))).tolist()

        self._spans: list[CellSpans] = []  # for each lane: whole blocks, then pieces of blocks
        window_offsets = []
        for dealt_to_lane, (start, stop) in zip(dealt, pairwise(rest_offsets)):
            whole_blocks = choose_rows(blocks, dealt_to_lane)
            spans = CellSpans.join([whole_blocks, rest.slice_cells(start, stop)])
            self._spans.append(spans)
            # spans of 4, 4, 4 and 3 cells begin at 0, 4, 8 and 12. If a window has two spans, windows begin
            # at 0 and 8, and the lane ends at 15
            span_offsets = row_offsets(spans.cells_per_span)
            window_starts = span_offsets[:-1][:: stream.window_blocks]
            window_offsets.append(np.append(window_starts, span_offsets[-1]))
        super().__init__(rule, epoch, window_offsets)

    def list_window_spans(self, lane: int, window_number: int) -> CellSpans:
        n_spans = self.rule.options.stream.window_blocks
        first = window_number * n_spans
        return choose_rows(self._spans[lane], slice(first, first + n_spans))


def _list_blocks(rule: OrderRule) -> CellSpans:
    """List the blocks of all shards as spans. The last block of a shard may be shorter."""
    block_cells = rule.options.stream.block_cells
    n_left = rule.n_cells  # cells that are not yet in a block
    blocks = []
    for shard, shard_cells in enumerate(rule.shard_cells):
        n_read = min(shard_cells, n_left)
        starts = np.arange(0, n_read, block_cells)
        cells_per_block = np.minimum(n_read - starts, block_cells)
        blocks.append(CellSpans(np.full_like(starts, shard), starts, cells_per_block))
        n_left -= n_read
    return CellSpans.join(blocks)


class BlockPasses(NamedTuple):
    """Passes over blocks (see the module). Arrays are `(passes,)` int64. Cells are numbered over all shards."""

    starts: np.ndarray  # first cell of the block
    stops: np.ndarray  # the cell after the last cell of the block
    pass_numbers: np.ndarray  # from 1: pass k reads the cells that are read at least k times
    cells_per_pass: np.ndarray  # number of cells that the pass reads


class WeightedOrder(EpochOrder):
    """Order of one epoch that reads cells by their weights, for a rule with a `level_sampler`.

    Cells are numbered over all shards. Reads are numbered over the permuted passes: read 0 reads the first
    cell of the first pass.
    """

    def __init__(self, rule: OrderRule, epoch: int):
        assert rule.level_sampler is not None
        seed = rule.options.seed
        stream = rule.options.stream
        self._shard_offsets = row_offsets(rule.shard_cells)
        n_cells = int(self._shard_offsets[-1])
        times_read = rule.level_sampler.draw_times_read(seed, epoch, epoch * rule.steps_per_epoch)
        # the sampler has only the first `max_cells` cells; further cells are not read
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

    def list_window_spans(self, lane: int, window_number: int) -> CellSpans:
        positions = self.window_offsets[lane][window_number : window_number + 2]
        start, stop = (self._lane_offsets[lane] + positions).tolist()
        return self._find_spans(self._list_cells(start, stop))

    def _list_cells(self, start: int, stop: int) -> np.ndarray:
        """List the cells of reads `start:stop`, `(reads,)` int64."""
        # list the cells of passes first to last, which have these reads. Then slice the list
        passes_of_ends = np.searchsorted(self._pass_offsets, [start, stop - 1], side="right") - 1
        first, last = passes_of_ends.tolist()
        passes_at_once = max(1, _MAX_CELLS_AT_ONCE // self.rule.options.stream.block_cells)
        cells_of_passes = []
        for first_at_once in range(first, last + 1, passes_at_once):
            stop_at_once = min(first_at_once + passes_at_once, last + 1)
            passes = choose_rows(self._passes, slice(first_at_once, stop_at_once))
            # list all cells of the blocks of these passes, then keep the cells that each pass reads
            block_sizes = passes.stops - passes.starts
            positions = positions_in_rows(row_offsets(block_sizes))
            cells = np.repeat(passes.starts, block_sizes) + positions
            is_read = self._times_read[cells] >= np.repeat(passes.pass_numbers, block_sizes)
            cells_of_passes.append(cells[is_read])
        n_skipped = start - int(self._pass_offsets[first])
        return np.concatenate(cells_of_passes)[n_skipped : n_skipped + stop - start]

    def _find_spans(self, cells: np.ndarray) -> CellSpans:
        """Find the spans of `cells`, `(cells,)`, in the order of `cells`.

        Consecutive cells are in one span if their numbers follow each other and they are in the same shard.
        """
        shard_of_cell = np.searchsorted(self._shard_offsets, cells, side="right") - 1
        is_in_span_of_previous = (np.diff(cells) == 1) & (np.diff(shard_of_cell) == 0)
        first_of_span = np.flatnonzero(np.append(True, ~is_in_span_of_previous))
        shard_of_span = shard_of_cell[first_of_span]
        starts = cells[first_of_span] - self._shard_offsets[shard_of_span]
        return CellSpans(shard_of_span, starts, np.diff(first_of_span, append=len(cells)))


def _list_passes(rule: OrderRule, times_read: np.ndarray) -> BlockPasses:
    """List the passes over all blocks: first pass 1 of every block, then pass 2, and so on.

    A block without cells for a pass does not have this pass. `times_read`, `(cells,)`, says how often each
    cell is read.
    """
    block_cells = rule.options.stream.block_cells
    shards = zip(row_offsets(rule.shard_cells), rule.shard_cells)
    starts = np.concatenate([first + np.arange(0, n, block_cells) for first, n in shards])
    stops = np.append(starts[1:], len(times_read))
    passes: list[BlockPasses] = []
    # cells that the next pass reads: fewer each time. If only few cells have a level, `labelled_frac` reads
    # these so often that most passes over a block read a single cell
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
    """Make the order of an epoch from `rule`."""
    order_class = PlainOrder if rule.level_sampler is None else WeightedOrder
    return order_class(rule, epoch)


class OrderCache:
    """Cache of the orders of two epochs. Lanes do not all end an epoch at the same time."""

    def __init__(self, rule: OrderRule) -> None:
        self._rule = rule
        self._order_by_epoch: dict[int, EpochOrder] = {}

    def get(self, epoch: int) -> EpochOrder:
        """Return the order of `epoch`. Makes the order if the cache does not have it."""
        if epoch not in self._order_by_epoch:
            # first drop all orders except the order of the previous epoch
            orders = self._order_by_epoch.items()
            self._order_by_epoch = {n: order for n, order in orders if n == epoch - 1}
            self._order_by_epoch[epoch] = make_epoch_order(self._rule, epoch)
        return self._order_by_epoch[epoch]
