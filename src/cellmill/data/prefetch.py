"""Cells in stream order, read ahead by threads in shuffled windows.

A block is one `preadv` that scatters its cells to their shuffled positions in the window's buffer, so shuffling costs
no copy, and a batch is one slice of the window of each lane. A lane has two buffers, one in use and one being filled;
they are reused, because fresh memory costs about as much as the reading (a page fault per 4 KiB).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from cellmill.data.shard_file import RowFile
from cellmill.data.shuffle import Epoch, EpochLayout, Runs

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class PrefetchedStep:
    """Cells of one global batch; `genes` and `counts` are overwritten by the next step."""

    lengths: list[np.ndarray]  # for each lane, number of genes of each of its cells; the same on every rank
    cells: np.ndarray  # `(cells,)` int64 ids of this rank's cells, by lane
    starts: np.ndarray  # `(cells + 1,)` int64, offset of each cell's first gene
    genes: np.ndarray  # `(nonzeros,)` int32 rows of the vocabulary, in rank order; at most `max_genes` per cell
    counts: np.ndarray | None  # `(nonzeros,)`; None if genes are cut to `max_genes`


class Prefetch:
    """Reader of the cells of a split in the order of `layout`, starting at any step.

    Reads `lanes`; of the others only the lengths are looked up. Of each cell the first `max_genes` genes are read; None
    reads all of them and their counts.
    """

    def __init__(
        self, shards: list[RowFile], layout: EpochLayout, lanes: list[int], *, max_genes: int | None, io_threads: int
    ):
        self._shards, self._layout, self._own = shards, layout, set(lanes)
        self._first_cell = np.concatenate([[0], np.cumsum(layout.shard_cells)])
        self._dtype = np.result_type(*(shard.dtype for shard in shards)) if max_genes is None else None
        self._max_genes = max_genes
        self._buffer = _Buffer()  # for a step
        self._epochs: dict[int, Epoch] = {}
        self._pool = ThreadPoolExecutor(io_threads, thread_name_prefix="cellmill-read")

    def close(self) -> None:
        """End the threads after the reads in progress."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def steps(self, epoch: int, step: int) -> Iterator[PrefetchedStep]:
        """Steps from the given one on: endless if the layout shuffles, else to the end of the epoch."""
        layout = self._layout
        lanes = [self._lane(lane, epoch, step * layout.per_lane) for lane in range(layout.lanes)]
        while True:
            for number in range(step, layout.steps_per_epoch):
                first = number * layout.per_lane
                yield self._step([lane.take(min(layout.per_lane, max(lane.n_cells - first, 0))) for lane in lanes])
            if not layout.shuffle:
                return
            epoch, step = epoch + 1, 0

    def _lane(self, lane: int, epoch: int, cell: int) -> _Lane:
        n_cells = self._epoch(epoch).lane_cells[lane]
        return _Lane(self._windows(lane, epoch, cell) if n_cells else iter(()), self._read, lane in self._own, n_cells)

    def _step(self, taken: list[list[_Window]]) -> PrefetchedStep:
        own = [window for lane in sorted(self._own) for window in taken[lane]]
        lengths = [np.concatenate([_NONE, *(window.lengths for window in windows)]) for windows in taken]
        read = np.concatenate([_NONE, *(np.diff(window.starts) for window in own)])
        cells = np.concatenate([_NONE, *(window.cells for window in own)])
        return PrefetchedStep(lengths, cells, np.concatenate([[0], np.cumsum(read)]), *self._concatenated(own))

    def _concatenated(self, own: list[_Window]) -> tuple[np.ndarray, np.ndarray | None]:
        if len(own) == 1:
            return own[0].genes, own[0].counts
        total = sum(len(window.genes) for window in own)
        genes = self._buffer.array("genes", total, np.int32)
        np.concatenate([window.genes for window in own] or [genes], out=genes)
        if self._dtype is None:
            return genes, None
        counts = self._buffer.array("counts", total, self._dtype)
        np.concatenate([window.counts for window in own if window.counts is not None] or [counts], out=counts)
        return genes, counts

    def _epoch(self, epoch: int) -> Epoch:
        if epoch not in self._epochs:
            self._epochs = {epoch - 1: self._epochs[epoch - 1]} if epoch - 1 in self._epochs else {}
            self._epochs[epoch] = Epoch(self._layout, epoch)
        return self._epochs[epoch]

    def _windows(self, lane: int, epoch: int, cell: int) -> Iterator[tuple[_Plan, int]]:
        """Windows to read, from `cell` of an epoch on, and the first cell to use in each."""
        while True:
            order = self._epoch(epoch)
            borders = order.borders[lane]
            for window in range(int(np.searchsorted(borders, cell, side="right")) - 1, len(borders) - 1):
                runs, permutation = order.window_runs(lane, window), order.window_order(lane, window)
                yield self._plan(runs, permutation), max(cell - int(borders[window]), 0)
            if not self._layout.shuffle:
                return
            epoch, cell = epoch + 1, 0

    def _plan(self, runs: Runs, order: np.ndarray) -> _Plan:
        parts, cells = [], []
        spans = list(zip(runs.shard.tolist(), runs.first.tolist(), runs.n.tolist()))
        for shard, first, n in spans:
            parts.append(np.diff(self._shards[shard].indptr[first : first + n + 1]))
            cells.append(np.arange(n) + (self._first_cell[shard] + first))
        lengths = np.concatenate(parts)[order]
        kept = lengths if self._max_genes is None else np.minimum(lengths, self._max_genes)
        position = np.empty_like(order)
        position[order] = np.arange(len(order))
        starts = np.concatenate([[0], np.cumsum(kept)])
        window = _Window(np.concatenate(cells)[order], lengths, starts, np.empty(0, np.int32), None)
        return _Plan(spans, position, window)

    def _read(self, plan: _Plan, buffer: _Buffer) -> tuple[_Window, list[Future[None]]]:
        """Start to read a window into `buffer`."""
        total = int(plan.window.starts[-1])
        counts = buffer.array("counts", total, self._dtype) if self._dtype is not None else None
        window = replace(plan.window, genes=buffer.array("genes", total, np.int32), counts=counts)
        most_cut = int((window.lengths - np.diff(window.starts)).max(initial=0))
        rest, at = np.empty(most_cut, np.int32), 0
        tasks: list[Future[None]] = []
        for shard, first, n in plan.spans:
            position = plan.position[at : at + n]
            tasks.append(self._pool.submit(_read_run, self._shards[shard], first, position, window, rest))
            at += n
        return window, tasks


@dataclass(frozen=True)
class _Window:
    """Cells in stream order: a window, or part of one."""

    cells: np.ndarray
    lengths: np.ndarray  # number of genes of each cell in the shards
    starts: np.ndarray  # offset of each cell's first gene in `genes`
    genes: np.ndarray
    counts: np.ndarray | None

    def part(self, start: int, stop: int, copy: bool) -> _Window:
        chosen, starts = slice(start, stop), self.starts[start : stop + 1]
        span = slice(starts[0], starts[-1]) if len(self.genes) else slice(0)
        genes, counts = self.genes[span], None if self.counts is None else self.counts[span]
        if copy:
            genes, counts = genes.copy(), None if counts is None else counts.copy()
        return _Window(self.cells[chosen], self.lengths[chosen], starts, genes, counts)


@dataclass(frozen=True)
class _Plan:
    """A window to be read: `spans` are (shard, first row, rows); their i-th cell goes to `position[i]`."""

    spans: list[tuple[int, int, int]]
    position: np.ndarray
    window: _Window  # without genes and counts


class _Lane:
    """One lane: its windows in order over epochs; the next one is read while this one is used."""

    def __init__(self, windows: Iterator[tuple[_Plan, int]], read: _Read, own: bool, n_cells: int):
        self.n_cells = n_cells
        self._windows, self._read, self._own = windows, read, own
        self._free = [_Buffer(), _Buffer()]
        self._started: list[tuple[_Window, list[Future[None]], _Buffer, int]] = []
        self._at = 0
        self._start()
        self._start()
        if self._started:
            self._at = self._started[0][3]

    def take(self, n: int) -> list[_Window]:
        """Next `n` cells, valid until the next call."""
        parts = []
        while n:
            window, tasks, _, _ = self._started[0]
            while tasks:
                tasks.pop().result()
            stop = min(self._at + n, len(window.cells))
            last = stop == len(window.cells)
            parts.append(window.part(self._at, stop, copy=last))  # the buffer of a used-up window is refilled
            n, self._at = n - (stop - self._at), stop
            if last:
                self._free.append(self._started.pop(0)[2])
                self._at = 0
                self._start()
        return parts

    def _start(self) -> None:
        plan, begin = next(self._windows, (None, 0))
        if plan is None:
            return
        buffer = self._free.pop()
        window, tasks = self._read(plan, buffer) if self._own else (plan.window, [])
        self._started.append((window, tasks, buffer, begin))


class _Buffer:
    """Reusable memory that grows on demand."""

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}

    def array(self, name: str, size: int, dtype: np.dtype | type) -> np.ndarray:
        if name not in self._arrays or len(self._arrays[name]) < size:
            self._arrays[name] = np.empty(size + size // 8, dtype)
        return self._arrays[name][:size]


_Read = Callable[[_Plan, _Buffer], tuple[_Window, list["Future[None]"]]]


def _read_run(shard: RowFile, first: int, position: np.ndarray, window: _Window, rest: np.ndarray) -> None:
    """Read contiguous cells from row `first` on; cell i goes to `position[i]` of the window."""
    start = int(shard.indptr[first])
    lengths = np.diff(shard.indptr[first : first + len(position) + 1])
    low, high = window.starts[position].tolist(), window.starts[position + 1].tolist()
    whole = window.genes.data
    views = [whole[a:b] for a, b in zip(low, high)]
    if len(rest):
        # the end of a cut row is read into `rest` and ignored, so that it is still one read in disk order
        ignored, spans = rest.data, zip(lengths.tolist(), low, high)
        views = [view for view, (n, a, b) in zip(views, spans) for view in (view, ignored[: n - b + a])]
    shard.read_genes(start, views)
    if window.counts is None:
        return
    if window.counts.dtype == shard.dtype:
        whole = window.counts.data
        shard.read_counts(start, [whole[a:b] for a, b in zip(low, high)])
        return
    # this shard has 16-bit counts, another of the split 32-bit ones
    counts = np.empty(int(lengths.sum()), shard.dtype)
    shard.read_counts(start, [counts])
    for a, b, part in zip(low, high, np.split(counts, np.cumsum(lengths)[:-1])):
        window.counts[a:b] = part
