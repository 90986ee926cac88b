"""Cells in stream order, read ahead by threads in shuffled windows.

The packed bytes of a window are read in the order of the file into one buffer. Index arrays name
its cells in step order, lane after lane, so shuffling moves no data, and a step is one slice; small
steps are given several at a time. Cells are unpacked when their step is taken. Only a step that
spans windows is copied (`_join`). There are two buffers, one in use and one being filled; their
memory is used again (`recycled_empty`).

The borders of steps in a window, and the number of cells of each rank, are computed for many steps
at once. For lanes of other ranks only the lengths of cells are looked up (`LaneLengths`).
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cellmill.data.packing.cells import PackedCells, join_cells
from cellmill.data.packing.layout import ALIGNMENT
from cellmill.data.packing.row_file import RowFile
from cellmill.data.recycled import recycled_empty
from cellmill.data.rows import row_offsets
from cellmill.data.stream.lane_lengths import LaneLengths
from cellmill.data.stream.order import Epoch, EpochLayout, epoch_order

_TASKS = 32  # read tasks per buffer: submitting one costs as much as reading some cells
_STEPS = 256  # steps whose numbers of cells are computed at once
# cells of small steps that are given together, to spread the overhead of Python over them
_CELLS_TOGETHER = 256


class Runs(NamedTuple):
    """Packed bytes of runs of cells, `(runs,)` int64 each."""

    shards: np.ndarray  # number of the shard
    begins: np.ndarray  # first byte in the shard's packed bytes
    ends: np.ndarray
    targets: np.ndarray  # position of the first byte in the window's memory

    def by_shard(self, most: int) -> Iterator[Runs]:
        """Parts of at most `most` runs of one shard each, ascending in it."""
        order = np.lexsort((self.begins, self.shards))
        runs = Runs(*(array[order] for array in self))
        borders = np.flatnonzero(np.diff(runs.shards)) + 1
        borders = np.union1d(np.arange(0, len(order), most), borders)
        for start, stop in pairwise([*borders.tolist(), len(order)]):
            yield Runs(*(array[start:stop] for array in runs))


@dataclass(frozen=True)
class WindowCells:
    """Some cells of a window, in the order in which steps take them."""

    lanes: np.ndarray  # `(cells,)` int64, ascending in a step
    cells: np.ndarray  # `(cells,)` int64 ids
    packed: PackedCells

    def slice(self, start: int, stop: int) -> WindowCells:
        chosen = slice(start, stop)
        return WindowCells(self.lanes[chosen], self.cells[chosen], self.packed.select(chosen))


@dataclass(frozen=True)
class StreamWindow:
    """One window of each lane of the rank; steps are counted over all epochs."""

    cells: WindowCells  # their bytes are filled by the reads of `runs`
    first_step: int
    borders: np.ndarray  # first cell of each step from `first_step` on, and the number of cells
    runs: Runs

    @property
    def last_step(self) -> int:
        return self.first_step + len(self.borders) - 2

    def steps(self, step: int, n: int = 1) -> WindowCells:
        """Cells that `n` steps from `step` on take from this window; may be none."""
        if not self.first_step <= step <= self.last_step:
            return self.cells.slice(0, 0)
        first = step - self.first_step
        return self.cells.slice(self.borders[first], self.borders[first + n])

    def steps_together(self, step: int, n_cells: np.ndarray) -> int:
        """Number of steps from `step` on, at least one, to be given together.

        They take all of their `n_cells`, `(steps,)`, from this window, and at most `_CELLS_TOGETHER`.
        """
        first = step - self.first_step
        in_window = np.diff(self.borders[first : first + len(n_cells) + 1])
        whole = n_cells[: common_prefix(in_window, n_cells)]
        return max(1, int(np.searchsorted(whole.cumsum(), _CELLS_TOGETHER, side="right")))


def common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    """Number of leading entries in which two arrays are equal."""
    n = min(len(first), len(second))
    differ = first[:n] != second[:n]
    return int(differ.argmax()) if differ.any() else n


class Taken(NamedTuple):
    """Cells of consecutive steps."""

    steps: int  # number of steps
    parts: list[WindowCells]  # one per window; several only for a single step


class _ReadAhead:
    """Cells of the rank's lanes, step by step; the next windows are read while these are used."""

    def __init__(
        self,
        windows: Iterator[StreamWindow],
        shards: list[RowFile],
        pool: ThreadPoolExecutor,
    ):
        self._windows = windows
        self._shards = shards
        self._pool = pool
        # windows in order, each with its tasks until they are done
        self._started: list[tuple[StreamWindow, list[Future[None]]]] = []

    def take(self, step: int, n_cells: np.ndarray) -> Taken:
        """Cells of step `step`, `n_cells[0]` in all, in a part for each window that has some.

        If one window has all of them, it gives some of the following steps of `n_cells` too. Steps
        are counted over all epochs and taken in order.
        """
        self._started = [reading for reading in self._started if reading[0].last_step >= step]
        while len(self._started) < 2 and self._start():
            pass
        parts = []
        number = 0
        n_left = int(n_cells[0])
        while n_left:
            if number == len(self._started):  # windows of lanes may end at different steps
                has_started = self._start()
                assert has_started, f"{n_left} cells of step {step} are in no window"
            window, tasks = self._started[number]
            number += 1
            part = window.steps(step)
            if not len(part.cells):
                continue
            while tasks:
                tasks.pop().result()
            if len(part.cells) == n_cells[0]:
                steps = window.steps_together(step, n_cells)
                return Taken(steps, [window.steps(step, steps)])
            parts.append(part)
            n_left -= len(part.cells)
        return Taken(1, parts)

    def _start(self) -> bool:
        """Start to read the next window; False if there is none."""
        window = next(self._windows, None)
        if window is None:
            return False
        memory = window.cells.packed.memory
        most = -(-len(window.runs.shards) // _TASKS)
        tasks = []
        for runs in window.runs.by_shard(most):
            shard = self._shards[int(runs.shards[0])]
            tasks.append(self._pool.submit(shard.read_bytes, *runs[1:], memory))
        self._started.append((window, tasks))
        return True


@dataclass(frozen=True)
class PrefetchedSteps:
    """Cells of some consecutive global batches."""

    epoch: int
    # `(cells of all ranks,)`, genes of each cell, by step and rank: the same on every rank
    lengths: np.ndarray
    n_cells: np.ndarray  # `(steps, world)` int64, number of cells of each rank
    taken: WindowCells  # this rank's cells, by step and lane


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
        lanes = np.arange(layout.stream.lanes).reshape(-1, world).T
        self._lanes: list[int] = lanes[rank].tolist()
        self._other_lanes = np.delete(lanes, rank, axis=0).ravel()  # rank after rank
        self._first_cell = row_offsets(layout.shard_cells)
        self._epochs: dict[int, Epoch] = {}
        self._pool = ThreadPoolExecutor(io_threads, thread_name_prefix="cellmill-read")

    def close(self) -> None:
        """End the threads after the reads in progress."""
        self._pool.shutdown(cancel_futures=True)

    def steps(self, epoch: int, step: int) -> Iterator[PrefetchedSteps]:
        """Steps from the given one on: endless if the layout shuffles, else to the end of the
        epoch.
        """
        layout = self._layout
        per_epoch = layout.steps_per_epoch
        before = layout.lanes_before(step)
        lengths_of_others = self._look_up_others(epoch, before)
        ahead = _ReadAhead(self._windows(epoch, before), self._shards, self._pool)
        while True:
            while step < per_epoch:
                stop = min(step + _STEPS, per_epoch)
                # numbers of cells, (steps, lanes) and (steps, ranks)
                borders = layout.lanes_before(np.arange(step, stop + 1)[:, None])
                in_lanes = np.diff(borders, axis=0)
                in_ranks = in_lanes.reshape(stop - step, -1, self._world).sum(1)
                while step < stop:
                    taken = ahead.take(epoch * per_epoch + step, in_ranks[:, self._rank])
                    n = taken.steps
                    cells = taken.parts[0] if len(taken.parts) == 1 else self._join(taken.parts)
                    lengths = cells.packed.n_genes
                    if len(self._other_lanes):
                        lengths = self._insert_lengths(
                            lengths, lengths_of_others, in_ranks[:n], in_lanes[:n]
                        )
                    yield PrefetchedSteps(epoch, lengths, in_ranks[:n], cells)
                    del taken, cells  # the next window may take their memory
                    step = step + n
                    in_lanes = in_lanes[n:]
                    in_ranks = in_ranks[n:]
            if not layout.shuffle:
                return
            epoch = epoch + 1
            step = 0

    def _look_up_others(self, epoch: int, before: np.ndarray) -> LaneLengths:
        """Lengths in other ranks' lanes from cell `before`, `(lanes,)`, of each lane on."""
        order = self._epoch(epoch)
        windows = []
        skipped = []
        for lane in self._other_lanes.tolist():
            cell = int(before[lane])
            window = order.window_with(lane, cell)
            skipped.append(cell - int(order.borders[lane][window]))
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

    def _join(self, parts: list[WindowCells]) -> WindowCells:
        """Copy the cells of a step's parts, lane after lane; `parts` are empty for a step in which
        this rank has no cells.
        """
        none = np.empty(0, np.int64)
        packed = PackedCells(np.empty(0, np.uint8), none, none, none, none)
        pieces = [WindowCells(none, none, packed)]
        for lane in self._lanes:
            for part in parts:
                pieces.append(part.slice(*np.searchsorted(part.lanes, [lane, lane + 1])))
        return WindowCells(
            np.concatenate([piece.lanes for piece in pieces]),
            np.concatenate([piece.cells for piece in pieces]),
            join_cells([piece.packed for piece in pieces]),
        )

    def _epoch(self, epoch: int) -> Epoch:
        """Order of an epoch, cached with the previous one: lanes end an epoch one after another."""
        if epoch not in self._epochs:
            self._epochs = {n: order for n, order in self._epochs.items() if n == epoch - 1}
            self._epochs[epoch] = epoch_order(self._layout, epoch)
        return self._epochs[epoch]

    def _lengths_of_windows(self, lane: int, epoch: int, first: int) -> Iterator[np.ndarray]:
        """Lengths of the cells of each window of a lane, from window `first` of an epoch on."""
        while self._epoch(epoch).lane_cells[lane]:
            order = self._epoch(epoch)
            for window in range(first, order.n_windows(lane)):
                lengths = self._lengths(order.window_runs(lane, window))
                yield lengths[order.window_order(lane, window)]
            if not self._layout.shuffle:
                return
            epoch = epoch + 1
            first = 0

    def _lengths(self, runs: np.ndarray) -> np.ndarray:
        """Number of genes of each cell of `runs`, `(cells,)` int64."""
        offsets = []
        for shard, first, n in runs.tolist():
            offsets.append(self._shards[shard].indptr[first : first + n + 1])
        # a run of n cells has n + 1 offsets: leave out the difference between a run's end and the
        # next run's start, which is not a cell
        n_cells = runs[:, 2]
        is_cell = np.ones(int(n_cells.sum()) + len(runs) - 1, bool)
        is_cell[np.cumsum(n_cells + 1)[:-1] - 1] = False
        return np.diff(np.concatenate(offsets, dtype=np.int64))[is_cell]

    def _windows(self, epoch: int, before: np.ndarray) -> Iterator[StreamWindow]:
        """Windows of this rank's lanes, from cell `before` of each lane on.

        Window w joins window number w of all lanes that have one.
        """
        while any(self._epoch(epoch).lane_cells[lane] for lane in self._lanes):
            order = self._epoch(epoch)
            first = {lane: order.window_with(lane, int(before[lane])) for lane in self._lanes}
            stop = {lane: order.n_windows(lane) for lane in self._lanes}
            for window in range(min(first.values()), max(stop.values())):
                lanes = [lane for lane in self._lanes if first[lane] <= window < stop[lane]]
                if lanes:
                    yield self._window(order, lanes, window)
            if not self._layout.shuffle:
                return
            epoch = epoch + 1
            before = self._layout.lanes_before(0)

    def _window(self, order: Epoch, lanes: list[int], window: int) -> StreamWindow:
        """Window number `window` of each of `lanes`, with cells in step order."""
        borders = np.array([order.borders[lane][window : window + 2] for lane in lanes])
        sizes = np.diff(borders)[:, 0]
        runs = np.concatenate([order.window_runs(lane, window) for lane in lanes])
        # in stream order, lane after lane: each cell's row in the concatenated runs, and its step
        shuffled = np.concatenate([order.window_order(lane, window) for lane in lanes])
        first_row_of_lane = np.cumsum(sizes) - sizes
        row = shuffled + np.repeat(first_row_of_lane, sizes)
        step = np.concatenate(
            [self._layout.steps_of(lane, np.arange(*span)) for lane, span in zip(lanes, borders)]
        )
        # sort both by step; a step's cells stay lane after lane
        by_step = np.argsort(step, kind="stable")
        step = step[by_step]
        row = row[by_step]
        lane_of_cell = np.repeat(lanes, sizes)[by_step]
        # id of the cell in each row: rows of a run are consecutive cells
        shard, first, n = runs.T
        first_id = self._first_cell[shard] + first
        first_row_of_run = np.cumsum(n) - n
        id_of_row = np.arange(len(row)) + np.repeat(first_id - first_row_of_run, n)
        bytes_of_runs, packed = self._lay_out(runs)
        cells = WindowCells(lane_of_cell, id_of_row[row], packed.select(row))
        step_borders = np.searchsorted(step, np.arange(step[0], step[-1] + 2))
        first_step = order.epoch * self._layout.steps_per_epoch + int(step[0])
        return StreamWindow(cells, first_step, step_borders, bytes_of_runs)

    def _lay_out(self, runs: np.ndarray) -> tuple[Runs, PackedCells]:
        """Where the bytes of runs of cells, `(runs, 3)`, and of each of these cells, in the order
        of the runs, will be in a new memory.
        """
        units = []
        for shard, first, n in runs.tolist():
            units.append(self._shards[shard].borders[2 * first : 2 * (first + n) + 1])
        n_units = 2 * runs[:, 2] + 1
        last = np.cumsum(n_units) - 1  # last border of each run
        borders = np.concatenate(units).astype(np.int64) * ALIGNMENT
        begins = borders[last - n_units + 1]
        ends = borders[last]
        offsets = row_offsets(ends - begins)
        borders += np.repeat(offsets[:-1] - begins, n_units)
        # the genes and the counts of a cell begin at two borders; a run has one more, its end
        is_begin = np.ones(len(borders), bool)
        is_begin[last] = False
        first_border = np.flatnonzero(is_begin)[::2]
        packed = PackedCells(
            recycled_empty(offsets[-1], np.uint8),
            borders[first_border],
            borders[first_border + 1],
            borders[first_border + 2],
            self._lengths(runs),
        )
        return Runs(runs[:, 0], begins, ends, offsets[:-1]), packed
