"""Cells in stream order, read ahead by threads in shuffled windows.

Each block is read by one `preadv`, which scatters its cells to their positions in step order:
windows of all own lanes are read into one buffer, in which the cells of a step stand together, lane
after lane. So neither shuffling nor joining lanes costs a copy, and a step is one slice; small
steps are given some at a time. There are two buffers, one in use and one being filled; their memory
is used again (`recycled_empty`).

Every rank needs the lengths of the cells in other ranks' lanes at each step, to know how many
micro-batches the others cut. They are kept in one table with a row per lane, so that a step costs a
few numpy calls for any number of lanes. Where the cells of each step begin in a window, and how
many each rank has, is computed for many steps at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from cellmill.data.shards.reader import RowFile, iovecs
from cellmill.data.stream.batch import recycled_empty
from cellmill.data.stream.order import Epoch, EpochLayout, epoch_order

_TASKS = 32  # read tasks per buffer: submitting one costs as much as reading some cells
_STEPS = 256  # steps whose numbers of cells are computed at once
# cells of small steps that are given at once: Python's share of each of them gets as much smaller
_TOGETHER = 256


@dataclass(frozen=True)
class WindowCells:
    """Some cells of a window, in the order in which steps take them."""

    lanes: np.ndarray  # `(cells,)` int64, ascending in a step
    cells: np.ndarray  # `(cells,)` int64 ids
    lengths: np.ndarray  # `(cells,)` int64, number of genes of each cell in the shards
    # `(cells + 1,)` int64 offset of each cell's first gene in the whole window: a slice keeps it
    starts: np.ndarray
    # `(nonzeros,)` int32 rows of the vocabulary, in rank order; at most `max_genes` per cell
    genes: np.ndarray
    counts: np.ndarray | None  # `(nonzeros,)`; None if genes are cut to `max_genes`

    def slice(self, start: int, stop: int) -> WindowCells:
        starts = self.starts[start : stop + 1]
        span = slice(starts[0] - self.starts[0], starts[-1] - self.starts[0])
        counts = None if self.counts is None else self.counts[span]
        lanes, cells, lengths = (
            array[start:stop] for array in (self.lanes, self.cells, self.lengths)
        )
        return WindowCells(lanes, cells, lengths, starts, self.genes[span], counts)


@dataclass(frozen=True)
class StreamWindow:
    """Window w of all own lanes; steps are counted over all epochs."""

    cells: WindowCells  # whose genes and counts have yet to be read
    first_step: int
    borders: np.ndarray  # first cell of each step from `first_step` on, and the number of cells
    runs: np.ndarray  # what is read, as in `Epoch`
    position: np.ndarray  # of the cells of `runs`, one after another, among `cells`

    @property
    def last_step(self) -> int:
        return self.first_step + len(self.borders) - 2

    def steps(self, number: int, n: int = 1) -> WindowCells:
        """The cells that step `number`, and those up to `n` steps from it, take from this window;
        may be none.
        """
        if not self.first_step <= number <= self.last_step:
            return self.cells.slice(0, 0)
        first = number - self.first_step
        return self.cells.slice(self.borders[first], self.borders[first + n])


class _Reads:
    """Target position of each row of a window, in file order."""

    def __init__(self, window: WindowCells, position: np.ndarray) -> None:
        # which live as long as their tables
        self._memory = window.counts
        self._window = window
        self._starts = window.starts[position]
        self._lengths = window.lengths[position]
        kept = window.starts[position + 1] - self._starts
        cut = self._lengths - kept
        # the end of a cut row is read into `rest` and ignored, so that it is still one read in disk
        # order
        self._rest, self._genes = (
            np.empty(int(cut.max(initial=0)), np.int32),
            iovecs(window.genes, self._starts, kept),
        )
        self._each = 2 if len(self._rest) else 1
        if len(self._rest):
            ignored = iovecs(self._rest, np.zeros_like(cut), cut)
            self._genes = np.stack([self._genes, ignored], 1).reshape(-1, 2)
        if self._memory is not None:
            self._counts = iovecs(self._memory, self._starts, self._lengths)

    def read(self, runs: list[tuple[RowFile, int, int, int]]) -> None:
        """Read runs of cells: shard, first row in it, number, and position of the first among all
        rows.
        """
        for shard, first, n, at in runs:
            start = int(shard.indptr[first])
            genes = self._genes[self._each * at : self._each * (at + n)]
            if self._memory is None or self._memory.dtype == shard.dtype:
                shard.scatter(
                    start, genes, None if self._memory is None else self._counts[at : at + n]
                )
                continue
            # the shard has 16 bits for counts, where another of the split has 32
            shard.scatter(start, genes, None)
            lengths = self._lengths[at : at + n]
            counts = np.split(
                shard.read_counts(start, start + int(lengths.sum())), np.cumsum(lengths)[:-1]
            )
            for target, part in zip(self._starts[at : at + n].tolist(), counts):
                self._memory[target : target + len(part)] = part


@dataclass(frozen=True)
class PrefetchedSteps:
    """Cells of some consecutive global batches."""

    epoch: int
    # `(cells of all ranks,)`, genes of each cell, by step and rank: the same on every rank
    lengths: np.ndarray
    n_cells: np.ndarray  # `(steps, world)` int64, number of cells of each rank
    taken: WindowCells  # by this rank, by step and lane


class Prefetch:
    """Reader of the cells of a split in the order of `layout`, starting at any step.

    Reads the lanes of `rank`: lane l belongs to rank l % `world`. Of other lanes only the lengths
    are looked up. Of each cell the first `max_genes` genes are read; None reads all of them and
    their counts.
    """

    def __init__(
        self,
        shards: list[RowFile],
        layout: EpochLayout,
        rank: int,
        world: int,
        max_genes: int | None,
        io_threads: int,
    ):
        self._shards = shards
        self._layout = layout
        self._rank = rank
        self._world = world
        by_rank = np.arange(layout.stream.lanes).reshape(-1, world).T
        self._own = by_rank[rank].tolist()
        self._others = np.delete(by_rank, rank, 0).ravel()
        self._first_cell = np.concatenate([[0], np.cumsum(layout.shard_cells)])
        self._dtype = (
            np.result_type(*(shard.dtype for shard in shards)) if max_genes is None else None
        )
        self._max_genes = max_genes
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
        before = layout.lanes_before(step)
        windows = []
        skipped = []
        for lane, cell in zip(self._others.tolist(), before[self._others].tolist()):
            borders = self._epoch(epoch).borders[lane]
            skipped.append(cell - int(borders[_window_of(cell, borders)]))
            windows.append(self._lengths_of_windows(lane, epoch, cell))
        lengths_of_others = LaneLengths(windows, skipped)
        ahead = _ReadAhead(self._windows(epoch, before), self._shards, self._pool)
        while True:
            while step < layout.steps_per_epoch:
                stop = min(step + _STEPS, layout.steps_per_epoch)
                in_lanes = np.diff(layout.lanes_before(np.arange(step, stop + 1)[:, None]), axis=0)
                in_ranks = in_lanes.reshape(stop - step, -1, self._world).sum(1)
                while step < stop:
                    n, parts = ahead.take(
                        epoch * layout.steps_per_epoch + step, in_ranks[:, self._rank]
                    )
                    taken = parts[0] if len(parts) == 1 else self._joined(parts)
                    lengths = taken.lengths
                    if len(self._others):
                        lengths = self._with_others(
                            lengths, lengths_of_others, in_ranks[:n], in_lanes[:n]
                        )
                    yield PrefetchedSteps(epoch, lengths, in_ranks[:n], taken)
                    del taken, parts  # the next window may take their memory
                    step = step + n
                    in_lanes = in_lanes[n:]
                    in_ranks = in_ranks[n:]
            if not layout.shuffle:
                return
            epoch = epoch + 1
            step = 0

    def _with_others(
        self, own: np.ndarray, others: LaneLengths, in_ranks: np.ndarray, in_lanes: np.ndarray
    ) -> np.ndarray:
        """Lengths of all ranks' cells, by step and rank: `own` ones, and of `others`, by cells in
        ranks and lanes.
        """
        parts = []
        of_steps = np.split(own, np.cumsum(in_ranks[:-1, self._rank]))
        for of_step, in_rank, in_lane in zip(of_steps, in_ranks, in_lanes[:, self._others]):
            lengths = others.take(in_lane)
            first = int(in_rank[: self._rank].sum())  # of lower ranks
            parts += [lengths[:first], of_step, lengths[first:]]
        return np.concatenate(parts)

    def _joined(self, parts: list[WindowCells]) -> WindowCells:
        """The cells of parts of a step, lane after lane."""
        spans = [
            (part, *np.searchsorted(part.lanes, [lane, lane + 1]))
            for lane in self._own
            for part in parts
        ]
        # for steps in which this rank has no cells
        none = np.empty(0, np.int64)
        no_genes = np.empty(0, np.int32)
        no_counts = None if self._dtype is None else np.empty(0, self._dtype)
        pieces = [WindowCells(none, none, none, np.zeros(1, np.int64), no_genes, no_counts)]
        pieces += [part.slice(start, stop) for part, start, stop in spans]
        lanes, cells, lengths = (
            np.concatenate([getattr(piece, name) for piece in pieces])
            for name in ("lanes", "cells", "lengths")
        )
        starts = np.cumsum(np.concatenate([[0], *(np.diff(piece.starts) for piece in pieces)]))
        genes = recycled_empty(starts[-1], np.int32)
        counts = None
        np.concatenate([piece.genes for piece in pieces], out=genes)
        if self._dtype is not None:
            counts = recycled_empty(starts[-1], self._dtype)
            np.concatenate(
                [piece.counts for piece in pieces if piece.counts is not None], out=counts
            )
        return WindowCells(lanes, cells, lengths, starts, genes, counts)

    def _epoch(self, epoch: int) -> Epoch:
        if epoch not in self._epochs:
            self._epochs = {epoch - 1: self._epochs[epoch - 1]} if epoch - 1 in self._epochs else {}
            self._epochs[epoch] = epoch_order(self._layout, epoch)
        return self._epochs[epoch]

    def _lengths_of_windows(self, lane: int, epoch: int, cell: int) -> Iterator[np.ndarray]:
        """Lengths of the cells of each window of a lane, from the window with `cell` of an epoch
        on.
        """
        while self._epoch(epoch).lane_cells[lane]:
            order = self._epoch(epoch)
            for window in range(
                _window_of(cell, order.borders[lane]), len(order.borders[lane]) - 1
            ):
                yield self._lengths(order.window_runs(lane, window))[
                    order.window_order(lane, window)
                ]
            if not self._layout.shuffle:
                return
            epoch = epoch + 1
            cell = 0

    def _lengths(self, runs: np.ndarray) -> np.ndarray:
        """Numbers of genes of the cells of `runs`."""
        parts = [
            self._shards[shard].indptr[first : first + n + 1] for shard, first, n in runs.tolist()
        ]
        borders = np.concatenate(parts, dtype=np.int64)
        between = np.ones(len(borders) - 1, bool)
        # from the end of a run to the start of the next
        between[np.cumsum(runs[:, 2] + 1)[:-1] - 1] = False
        return np.diff(borders)[between]

    def _windows(self, epoch: int, before: np.ndarray) -> Iterator[StreamWindow]:
        """Window w of all own lanes, then w + 1, from cell `before` of each lane on."""
        while any(self._epoch(epoch).lane_cells[lane] for lane in self._own):
            order = self._epoch(epoch)
            first = {lane: _window_of(int(before[lane]), order.borders[lane]) for lane in self._own}
            for window in range(
                min(first.values()), max(len(order.borders[lane]) for lane in self._own) - 1
            ):
                lanes = [
                    lane
                    for lane in self._own
                    if first[lane] <= window < len(order.borders[lane]) - 1
                ]
                if lanes:
                    yield self._window(order, lanes, window)
            if not self._layout.shuffle:
                return
            epoch = epoch + 1
            before = self._layout.lanes_before(0)

    def _window(self, order: Epoch, lanes: list[int], window: int) -> StreamWindow:
        """The windows of that number of some lanes; their cells are put in the order in which steps
        take them.
        """
        borders = np.array([order.borders[lane][window : window + 2] for lane in lanes])
        sizes = np.diff(borders)[:, 0]
        runs = np.concatenate([order.window_runs(lane, window) for lane in lanes])
        shuffled = [order.window_order(lane, window) for lane in lanes]
        in_runs = np.concatenate(shuffled) + np.repeat(np.cumsum(sizes) - sizes, sizes)
        steps = np.concatenate(
            [self._layout.steps_of(lane, np.arange(*span)) for lane, span in zip(lanes, borders)]
        )
        by_step = np.argsort(steps, kind="stable")
        steps = steps[by_step]
        in_runs = in_runs[by_step]
        position = np.empty_like(in_runs)
        position[in_runs] = np.arange(len(in_runs))
        shard, first, n = runs.T
        ids = np.arange(len(in_runs)) + np.repeat(
            self._first_cell[shard] + first - (np.cumsum(n) - n), n
        )
        lengths = self._lengths(runs)[in_runs]
        kept = lengths if self._max_genes is None else np.minimum(lengths, self._max_genes)
        starts = np.concatenate([[0], np.cumsum(kept)])
        lane_of = np.repeat(lanes, sizes)[by_step]
        genes = recycled_empty(starts[-1], np.int32)
        counts = None if self._dtype is None else recycled_empty(starts[-1], self._dtype)
        cells = WindowCells(lane_of, ids[in_runs], lengths, starts, genes, counts)
        step_borders = np.searchsorted(steps, np.arange(steps[0], steps[-1] + 2))
        first_step = order.epoch * self._layout.steps_per_epoch + int(steps[0])
        return StreamWindow(cells, first_step, step_borders, runs, position)


class LaneLengths:
    """Lengths of the cells of some lanes in stream order, from the lengths of each lane's windows,
    `(cells,)` each.

    `skipped` are the cells of its first window that each lane does not take. Windows of lanes end
    at the same step, and looking up 1,024 of them at once took more than a second: so lanes get
    their next window early, one after another, at each step as many cells as the step consumes.
    """

    def __init__(self, windows: Sequence[Iterator[np.ndarray]], skipped: Sequence[int]) -> None:
        self._windows = windows
        self._kept = np.zeros((len(windows), 0), np.int32)
        # of each lane, the next cell's column in the table
        self._at = np.zeros(len(windows), np.int64)
        self._end = np.zeros(len(windows), np.int64)
        self._next = 0
        self._due = int(sum(skipped))
        for lane in range(len(windows)):
            self._look_up(lane)
        self._at += np.minimum(np.array(skipped, np.int64), self._end)
        self._widen(2 * self._kept.shape[1])  # at once: a step would wait for the copy

    def take(self, n: np.ndarray) -> np.ndarray:
        """Lengths of the next `n` cells of the lanes, `(lanes,)` int64: `(n.sum(),)` int32, lane by
        lane.
        """
        self._due += int(n.sum())
        while self._due > 0:
            found = self._look_up(self._next)
            self._due = self._due - found if found else 0
            self._next = (self._next + 1) % len(n)
        while len(short := np.flatnonzero(self._end - self._at < n)):
            for lane in short.tolist():
                if not self._look_up(lane):
                    raise IndexError(f"lane {lane} has fewer than {n[lane]} cells left")
        columns = np.arange(n.max())
        of_lane, column = np.nonzero(columns < n[:, None])
        taken = self._kept[of_lane, self._at[of_lane] + column]
        self._at += n
        return taken

    def _look_up(self, lane: int) -> int:
        """Add the lane's next window to its row; returns its number of cells, 0 at the end."""
        lengths = next(self._windows[lane], None)
        if lengths is None:
            return 0
        left = int(self._end[lane] - self._at[lane])
        self._widen(left + len(lengths))
        row = self._kept[lane]
        row[:left] = row[self._at[lane] : self._end[lane]].copy()
        row[left : left + len(lengths)] = lengths
        self._at[lane], self._end[lane] = 0, left + len(lengths)
        return len(lengths)

    def _widen(self, cells: int) -> None:
        more = cells - self._kept.shape[1]
        if more > 0:
            self._kept = np.pad(self._kept, ((0, 0), (0, more)))


class _ReadAhead:
    """Cells of own lanes, step by step; the next windows are read while these are used."""

    def __init__(
        self, windows: Iterator[StreamWindow], shards: list[RowFile], pool: ThreadPoolExecutor
    ):
        self._windows = windows
        self._shards = shards
        self._pool = pool
        # windows that are being read, or have been once their tasks are empty
        self._started: list[tuple[StreamWindow, list[Future[None]]]] = []

    def take(self, step: int, n: np.ndarray) -> tuple[int, list[WindowCells]]:
        """Cells of a step, in as many parts as there are buffers with some of them; `n[0]` in all.

        A step in one buffer is given with those after it of `n[1:]` cells that are there too, up to
        `_TOGETHER` cells. Returns the number of steps. They are counted over all epochs and taken
        in order.
        """
        self._started = [reading for reading in self._started if reading[0].last_step >= step]
        while len(self._started) < 2 and self._start():
            pass
        parts = []
        number = 0
        left = int(n[0])
        while left:
            if number == len(self._started):  # windows of lanes may end at different steps
                started = self._start()
                assert started, f"{left} cells of step {step} are in no window"
            window, tasks = self._started[number]
            part = window.steps(step)
            if len(part.cells):
                while tasks:
                    tasks.pop().result()
                parts.append(part)
                if len(part.cells) == n[0]:
                    first = step - window.first_step
                    in_window = np.diff(window.borders[first : first + len(n) + 1])
                    whole = np.append(in_window == n[: len(in_window)], False).argmin()
                    together = max(
                        1, int(np.searchsorted(n[:whole].cumsum(), _TOGETHER, side="right"))
                    )
                    return together, [window.steps(step, together)]
            left = left - len(part.cells)
            number = number + 1
        return 1, parts

    def _start(self) -> bool:
        """Start to read the next window; False if there is none."""
        window = next(self._windows, None)
        if window is None:
            return False
        n = window.runs[:, 2]
        rows = np.column_stack([window.runs, np.cumsum(n) - n]).tolist()
        runs = [(self._shards[shard], first, n, at) for shard, first, n, at in rows]
        reads = _Reads(window.cells, window.position)
        per_task = -(-len(runs) // _TASKS)
        parts = [runs[first : first + per_task] for first in range(0, len(runs), per_task)]
        tasks = [self._pool.submit(reads.read, part) for part in parts]
        self._started.append((window, tasks))
        return True


def _window_of(cell: int, borders: np.ndarray) -> int:
    """Number of the window with that cell of a lane."""
    return int(np.searchsorted(borders, cell, side="right")) - 1
