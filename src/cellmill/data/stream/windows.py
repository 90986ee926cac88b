"""Windows of shuffled cells, whose packed bytes are read by threads.

The bytes of a window are read in the order of the file into one buffer. Index arrays list its cells
in stream order, so shuffling moves no data, and the cells of a step are one slice. The memory of a
buffer is used again (`recycled_empty`).
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cellmill.data.packing.cell_file import PackedCellFile
from cellmill.data.packing.cells import PackedCells, join_cells
from cellmill.data.packing.layout import ALIGNMENT
from cellmill.data.recycled import recycled_empty
from cellmill.data.rows import choose_rows, iterate_rows, row_offsets
from cellmill.data.stream.order import CellRuns, EpochOrder, OrderCache, OrderRule

# about how many tasks read a window: each costs time to submit. A task reads from one shard, so a
# window over many shards has more
_TARGET_TASKS = 32


class ByteRuns(NamedTuple):
    """Bytes of runs of packed cells, in their shards and in a window's buffer.

    Arrays are `(runs,)` int64.
    """

    shards: np.ndarray  # number of the shard in its split
    starts: np.ndarray  # first byte in the shard's packed bytes
    stops: np.ndarray  # byte after the last
    targets: np.ndarray  # position of the first byte in the buffer

    def split_by_shard(self, max_runs: int) -> Iterator[ByteRuns]:
        """Yield at most `max_runs` runs of one shard at a time, in the order of the shard's bytes."""
        runs = choose_rows(self, np.lexsort((self.starts, self.shards)))
        n_runs = len(runs.shards)
        shard_starts = np.flatnonzero(np.diff(runs.shards)) + 1
        starts = np.union1d(np.arange(0, n_runs, max_runs), shard_starts)
        for start, stop in pairwise([*starts.tolist(), n_runs]):
            yield choose_rows(runs, slice(start, stop))


@dataclass(frozen=True)
class StreamCells:
    """Cells of one data rank in stream order: by step, then by lane.

    Arrays are `(cells,)` int64.
    """

    steps: np.ndarray  # step that takes each cell, counted over all epochs
    lanes: np.ndarray  # lane of each cell
    ids: np.ndarray
    packed: PackedCells

    def select(self, chosen: slice | np.ndarray) -> StreamCells:
        """Select some of the cells, in the same buffer."""
        return StreamCells(
            self.steps[chosen], self.lanes[chosen], self.ids[chosen], self.packed.select(chosen)
        )


def join_stream_cells(pieces: list[StreamCells]) -> StreamCells:
    """Copy cells of some steps from several windows into one buffer, in stream order.

    `pieces`, one per window, may be an empty list: a data rank may have no cells in these steps.
    """
    empty = np.empty(0, np.int64)
    no_cells = PackedCells(np.empty(0, np.uint8), empty, empty, empty, empty)
    pieces = [StreamCells(empty, empty, empty, no_cells), *pieces]
    joined = StreamCells(
        np.concatenate([piece.steps for piece in pieces]),
        np.concatenate([piece.lanes for piece in pieces]),
        np.concatenate([piece.ids for piece in pieces]),
        join_cells([piece.packed for piece in pieces]),
    )
    # the sort is stable, so cells of a lane stay in the order of their windows
    return joined.select(np.lexsort((joined.lanes, joined.steps)))


@dataclass
class JoinedWindow:
    """Window number k of every lane of a data rank, joined into one. Its bytes may still be read.

    Lanes that have no window k are left out.
    """

    cells: StreamCells
    reads: list[Future[None]]  # not yet waited for

    def take(self, step: int, n_steps: int) -> StreamCells:
        """Return the cells of `n_steps` steps from `step` on, possibly none, once their bytes are read.

        Raises the errors of the reads.
        """
        start, stop = np.searchsorted(self.cells.steps, [step, step + n_steps]).tolist()
        taken = self.cells.select(slice(start, stop))
        if len(taken.ids):
            # the first call that takes cells waits for all bytes of the window
            while self.reads:
                self.reads.pop().result()
        return taken


class WindowReader:
    """Reads the windows of `lanes`, the lanes of one data rank, with `io_threads` threads."""

    def __init__(
        self,
        shards: list[PackedCellFile],
        order_rule: OrderRule,
        orders: OrderCache,
        lanes: list[int],
        io_threads: int,
    ) -> None:
        self._shards = shards
        self._order_rule = order_rule
        self._orders = orders
        self._lanes = lanes
        self._shard_offsets = row_offsets(order_rule.shard_cells)
        self._pool = ThreadPoolExecutor(io_threads, thread_name_prefix="cellmill-read")

    def close(self) -> None:
        """End the threads after the reads in progress."""
        self._pool.shutdown(cancel_futures=True)

    def read_windows(self, epoch: int, first_cells: np.ndarray) -> Iterator[JoinedWindow]:
        """For each number k in turn, start to read window k of all lanes, and yield these windows joined.

        Lane l starts at the window that has the cell at position `first_cells[l]`. `first_cells`,
        `(lanes,)`, has all lanes, also those of other ranks. Endless if the rule shuffles.
        """
        if not any(self._orders.get(epoch).lane_cells[lane] for lane in self._lanes):
            return  # no epoch has cells in these lanes: the loop would neither yield nor end
        while True:
            order = self._orders.get(epoch)
            windows_by_lane = {}
            for lane in self._lanes:
                first = order.find_window(lane, int(first_cells[lane]))
                windows_by_lane[lane] = range(first, order.n_windows(lane))
            first_window = min(windows.start for windows in windows_by_lane.values())
            stop_window = max(windows.stop for windows in windows_by_lane.values())
            for window in range(first_window, stop_window):
                lanes = [lane for lane, windows in windows_by_lane.items() if window in windows]
                if lanes:
                    yield self._start_reading(order, lanes, window)
            if not self._order_rule.options.shuffle:
                return
            epoch += 1
            first_cells = np.zeros_like(first_cells)

    def _start_reading(self, order: EpochOrder, lanes: list[int], window: int) -> JoinedWindow:
        """Start to read window number `window` of each of `lanes`."""
        runs = CellRuns.join([order.window_runs(lane, window) for lane in lanes])
        byte_runs, packed = self._allocate(runs)
        max_runs = -(-len(runs.shards) // _TARGET_TASKS)
        reads = []
        for task in byte_runs.split_by_shard(max_runs):
            read = self._shards[int(task.shards[0])].read_bytes
            reads.append(
                self._pool.submit(read, task.starts, task.stops, task.targets, packed.memory)
            )
        return JoinedWindow(self._sort_by_step(order, lanes, window, runs, packed), reads)

    def _sort_by_step(
        self,
        order: EpochOrder,
        lanes: list[int],
        window: int,
        runs: CellRuns,
        packed: PackedCells,
    ) -> StreamCells:
        """Put the cells of window number `window` of `lanes` in stream order.

        `runs` are the runs of cells, lane after lane, and `packed` has the cells in the same order.
        """
        # positions of the window's cells in each lane, (lanes, 2): the first, and the one after the last
        spans = np.array([order.window_offsets[lane][window : window + 2] for lane in lanes])
        n_cells = np.diff(spans)[:, 0]
        # row in `packed` and step of each cell, lane after lane
        shuffled = np.concatenate([order.window_order(lane, window) for lane in lanes])
        first_row_of_lane = np.cumsum(n_cells) - n_cells
        rows = shuffled + np.repeat(first_row_of_lane, n_cells)
        steps = np.concatenate(
            [
                self._order_rule.find_steps(lane, np.arange(*span))
                for lane, span in zip(lanes, spans)
            ]
        )
        # the sort is stable, so a step's cells stay lane after lane
        by_step = np.argsort(steps, kind="stable")
        rows = rows[by_step]
        # the cells of a run have consecutive ids
        first_id = self._shard_offsets[runs.shards] + runs.starts
        first_row_of_run = np.cumsum(runs.n_cells) - runs.n_cells
        id_of_row = np.arange(len(rows)) + np.repeat(first_id - first_row_of_run, runs.n_cells)
        return StreamCells(
            order.epoch * self._order_rule.steps_per_epoch + steps[by_step],
            np.repeat(lanes, n_cells)[by_step],
            id_of_row[rows],
            packed.select(rows),
        )

    def _allocate(self, runs: CellRuns) -> tuple[ByteRuns, PackedCells]:
        """Allocate a buffer that holds runs of cells, one after the other.

        Returns the bytes to read into it, and its cells in the order of the runs.
        """
        # a cell has two parts, its genes and its counts, so a run of n cells has 2 n + 1 offsets
        offsets_of_runs = []
        for shard, start, n in iterate_rows(runs):
            offsets_of_runs.append(
                self._shards[shard].part_offsets[2 * start : 2 * (start + n) + 1]
            )
        in_shard = np.concatenate(offsets_of_runs).astype(np.int64) * ALIGNMENT
        n_offsets = 2 * runs.n_cells + 1
        # indices in `in_shard` of each run's first and last offset
        last_index = np.cumsum(n_offsets) - 1
        first_index = last_index - n_offsets + 1
        starts = in_shard[first_index]
        stops = in_shard[last_index]
        # the same offsets, counted in the buffer
        buffer_offsets = row_offsets(stops - starts)
        in_buffer = in_shard + np.repeat(buffer_offsets[:-1] - starts, n_offsets)
        # indices of the offsets at which a cell's genes start; the start and the stop of its counts follow
        is_part_start = np.ones(len(in_buffer), bool)
        is_part_start[last_index] = False
        gene_index = np.flatnonzero(is_part_start)[::2]
        packed = PackedCells(
            recycled_empty(buffer_offsets[-1], np.uint8),
            gene_starts=in_buffer[gene_index],
            count_starts=in_buffer[gene_index + 1],
            stops=in_buffer[gene_index + 2],
            lengths=count_genes(self._shards, runs),
        )
        return ByteRuns(runs.shards, starts, stops, buffer_offsets[:-1]), packed


def count_genes(shards: list[PackedCellFile], runs: CellRuns) -> np.ndarray:
    """Count the genes of each cell of `runs`, `(cells,)` int64."""
    offsets_of_runs = []
    for shard, start, n in iterate_rows(runs):
        offsets_of_runs.append(shards[shard].indptr[start : start + n + 1])
    # a run of n cells has n + 1 offsets: leave out the difference between the last of a run and the
    # first of the next, which is not a cell
    is_cell = np.ones(int(runs.n_cells.sum()) + len(runs.n_cells) - 1, bool)
    is_cell[np.cumsum(runs.n_cells + 1)[:-1] - 1] = False
    return np.diff(np.concatenate(offsets_of_runs, dtype=np.int64))[is_cell]
