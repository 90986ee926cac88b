"""Reading of window sets: threads read the packed bytes of their cells.

A window set has window number k of every lane of a data rank. Its bytes are read into one buffer, in the
order in which they lie in the files. Index arrays list the cells of the window set in stream order. So
shuffling moves no data, and the cells of a step are one slice of the arrays. The memory of a buffer is used
again by a later window set (`recycled_empty`).
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
from cellmill.data.rows import (
    choose_rows,
    iterate_rows,
    positions_in_rows,
    row_numbers,
    row_offsets,
)
from cellmill.data.stream.order import CellSpans, EpochOrder, OrderCache, OrderRule

# about this many tasks read a window set. More tasks would cost time to submit. A task reads from one shard
# only, so a window set over many shards has more tasks
_TARGET_TASKS = 32


class ByteSpans(NamedTuple):
    """Positions of the bytes of packed cells: in their shards, and in the buffer of a window set.

    Each span of cells has an entry. Arrays are `(spans,)` int64.
    """

    shards: np.ndarray  # number of the shard in its split
    starts: np.ndarray  # position of the first byte in the shard's packed bytes
    stops: np.ndarray  # position after the last byte in the shard's packed bytes
    buffer_starts: np.ndarray  # position of the first byte in the window set's buffer

    def split_into_tasks(self, max_spans: int) -> Iterator[ByteSpans]:
        """Split the spans into the spans that each task reads.

        A task has at most `max_spans` spans, all of one shard, in the order of their bytes in the file.
        """
        spans = choose_rows(self, np.lexsort((self.starts, self.shards)))
        n_spans = len(spans.shards)
        # if the spans are in shards 0, 0, 0, 1 and 1, and `max_spans` is 2, tasks begin at spans 0, 2, 3, 4
        first_of_shard = np.flatnonzero(np.diff(spans.shards)) + 1
        task_starts = np.union1d(np.arange(0, n_spans, max_spans), first_of_shard)
        for start, stop in pairwise([*task_starts.tolist(), n_spans]):
            yield choose_rows(spans, slice(start, stop))


@dataclass(frozen=True)
class StreamCells:
    """Cells of one data rank, with the step that takes each cell. Arrays are `(cells,)` int64."""

    global_steps: np.ndarray  # global step that takes the cell
    lanes: np.ndarray  # lane of the cell
    ids: np.ndarray  # cell id: index of the cell in its split
    packed: PackedCells  # genes and counts of the cells

    def select(self, chosen: slice | np.ndarray) -> StreamCells:
        """Select some of the cells. Their genes and counts stay where they are in the buffer."""
        return StreamCells(
            self.global_steps[chosen],
            self.lanes[chosen],
            self.ids[chosen],
            self.packed.select(chosen),
        )

    def in_stream_order(self) -> StreamCells:
        """Return the cells sorted by step, then by lane. Cells of one step and lane keep their order."""
        return self.select(np.lexsort((self.lanes, self.global_steps)))


def join_stream_cells(pieces: list[StreamCells]) -> StreamCells:
    """Copy the cells of `pieces` into one buffer, and return them in stream order.

    The pieces have the cells of some steps, one piece per window set. The list may be empty, because a data
    rank may have no cells in these steps.
    """
    empty = np.empty(0, np.int64)
    no_cells = PackedCells(np.empty(0, np.uint8), empty, empty, empty, empty)
    pieces = [StreamCells(empty, empty, empty, no_cells), *pieces]
    joined = StreamCells(
        np.concatenate([piece.global_steps for piece in pieces]),
        np.concatenate([piece.lanes for piece in pieces]),
        np.concatenate([piece.ids for piece in pieces]),
        join_cells([piece.packed for piece in pieces]),
    )
    return joined.in_stream_order()


@dataclass
class WindowSet:
    """Window number k of every lane of a data rank. Lanes with fewer windows are left out.

    The reads of the window set's bytes may not have finished.
    """

    cells: StreamCells  # in stream order
    reads: list[Future[None]]  # reads that `take` must still wait for

    def take(self, global_step: int, n_steps: int) -> StreamCells:
        """Return the cells of `n_steps` steps, beginning with step `global_step`. There may be none.

        If there are cells, this method waits until all bytes of the window set are read. It raises the errors
        of the reads.
        """
        global_steps = [global_step, global_step + n_steps]
        start, stop = np.searchsorted(self.cells.global_steps, global_steps).tolist()
        taken = self.cells.select(slice(start, stop))
        if len(taken.ids):
            # only the first call that takes cells has to wait
            while self.reads:
                self.reads.pop().result()
        return taken


def _find_first_offsets(spans: CellSpans, offsets_per_cell: int) -> np.ndarray:
    """Return the index of each cell's first offset in the concatenated offsets of all spans, `(cells,)` int64.

    A span has `offsets_per_cell` offsets for each of its cells, then one offset for its end. Example: one span
    has cells a and b, the next span has cell c, and there are two offsets per cell. The concatenated offsets
    are `a a b b end c c end`. So the cells have their first offsets at indices 0, 2 and 5.
    """
    cell_offsets = row_offsets(spans.cells_per_span)
    n_earlier_ends = row_numbers(cell_offsets)  # for each cell, the number of earlier spans
    return offsets_per_cell * np.arange(cell_offsets[-1]) + n_earlier_ends


def count_genes(shards: list[PackedCellFile], spans: CellSpans) -> np.ndarray:
    """Count the genes of each cell of `spans`, `(cells,)` int64."""
    # a span of n cells has n + 1 offsets: one per cell, and one for the end of the last cell
    gene_offsets = np.concatenate(
        [shards[shard].indptr[start : start + n + 1] for shard, start, n in iterate_rows(spans)],
        dtype=np.int64,
    )
    return np.diff(gene_offsets)[_find_first_offsets(spans, offsets_per_cell=1)]


class WindowReader:
    """Reads the window sets of the data rank that has `lanes`, with `io_threads` threads."""

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
        """Wait for the reads in progress, cancel the reads that have not begun, and end the threads."""
        self._pool.shutdown(cancel_futures=True)

    def read_window_sets(self, epoch: int, lane_starts: np.ndarray) -> Iterator[WindowSet]:
        """Yield the window sets in order. The reads of a window set have been started when it is yielded.

        In training the iterator is endless. Otherwise it stops at the end of the epoch.

        `lane_starts`, `(lanes,)`, has the position of the first cell to read in each lane, also in the lanes
        of other ranks. A lane begins with the window that has this cell. A lane without such a cell begins
        with the next epoch.
        """
        if not any(self._orders.get(epoch).lane_cells[lane] for lane in self._lanes):
            return  # no epoch has cells in these lanes: the loop would neither yield nor end
        while True:
            order = self._orders.get(epoch)
            numbers_by_lane = {}  # numbers of the windows to read in this epoch
            for lane in self._lanes:
                first = order.find_window(lane, int(lane_starts[lane]))
                numbers_by_lane[lane] = range(first, order.n_windows(lane))
            first_number = min(numbers.start for numbers in numbers_by_lane.values())
            stop_number = max(numbers.stop for numbers in numbers_by_lane.values())
            for window_number in range(first_number, stop_number):
                lanes = [
                    lane for lane, numbers in numbers_by_lane.items() if window_number in numbers
                ]
                if lanes:
                    yield self._start_reading(order, lanes, window_number)
            if not self._order_rule.options.is_training:
                return
            epoch += 1
            lane_starts = np.zeros_like(lane_starts)

    def _start_reading(self, order: EpochOrder, lanes: list[int], window_number: int) -> WindowSet:
        """Start to read window set `window_number`, for the lanes that have a window of this number."""
        spans = CellSpans.join([order.list_window_spans(lane, window_number) for lane in lanes])
        byte_spans, packed = self._allocate(spans)
        max_spans = -(-len(spans.shards) // _TARGET_TASKS)
        reads = []
        for task in byte_spans.split_into_tasks(max_spans):
            shard = self._shards[int(task.shards[0])]
            reads.append(
                self._pool.submit(
                    shard.read_bytes, task.starts, task.stops, task.buffer_starts, packed.memory
                )
            )
        return WindowSet(self._list_cells(order, lanes, window_number, spans, packed), reads)

    def _list_cells(
        self,
        order: EpochOrder,
        lanes: list[int],
        window_number: int,
        spans: CellSpans,
        packed: PackedCells,
    ) -> StreamCells:
        """List the cells of window set `window_number`, in stream order.

        `spans` has the spans of all windows of the set, lane after lane. `packed` has the cells of these
        spans in the order of the spans: they are not yet shuffled.
        """
        steps_by_lane = []
        lane_of_cell_by_lane = []
        indices_by_lane = []
        n_earlier = 0  # cells of earlier lanes
        for lane in lanes:
            # the window takes positions start:stop of its lane. The position of a cell after shuffling says
            # which step takes the cell
            start, stop = order.window_offsets[lane][window_number : window_number + 2].tolist()
            steps_by_lane.append(self._order_rule.find_steps(lane, np.arange(start, stop)))
            lane_of_cell_by_lane.append(np.full(stop - start, lane))
            indices_by_lane.append(n_earlier + order.make_window_order(lane, window_number))
            n_earlier += stop - start
        # index in `packed` of each cell, in shuffled order
        indices = np.concatenate(indices_by_lane)
        first_global_step = order.epoch * self._order_rule.steps_per_epoch
        cells = StreamCells(
            first_global_step + np.concatenate(steps_by_lane),
            np.concatenate(lane_of_cell_by_lane),
            self._list_cell_ids(spans)[indices],
            packed.select(indices),
        )
        return cells.in_stream_order()

    def _list_cell_ids(self, spans: CellSpans) -> np.ndarray:
        """List the ids of the cells of `spans`, `(cells,)` int64. The ids in a span are consecutive."""
        first_ids = self._shard_offsets[spans.shards] + spans.starts
        positions = positions_in_rows(row_offsets(spans.cells_per_span))
        return np.repeat(first_ids, spans.cells_per_span) + positions

    def _allocate(self, spans: CellSpans) -> tuple[ByteSpans, PackedCells]:
        """Allocate a buffer for the packed cells of `spans`. The cells are to lie there span after span.

        Returns the positions of the bytes in the shards and in the buffer, and the packed cells in the order of
        the spans. The bytes are not read yet.
        """
        gene_starts, count_starts, stops = self._find_bytes(spans)
        # the bytes of a span begin with the genes of its first cell, and end with the counts of its last cell
        cell_offsets = row_offsets(spans.cells_per_span)
        span_starts = gene_starts[cell_offsets[:-1]]
        span_stops = stops[cell_offsets[1:] - 1]
        buffer_offsets = row_offsets(span_stops - span_starts)
        buffer_starts = buffer_offsets[:-1]
        # position of each cell's bytes in the buffer minus their position in the shard
        shift = np.repeat(buffer_starts - span_starts, spans.cells_per_span)
        packed = PackedCells(
            recycled_empty(buffer_offsets[-1], np.uint8),
            gene_starts=gene_starts + shift,
            count_starts=count_starts + shift,
            stops=stops + shift,
            lengths=count_genes(self._shards, spans),
        )
        return ByteSpans(spans.shards, span_starts, span_stops, buffer_starts), packed

    def _find_bytes(self, spans: CellSpans) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Find where the packed bytes of each cell of `spans` are in its shard.

        Returns the position of the first byte of the cell's genes, the first byte of its counts, and the byte
        after its counts. Each is `(cells,)` int64.
        """
        # a span of n cells has 2 * n + 1 offsets: two per cell, for its genes and its counts, and one for the
        # end of the span
        part_offsets = np.concatenate(
            [
                self._shards[shard].part_offsets[2 * start : 2 * (start + n) + 1]
                for shard, start, n in iterate_rows(spans)
            ]
        ).astype(np.int64)
        part_offsets *= ALIGNMENT
        first = _find_first_offsets(spans, offsets_per_cell=2)
        return part_offsets[first], part_offsets[first + 1], part_offsets[first + 2]
