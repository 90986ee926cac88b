"""Sets of windows of shuffled cells, whose packed bytes are read by threads.

A window set has window number k of every lane of a data rank. Its bytes are read in the order of the
files into one buffer. Index arrays list its cells in stream order, so shuffling moves no data, and the
cells of a step are one slice. The memory of a buffer is used again (`recycled_empty`).
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

# about how many tasks read a window set: each costs time to submit. A task reads from one shard, so
# a window set over many shards has more
_TARGET_TASKS = 32


class ByteSpans(NamedTuple):
    """Bytes of spans of packed cells, in their shards and in a window set's buffer.

    Arrays are `(spans,)` int64.
    """

    shards: np.ndarray  # number of the shard in its split
    starts: np.ndarray  # first byte in the shard's packed bytes
    stops: np.ndarray  # byte after the last
    buffer_starts: np.ndarray  # position of the first byte in the window set's buffer

    def read_tasks(self, max_spans: int) -> Iterator[ByteSpans]:
        """Yield the spans that each task reads: at most `max_spans`, of one shard, in its bytes' order."""
        spans = choose_rows(self, np.lexsort((self.starts, self.shards)))
        n_spans = len(spans.shards)
        # of spans in shards 0, 0, 0, 1 and 1, at most two at a time: tasks begin at spans 0, 2, 3 and 4
        first_of_shard = np.flatnonzero(np.diff(spans.shards)) + 1
        starts = np.union1d(np.arange(0, n_spans, max_spans), first_of_shard)
        for start, stop in pairwise([*starts.tolist(), n_spans]):
            yield choose_rows(spans, slice(start, stop))


@dataclass(frozen=True)
class StreamCells:
    """Cells of one data rank. Arrays are `(cells,)` int64."""

    global_steps: np.ndarray  # global step that takes each cell
    lanes: np.ndarray  # lane of each cell
    ids: np.ndarray
    packed: PackedCells

    def select(self, chosen: slice | np.ndarray) -> StreamCells:
        """Select some of the cells, in the same buffer."""
        return StreamCells(
            self.global_steps[chosen],
            self.lanes[chosen],
            self.ids[chosen],
            self.packed.select(chosen),
        )

    def in_stream_order(self) -> StreamCells:
        """Return the cells by step, then by lane; cells of a step and lane keep their order."""
        return self.select(np.lexsort((self.lanes, self.global_steps)))


def join_stream_cells(pieces: list[StreamCells]) -> StreamCells:
    """Copy cells of some steps from several window sets into one buffer, in stream order.

    `pieces`, one per window set, may be an empty list: a data rank may have no cells in these steps.
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
    """Window number k of every lane of a data rank that has one. Reading its bytes may not have ended."""

    cells: StreamCells  # in stream order
    reads: list[Future[None]]  # not yet waited for

    def take(self, global_step: int, n_steps: int) -> StreamCells:
        """Return the cells of `n_steps` steps from `global_step` on; there may be none.

        Waits until their bytes are read, and raises the errors of the reads.
        """
        global_steps = [global_step, global_step + n_steps]
        start, stop = np.searchsorted(self.cells.global_steps, global_steps).tolist()
        taken = self.cells.select(slice(start, stop))
        if len(taken.ids):
            # the first call that takes cells waits for all bytes of the window set
            while self.reads:
                self.reads.pop().result()
        return taken


def _find_first_offsets(spans: CellSpans, offsets_per_cell: int) -> np.ndarray:
    """Find where each cell's first offset is among the offsets of all spans, `(cells,)` int64.

    Each span has the offsets of its cells, then its end. For cells a and b of one span and c of the
    next, with two offsets per cell, these are `a a b b end c c end`: the cells begin at 0, 2 and 5.
    """
    cell_offsets = row_offsets(spans.cells_per_span)
    n_earlier_ends = row_numbers(cell_offsets)  # one for each earlier span
    return offsets_per_cell * np.arange(cell_offsets[-1]) + n_earlier_ends


def count_genes(shards: list[PackedCellFile], spans: CellSpans) -> np.ndarray:
    """Count the genes of each cell of `spans`, `(cells,)` int64."""
    # a span of n cells has n + 1 offsets: one per cell, and the end of the last
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
        """Wait for the reads in progress, cancel the others, and end the threads."""
        self._pool.shutdown(cancel_futures=True)

    def read_windows(self, epoch: int, lane_starts: np.ndarray) -> Iterator[WindowSet]:
        """Start to read each window set in turn, and yield it. Endless in training.

        Lane l begins at the window that has its cell at position `lane_starts[l]`, or with the next epoch
        if it has no such cell. `lane_starts`, `(lanes,)`, has all lanes, also those of other ranks.
        """
        if not any(self._orders.get(epoch).lane_cells[lane] for lane in self._lanes):
            return  # no epoch has cells in these lanes: the loop would neither yield nor end
        while True:
            order = self._orders.get(epoch)
            numbers_by_lane = {}  # numbers of the windows to read
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
        """Start to read the window set of number `window_number`, which `lanes` have."""
        spans = CellSpans.join([order.window_spans(lane, window_number) for lane in lanes])
        byte_spans, packed = self._allocate(spans)
        max_spans = -(-len(spans.shards) // _TARGET_TASKS)
        reads = []
        for task in byte_spans.read_tasks(max_spans):
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
        """List the cells of the window set of number `window_number` in stream order.

        `spans` are the spans of its windows, lane after lane, and `packed` has their cells as they lie
        in the spans.
        """
        steps = []
        lane_of_cell = []
        packed_indices = []  # index in `packed` of each cell
        n_earlier = 0  # cells of earlier lanes
        for lane in lanes:
            # a window has positions start:stop of its lane, which fix the steps of its shuffled cells
            start, stop = order.window_offsets[lane][window_number : window_number + 2].tolist()
            steps.append(self._order_rule.find_steps(lane, np.arange(start, stop)))
            lane_of_cell.append(np.full(stop - start, lane))
            packed_indices.append(n_earlier + order.window_order(lane, window_number))
            n_earlier += stop - start
        shuffled = np.concatenate(packed_indices)
        cells = StreamCells(
            order.epoch * self._order_rule.steps_per_epoch + np.concatenate(steps),
            np.concatenate(lane_of_cell),
            self._list_cell_ids(spans)[shuffled],
            packed.select(shuffled),
        )
        return cells.in_stream_order()

    def _list_cell_ids(self, spans: CellSpans) -> np.ndarray:
        """List the ids of the cells of `spans`, `(cells,)` int64: those of a span are consecutive."""
        first_ids = self._shard_offsets[spans.shards] + spans.starts
        positions = positions_in_rows(row_offsets(spans.cells_per_span))
        return np.repeat(first_ids, spans.cells_per_span) + positions

    def _allocate(self, spans: CellSpans) -> tuple[ByteSpans, PackedCells]:
        """Allocate a buffer for the packed cells of `spans`, span after span.

        Returns the bytes to read into it, and its cells in the order of the spans.
        """
        gene_starts, count_starts, stops = self._find_bytes(spans)
        # a span begins with its first cell's genes, and stops with its last cell's counts
        cell_offsets = row_offsets(spans.cells_per_span)
        span_starts = gene_starts[cell_offsets[:-1]]
        span_stops = stops[cell_offsets[1:] - 1]
        buffer_offsets = row_offsets(span_stops - span_starts)
        buffer_starts = buffer_offsets[:-1]
        # distance of each cell's bytes in the buffer from its bytes in the shard
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
        """Find the packed bytes of each cell of `spans` in its shard.

        Returns the first byte of its genes, the first byte of its counts, and the byte after them,
        `(cells,)` int64 each.
        """
        # a span of n cells has 2 n + 1 offsets: of each cell's genes and counts, and of the span's end
        part_offsets = np.concatenate(
            [
                self._shards[shard].part_offsets[2 * start : 2 * (start + n) + 1]
                for shard, start, n in iterate_rows(spans)
            ]
        ).astype(np.int64)
        part_offsets *= ALIGNMENT
        first = _find_first_offsets(spans, offsets_per_cell=2)
        return part_offsets[first], part_offsets[first + 1], part_offsets[first + 2]
