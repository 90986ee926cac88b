"""Cells in stream order, read ahead by threads in shuffled windows.

The packed bytes of a window are read in the order of the file into one buffer. Index arrays name
its cells in step order, lane after lane, so shuffling moves no data, and a step is one slice.
Several small steps are yielded together, to spread Python's overhead. Cells are unpacked when their
step is taken. Only cells of a step that spans windows are copied (`_join`). There are two buffers,
one in use and one being filled; their memory is used again (`recycled_empty`).

Numbers of cells are computed for many steps at once. For lanes of other ranks only the lengths of
cells are looked up (`LaneLengths`).
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np

from cellmill.data.packing.cells import PackedCells, join_cells
from cellmill.data.packing.layout import ALIGNMENT
from cellmill.data.packing.row_file import RowFile
from cellmill.data.recycled import recycled_empty
from cellmill.data.rows import choose_rows, iterate_rows, row_offsets
from cellmill.data.stream.lane_lengths import LaneLengths
from cellmill.data.stream.order import CellRuns, EpochLayout, EpochOrder, epoch_order

_TASKS = 32  # read tasks per buffer: submitting one costs as much as reading some cells
_STEPS = 256  # steps whose numbers of cells are computed at once
# cells of small steps that are yielded together
_CELLS_TOGETHER = 256


class ByteRuns(NamedTuple):
    """Bytes of runs of packed cells: where they are in a shard, and where they go; `(runs,)` int64."""

    shards: np.ndarray  # number of the shard
    begins: np.ndarray  # first byte in the shard's packed bytes
    ends: np.ndarray  # byte after the last
    targets: np.ndarray  # position of the first byte in the window's memory

    def by_shard(self, max_runs: int) -> Iterator[ByteRuns]:
        """Parts of at most `max_runs` runs of one shard each, ascending in it."""
        order = np.lexsort((self.begins, self.shards))
        runs = choose_rows(self, order)
        shard_starts = np.flatnonzero(np.diff(runs.shards)) + 1
        part_starts = np.union1d(np.arange(0, len(order), max_runs), shard_starts)
        for start, stop in pairwise([*part_starts.tolist(), len(order)]):
            yield choose_rows(runs, slice(start, stop))


@dataclass(frozen=True)
class StreamCells:
    """Cells of one rank in the order in which they are taken: by step, then by lane.

    Arrays are `(cells,)` int64.
    """

    steps: np.ndarray  # step that takes each cell, counted over all epochs
    lanes: np.ndarray
    ids: np.ndarray
    packed: PackedCells

    def select(self, chosen: slice | np.ndarray) -> StreamCells:
        return StreamCells(
            self.steps[chosen], self.lanes[chosen], self.ids[chosen], self.packed.select(chosen)
        )

    def cells_of(self, step: int, n_steps: int) -> StreamCells:
        """Those that `n_steps` steps from `step` on take; may be none."""
        start, stop = np.searchsorted(self.steps, [step, step + n_steps]).tolist()
        return self.select(slice(start, stop))


def _join(parts: list[StreamCells]) -> StreamCells:
    """Copy the cells of some steps, which several windows have, into one memory."""
    none = np.empty(0, np.int64)
    packed = PackedCells(np.empty(0, np.uint8), none, none, none, none)
    parts = [StreamCells(none, none, none, packed), *parts]
    joined = StreamCells(
        np.concatenate([part.steps for part in parts]),
        np.concatenate([part.lanes for part in parts]),
        np.concatenate([part.ids for part in parts]),
        join_cells([part.packed for part in parts]),
    )
    # cells of a lane stay in the order of their windows
    return joined.select(np.lexsort((joined.lanes, joined.steps)))


class Reading(NamedTuple):
    """A window whose bytes are being read."""

    window: StreamCells
    tasks: list[Future[None]]  # reads not yet waited for


class _ReadAhead:
    """Cells of the rank's lanes, step by step; the next window is read while one is used.

    Steps are counted over all epochs and taken in order.
    """

    def __init__(self, windows: Iterator[Reading]):
        self._windows = windows  # `next` starts to read a window
        self._started: list[Reading] = []  # in stream order

    def n_steps_together(self, step: int, n_cells: np.ndarray) -> int:
        """Number of steps from `step` on to take together.

        At least one; more if one window has all of their `n_cells`, `(steps,)`, and these are at
        most `_CELLS_TOGETHER`.
        """
        self._drop_before(step)
        if len(self._started) > 1:
            first_of_next = int(self._started[1].window.steps[0])
            n_cells = n_cells[: max(0, first_of_next - step)]
        return max(1, int(np.searchsorted(n_cells.cumsum(), _CELLS_TOGETHER, side="right")))

    def take(self, step: int, n_cells: np.ndarray) -> StreamCells:
        """Cells of `len(n_cells)` steps from `step` on, which have `n_cells` each."""
        parts = []
        number = 0
        n_left = int(n_cells.sum())
        while n_left:
            part = self._window(number).cells_of(step, len(n_cells))
            if len(part.ids):
                self._wait(number)
                parts.append(part)
            n_left -= len(part.ids)
            number += 1
        return parts[0] if len(parts) == 1 else _join(parts)

    def _drop_before(self, step: int) -> None:
        """Drop windows without cells from `step` on; start to read the next ones."""
        self._started = [each for each in self._started if each.window.steps[-1] >= step]
        self._started += islice(self._windows, max(0, 2 - len(self._started)))

    def _window(self, number: int) -> StreamCells:
        """Window `number` of those that are kept."""
        if number == len(self._started):  # windows of lanes may end at different steps
            self._started += islice(self._windows, 1)
        assert number < len(self._started), "cells of a step are in no window"
        return self._started[number].window

    def _wait(self, number: int) -> None:
        """Wait until the bytes of window `number` are read. Raises the errors of its reads."""
        tasks = self._started[number].tasks
        while tasks:
            tasks.pop().result()


@dataclass(frozen=True)
class PrefetchedSteps:
    """Cells of some consecutive global batches."""

    epoch: int
    n_genes: np.ndarray  # `(cells of all ranks,)`: of each cell, by step and rank
    n_cells: np.ndarray  # `(steps, world)` int64: number of cells of each rank
    local: StreamCells  # this rank's cells, by step and lane


class Prefetch:
    """Reader of the cells of a split in the order of `layout`, starting at any step.

    Reads the lanes of `rank`: lane l belongs to rank l % `world`. Of other lanes only the lengths
    are looked up.
    """

    def __init__(
        self,
        shards: list[RowFile],
        layout: EpochLayout,
        rank: int,
        world: int,
        io_threads: int,
    ):
        self._shards = shards
        self._layout = layout
        self._rank = rank
        self._world = world
        lanes = np.arange(layout.stream.lanes).reshape(-1, world).T  # (ranks, lanes of each)
        self._lanes: list[int] = lanes[rank].tolist()
        self._other_lanes = np.delete(lanes, rank, axis=0).ravel()  # rank after rank
        self._shard_offsets = row_offsets(layout.shard_cells)
        self._epochs: dict[int, EpochOrder] = {}
        self._pool = ThreadPoolExecutor(io_threads, thread_name_prefix="cellmill-read")

    def close(self) -> None:
        """End the threads after the reads in progress."""
        self._pool.shutdown(cancel_futures=True)

    def steps(self, epoch: int, step: int) -> Iterator[PrefetchedSteps]:
        """Steps from `step` of `epoch` on: endless if the layout shuffles, else to the end of the
        epoch.
        """
        layout = self._layout
        per_epoch = layout.steps_per_epoch
        first_cells = layout.cells_before(step)
        lengths_of_others = self._look_up_others(epoch, first_cells)
        ahead = _ReadAhead(self._windows(epoch, first_cells))
        while True:
            while step < per_epoch:
                stop = min(step + _STEPS, per_epoch)
                # numbers of cells, (steps, lanes) and (steps, ranks)
                taken_before = layout.cells_before(np.arange(step, stop + 1)[:, None])
                in_lanes = np.diff(taken_before, axis=0)
                in_ranks = in_lanes.reshape(stop - step, -1, self._world).sum(1)
                while step < stop:
                    step_in_run = epoch * per_epoch + step
                    n_local = in_ranks[:, self._rank]
                    n = ahead.n_steps_together(step_in_run, n_local)
                    local = ahead.take(step_in_run, n_local[:n])
                    lengths = local.packed.lengths
                    if len(self._other_lanes):
                        lengths = self._insert_lengths(
                            lengths, lengths_of_others, in_ranks[:n], in_lanes[:n]
                        )
                    yield PrefetchedSteps(epoch, lengths, in_ranks[:n], local)
                    del local  # the next window may take its memory
                    step = step + n
                    in_lanes = in_lanes[n:]
                    in_ranks = in_ranks[n:]
            if not layout.shuffle:
                return
            epoch += 1
            step = 0

    def _look_up_others(self, epoch: int, first_cells: np.ndarray) -> LaneLengths:
        """Lengths of cells in the lanes of other ranks, from cell `first_cells`, `(lanes,)`, of each
        lane on.
        """
        order = self._order_of(epoch)
        windows = []
        skipped = []
        for lane in self._other_lanes.tolist():
            cell = int(first_cells[lane])
            window = order.window_with(lane, cell)
            skipped.append(cell - int(order.window_offsets[lane][window]))
            windows.append(self._lengths_of_windows(lane, epoch, window))
        return LaneLengths(windows, skipped)

    def _insert_lengths(
        self,
        local_lengths: np.ndarray,
        other_lanes: LaneLengths,
        in_ranks: np.ndarray,
        in_lanes: np.ndarray,
    ) -> np.ndarray:
        """Lengths of the cells of all ranks, by step and rank.

        `in_ranks`, `(steps, ranks)`, and `in_lanes`, `(steps, lanes)`, are numbers of cells.
        """
        parts = []
        by_step = np.split(local_lengths, np.cumsum(in_ranks[:-1, self._rank]))
        for local, in_rank, in_lane in zip(by_step, in_ranks, in_lanes[:, self._other_lanes]):
            others = other_lanes.take(in_lane)
            in_lower_ranks = int(in_rank[: self._rank].sum())
            parts += [others[:in_lower_ranks], local, others[in_lower_ranks:]]
        return np.concatenate(parts)

    def _order_of(self, epoch: int) -> EpochOrder:
        """Order of `epoch`, cached with the previous one: lanes end an epoch one after another."""
        if epoch not in self._epochs:
            self._epochs = {n: order for n, order in self._epochs.items() if n == epoch - 1}
            self._epochs[epoch] = epoch_order(self._layout, epoch)
        return self._epochs[epoch]

    def _lengths_of_windows(self, lane: int, epoch: int, first: int) -> Iterator[np.ndarray]:
        """Lengths of the cells of each window of a lane, from window `first` of an epoch on."""
        while self._order_of(epoch).lane_cells[lane]:
            order = self._order_of(epoch)
            for window in range(first, order.n_windows(lane)):
                lengths = self._lengths(order.window_runs(lane, window))
                yield lengths[order.window_order(lane, window)]
            if not self._layout.shuffle:
                return
            epoch += 1
            first = 0

    def _lengths(self, runs: CellRuns) -> np.ndarray:
        """Number of genes of each cell of `runs`, `(cells,)` int64."""
        offsets = []
        for shard, first, n in iterate_rows(runs):
            offsets.append(self._shards[shard].indptr[first : first + n + 1])
        # a run of n cells has n + 1 offsets: leave out the difference between a run's end and the
        # next run's start, which is not a cell
        is_cell = np.ones(int(runs.n_cells.sum()) + len(runs.n_cells) - 1, bool)
        is_cell[np.cumsum(runs.n_cells + 1)[:-1] - 1] = False
        return np.diff(np.concatenate(offsets, dtype=np.int64))[is_cell]

    def _windows(self, epoch: int, first_cells: np.ndarray) -> Iterator[Reading]:
        """Windows of this rank's lanes, from cell `first_cells`, `(lanes,)`, of each lane on.

        Window w has the cells of window number w of all lanes that have one.
        """
        while any(self._order_of(epoch).lane_cells[lane] for lane in self._lanes):
            order = self._order_of(epoch)
            first = {lane: order.window_with(lane, int(first_cells[lane])) for lane in self._lanes}
            for window in range(min(first.values()), max(map(order.n_windows, first))):
                lanes = [lane for lane in first if first[lane] <= window < order.n_windows(lane)]
                if lanes:
                    yield self._read_window(order, lanes, window)
            if not self._layout.shuffle:
                return
            epoch += 1
            first_cells = self._layout.cells_before(0)

    def _read_window(self, order: EpochOrder, lanes: list[int], window: int) -> Reading:
        """Start to read window number `window` of each of `lanes`."""
        runs = CellRuns.join([order.window_runs(lane, window) for lane in lanes])
        byte_runs, packed = self._lay_out(runs)
        max_runs = -(-len(runs.shards) // _TASKS)
        tasks = []
        for part in byte_runs.by_shard(max_runs):
            read_bytes = self._shards[int(part.shards[0])].read_bytes
            tasks.append(self._pool.submit(read_bytes, *part[1:], packed.memory))
        return Reading(self._sort_by_step(order, lanes, window, runs, packed), tasks)

    def _sort_by_step(
        self,
        order: EpochOrder,
        lanes: list[int],
        window: int,
        runs: CellRuns,
        packed: PackedCells,
    ) -> StreamCells:
        """Put the cells of a window of `lanes` in stream order.

        `runs` are those of the lanes, and `packed` has the cells in their order.
        """
        spans = np.array([order.window_offsets[lane][window : window + 2] for lane in lanes])
        sizes = np.diff(spans)[:, 0]
        # lane after lane: each cell's row in the concatenated runs, and its step
        shuffled = np.concatenate([order.window_order(lane, window) for lane in lanes])
        first_row_of_lane = np.cumsum(sizes) - sizes
        row = shuffled + np.repeat(first_row_of_lane, sizes)
        step = np.concatenate(
            [self._layout.steps_of(lane, np.arange(*span)) for lane, span in zip(lanes, spans)]
        )
        # a step's cells stay lane after lane
        by_step = np.argsort(step, kind="stable")
        row = row[by_step]
        # id of the cell in each row: rows of a run are consecutive cells
        first_id = self._shard_offsets[runs.shards] + runs.starts
        first_row_of_run = np.cumsum(runs.n_cells) - runs.n_cells
        id_of_row = np.arange(len(row)) + np.repeat(first_id - first_row_of_run, runs.n_cells)
        return StreamCells(
            order.epoch * self._layout.steps_per_epoch + step[by_step],
            np.repeat(lanes, sizes)[by_step],
            id_of_row[row],
            packed.select(row),
        )

    def _lay_out(self, runs: CellRuns) -> tuple[ByteRuns, PackedCells]:
        """Lay out runs of cells in a new memory, one after the other.

        Returns the bytes to read, and the cells, in the order of the runs, as they will be there.
        """
        units = []
        for shard, first, n in iterate_rows(runs):
            units.append(self._shards[shard].borders[2 * first : 2 * (first + n) + 1])
        n_units = 2 * runs.n_cells + 1
        last = np.cumsum(n_units) - 1  # entry of each run's end
        # where genes and counts of each cell begin, and the end of each run: in the shard, then in
        # the memory
        positions = np.concatenate(units).astype(np.int64) * ALIGNMENT
        begins = positions[last - n_units + 1]
        ends = positions[last]
        offsets = row_offsets(ends - begins)
        positions += np.repeat(offsets[:-1] - begins, n_units)
        is_begin = np.ones(len(positions), bool)
        is_begin[last] = False
        gene_entry = np.flatnonzero(is_begin)[::2]
        packed = PackedCells(
            recycled_empty(offsets[-1], np.uint8),
            positions[gene_entry],
            positions[gene_entry + 1],
            positions[gene_entry + 2],
            self._lengths(runs),
        )
        return ByteRuns(runs.shards, begins, ends, offsets[:-1]), packed
