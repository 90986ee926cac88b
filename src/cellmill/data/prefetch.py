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

from cellmill.data.lane_lengths import LaneLengths
from cellmill.data.repeated_epoch import RepeatedEpoch, epoch_order
from cellmill.data.shard_file import RowFile
from cellmill.data.shuffle import Epoch, EpochLayout, Runs

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class PrefetchedStep:
    """Cells of one global batch; `genes` and `counts` are overwritten by the next step."""

    epoch: int
    lengths: np.ndarray  # `(lanes, cells)`, genes of each cell of all lanes, the same on every rank; 0 behind the last
    n_cells: np.ndarray  # `(lanes,)` int64, number of cells of each lane
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
        self._epochs: dict[int, Epoch | RepeatedEpoch] = {}
        self._pool = ThreadPoolExecutor(io_threads, thread_name_prefix="cellmill-read")

    def close(self) -> None:
        """End the threads after the reads in progress."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def steps(self, epoch: int, step: int) -> Iterator[PrefetchedStep]:
        """Steps from the given one on: endless if the layout shuffles, else to the end of the epoch."""
        layout = self._layout
        before = layout.lanes_before(step)
        own = {lane: self._lane(lane, epoch, int(before[lane])) for lane in sorted(self._own)}
        others = np.array([lane for lane in range(layout.lanes) if lane not in self._own], np.int64)
        lengths = self._lengths_of(others, epoch, before)
        while True:
            for number in range(step, layout.steps_per_epoch):
                n = layout.lanes_before(number + 1) - layout.lanes_before(number)
                table = np.zeros((layout.lanes, n.max()), np.int32)
                of_others = lengths.take(n[others])
                table[others, : of_others.shape[1]] = of_others
                yield self._step(epoch, [of_lane.take(int(n[lane])) for lane, of_lane in own.items()], table, n)
            if not layout.shuffle:
                return
            epoch, step = epoch + 1, 0

    def _lane(self, lane: int, epoch: int, cell: int) -> _Lane:
        return _Lane(((self._plan(*order), first) for order, first in self._windows(lane, epoch, cell)), self._read)

    def _lengths_of(self, lanes: np.ndarray, epoch: int, before: np.ndarray) -> LaneLengths:
        """Lengths of lanes that are not read, each from its cell `before` of an epoch on."""
        windows, skipped = [], []
        for lane, cell in zip(lanes.tolist(), before[lanes].tolist()):
            borders = self._epoch(epoch).borders[lane]
            skipped.append(cell - int(borders[_window_of(cell, borders)]))
            windows.append(self._lengths(*order) for order, _ in self._windows(lane, epoch, cell))
        return LaneLengths(windows, skipped)

    def _step(self, epoch: int, taken: list[list[_Window]], lengths: np.ndarray, n: np.ndarray) -> PrefetchedStep:
        """The step of the windows taken from own lanes; their `lengths` are filled in."""
        for lane, windows in zip(sorted(self._own), taken):
            lengths[lane, : n[lane]] = np.concatenate([_NONE, *(window.lengths for window in windows)])
        own = [window for windows in taken for window in windows]
        read = np.concatenate([_NONE, *(np.diff(window.starts) for window in own)])
        cells = np.concatenate([_NONE, *(window.cells for window in own)])
        starts = np.concatenate([[0], np.cumsum(read)])
        return PrefetchedStep(epoch, lengths, n, cells, starts, *self._concatenated(own))

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

    def _epoch(self, epoch: int) -> Epoch | RepeatedEpoch:
        if epoch not in self._epochs:
            self._epochs = {epoch - 1: self._epochs[epoch - 1]} if epoch - 1 in self._epochs else {}
            self._epochs[epoch] = epoch_order(self._layout, epoch)
        return self._epochs[epoch]

    def _windows(self, lane: int, epoch: int, cell: int) -> Iterator[tuple[_Order, int]]:
        """Windows of a lane, from `cell` of an epoch on, and the first cell to use in each."""
        while self._epoch(epoch).lane_cells[lane]:
            order = self._epoch(epoch)
            borders = order.borders[lane]
            for window in range(_window_of(cell, borders), len(borders) - 1):
                runs, permutation = order.window_runs(lane, window), order.window_order(lane, window)
                yield (runs, permutation), max(cell - int(borders[window]), 0)
            if not self._layout.shuffle:
                return
            epoch, cell = epoch + 1, 0

    def _lengths(self, runs: Runs, order: np.ndarray) -> np.ndarray:
        """Numbers of genes of the cells of `runs`, in that order."""
        spans = zip(runs.shard.tolist(), runs.first.tolist(), runs.n.tolist())
        parts = [self._shards[shard].indptr[first : first + n + 1] for shard, first, n in spans]
        borders = np.concatenate(parts, dtype=np.int64)
        between = np.ones(len(borders) - 1, bool)
        between[np.cumsum(runs.n + 1)[:-1] - 1] = False  # from the end of a run to the start of the next
        return np.diff(borders)[between][order]

    def _plan(self, runs: Runs, order: np.ndarray) -> _Plan:
        spans = list(zip(runs.shard.tolist(), runs.first.tolist(), runs.n.tolist()))
        cells = [np.arange(n) + (self._first_cell[shard] + first) for shard, first, n in spans]
        lengths = self._lengths(runs, order)
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

    def __init__(self, windows: Iterator[tuple[_Plan, int]], read: _Read):
        self._windows, self._read = windows, read
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
        self._started.append((*self._read(plan, buffer), buffer, begin))


class _Buffer:
    """Reusable memory that grows on demand."""

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}

    def array(self, name: str, size: int, dtype: np.dtype | type) -> np.ndarray:
        if name not in self._arrays or len(self._arrays[name]) < size:
            self._arrays[name] = np.empty(size + size // 8, dtype)
        return self._arrays[name][:size]


_Order = tuple[Runs, np.ndarray]
"""Runs of a window's cells, and the permutation of these."""
_Read = Callable[[_Plan, _Buffer], tuple[_Window, list["Future[None]"]]]


def _window_of(cell: int, borders: np.ndarray) -> int:
    """Number of the window with that cell of a lane."""
    return int(np.searchsorted(borders, cell, side="right")) - 1


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
