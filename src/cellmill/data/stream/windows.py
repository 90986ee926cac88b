"""Rank windows of shuffled cells, whose packed bytes are read by threads.

A rank window has window number k of every lane of a data rank. Its bytes are read in the order of the
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

# about how many tasks read a rank window: each costs time to submit. A task reads from one shard, so
# a rank window over many shards has more
_TARGET_TASKS = 32


class ByteSpans(NamedTuple):
    """Bytes of spans of packed cells, in their shards and in a rank window's buffer.

    Arrays are `(spans,)` int64.
    """

    shards: np.ndarray  # number of the shard in its split
    starts: np.ndarray  # first byte in the shard's packed bytes
    stops: np.ndarray  # byte after the last
    targets: np.ndarray  # position of the first byte in the buffer

    def split_by_shard(self, max_spans: int) -> Iterator[ByteSpans]:
        """Yield at most `max_spans` spans of one shard at a time, in the order of the shard's bytes."""
        spans = choose_rows(self, np.lexsort((self.starts, self.shards)))
        n_spans = len(spans.shards)
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
    """Copy cells of some steps from several rank windows into one buffer, in stream order.

    `pieces`, one per rank window, may be an empty list: a data rank may have no cells in these steps.
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
class RankWindow:
    """Window number k of every lane of a data rank that has one. Its bytes may still be read."""

    cells: StreamCells  # in stream order
    reads: list[Future[None]]  # not yet waited for

    def take(self, global_step: int, n_steps: int) -> StreamCells:
        """Return the cells of `n_steps` steps from `global_step` on, once their bytes are read.

        There may be none. Raises the errors of the reads.
        """
        global_steps = [global_step, global_step + n_steps]
        start, stop = np.searchsorted(self.cells.global_steps, global_steps).tolist()
        taken = self.cells.select(slice(start, stop))
        if len(taken.ids):
            # the first call that takes cells waits for all bytes of the rank window
            while self.reads:
                self.reads.pop().result()
        return taken


class WindowReader:
    """Reads the rank windows of the data rank that has `lanes`, with `io_threads` threads."""

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

    def read_windows(self, epoch: int, lane_starts: np.ndarray) -> Iterator[RankWindow]:
        """Start to read each rank window in turn, and yield it.

        Lane l begins at the window with its cell `lane_starts[l]`. `lane_starts`, `(lanes,)`, has all
        lanes, also those of other ranks. Endless in training.
        """
        if not any(self._orders.get(epoch).lane_cells[lane] for lane in self._lanes):
            return  # no epoch has cells in these lanes: the loop would neither yield nor end
        while True:
            order = self._orders.get(epoch)
            windows_by_lane = {}
            for lane in self._lanes:
                first = order.find_window(lane, int(lane_starts[lane]))
                windows_by_lane[lane] = range(first, order.n_windows(lane))
            first_window = min(windows.start for windows in windows_by_lane.values())
            stop_window = max(windows.stop for windows in windows_by_lane.values())
            for window in range(first_window, stop_window):
                lanes = [lane for lane, windows in windows_by_lane.items() if window in windows]
                if lanes:
                    yield self._start_reading(order, lanes, window)
            if not self._order_rule.options.is_training:
                return
            epoch += 1
            lane_starts = np.zeros_like(lane_starts)

    def _start_reading(self, order: EpochOrder, lanes: list[int], window: int) -> RankWindow:
        """Start to read the rank window of number `window`, which `lanes` have."""
        spans = CellSpans.join([order.window_spans(lane, window) for lane in lanes])
        byte_spans, packed = self._allocate(spans)
        max_spans = -(-len(spans.shards) // _TARGET_TASKS)
        reads = []
        for task in byte_spans.split_by_shard(max_spans):
            shard = self._shards[int(task.shards[0])]
            reads.append(
                self._pool.submit(
                    shard.read_bytes, task.starts, task.stops, task.targets, packed.memory
                )
            )
        return RankWindow(self._shuffle(order, lanes, window, spans, packed), reads)

    def _shuffle(
        self,
        order: EpochOrder,
        lanes: list[int],
        window: int,
        spans: CellSpans,
        packed: PackedCells,
    ) -> StreamCells:
        """Shuffle the cells of window number `window` of each of `lanes`; return them in stream order.

        `spans` are the windows' spans, lane after lane, and `packed` has their cells in the same order.
        """
        steps = []
        lane_of_cell = []
        shuffled_cells = []  # cells of `packed` in the shuffled order
        n_earlier = 0  # cells of earlier lanes
        for lane in lanes:
            # the shuffled cells are at positions start:stop of the lane, which fix their steps
            start, stop = order.window_offsets[lane][window : window + 2].tolist()
            steps.append(self._order_rule.find_steps(lane, np.arange(start, stop)))
            lane_of_cell.append(np.full(stop - start, lane))
            shuffled_cells.append(n_earlier + order.window_order(lane, window))
            n_earlier += stop - start
        # the cells of a span have consecutive ids
        first_ids = self._shard_offsets[spans.shards] + spans.starts
        positions = positions_in_rows(row_offsets(spans.cells_per_span))
        ids = np.repeat(first_ids, spans.cells_per_span) + positions
        shuffled = np.concatenate(shuffled_cells)
        cells = StreamCells(
            order.epoch * self._order_rule.steps_per_epoch + np.concatenate(steps),
            np.concatenate(lane_of_cell),
            ids[shuffled],
            packed.select(shuffled),
        )
        return cells.in_stream_order()

    def _allocate(self, spans: CellSpans) -> tuple[ByteSpans, PackedCells]:
        """Allocate a buffer that holds spans of cells, one after the other.

        Returns the bytes to read into it, and its cells in the order of the spans.
        """
        # bytes of each cell in its shard
        gene_starts, count_starts, stops = self._find_bytes(spans)
        # bytes of each span, in its shard and in the buffer
        cell_offsets = row_offsets(spans.cells_per_span)
        span_starts = gene_starts[cell_offsets[:-1]]
        span_stops = stops[cell_offsets[1:] - 1]
        buffer_offsets = row_offsets(span_stops - span_starts)
        targets = buffer_offsets[:-1]
        # distance of each cell's bytes in the buffer from its bytes in the shard
        shift = np.repeat(targets - span_starts, spans.cells_per_span)
        packed = PackedCells(
            recycled_empty(buffer_offsets[-1], np.uint8),
            gene_starts=gene_starts + shift,
            count_starts=count_starts + shift,
            stops=stops + shift,
            lengths=count_genes(self._shards, spans),
        )
        return ByteSpans(spans.shards, span_starts, span_stops, targets), packed

    def _find_bytes(self, spans: CellSpans) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Find the packed bytes of each cell of `spans` in its shard.

        Returns the first byte of its genes, the first byte of its counts, and the byte after them,
        `(cells,)` int64 each.
        """
        # a cell has two parts, its genes and its counts. A span has the offset of each, and of its end
        part_offsets = np.concatenate(
            [
                self._shards[shard].part_offsets[2 * start : 2 * (start + n) + 1]
                for shard, start, n in iterate_rows(spans)
            ]
        ).astype(np.int64)
        part_offsets *= ALIGNMENT
        first = index_cells(spans, offsets_per_cell=2)
        return part_offsets[first], part_offsets[first + 1], part_offsets[first + 2]


def count_genes(shards: list[PackedCellFile], spans: CellSpans) -> np.ndarray:
    """Count the genes of each cell of `spans`, `(cells,)` int64."""
    # a span has the offset of each cell's genes, and of its end
    gene_offsets = np.concatenate(
        [shards[shard].indptr[start : start + n + 1] for shard, start, n in iterate_rows(spans)],
        dtype=np.int64,
    )
    return np.diff(gene_offsets)[index_cells(spans, offsets_per_cell=1)]


def index_cells(spans: CellSpans, offsets_per_cell: int) -> np.ndarray:
    """Return the index of each cell's first offset among the offsets of all spans, `(cells,)` int64.

    The offsets of the spans follow each other. Each span has those of its cells, and of its end. For
    cells a and b of one span and c of the next, with two offsets per cell, these are `a a b b end c c
    end`: the cells begin at 0, 2 and 5.
    """
    cell_offsets = row_offsets(spans.cells_per_span)
    n_earlier_ends = row_numbers(cell_offsets)  # one for each earlier span
    return offsets_per_cell * np.arange(cell_offsets[-1]) + n_earlier_ends
