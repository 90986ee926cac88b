"""Reading the cells of a data rank, step by step, with the numbers of cells and genes of all ranks.

The next window set is read while the current window set is in use (`WindowSetQueue`). Small steps are
yielded in groups, so that Python's overhead is spread over several steps. Cells stay packed until their
micro-batches are made. They are copied only if a step takes cells from two or more window sets.

The number of cells that a step takes of each lane is computed for many steps at once. The cells of other
ranks are not read. Only their numbers of genes are looked up, in the index of the shards
(`GenesPerCellQueue`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from cellmill.data.packing.cell_file import PackedCellFile
from cellmill.data.stream.genes_per_cell import GenesPerCellQueue
from cellmill.data.stream.order import DataRank, OrderCache, OrderRule, list_lanes_by_rank
from cellmill.data.stream.windows import (
    StreamCells,
    WindowReader,
    WindowSet,
    count_genes,
    join_stream_cells,
)

_STEPS_COUNTED_AT_ONCE = 256  # the numbers of cells of this many steps are computed together
_MAX_GROUP_CELLS = 256  # small steps are yielded together, up to this total number of cells


class WindowSetQueue:
    """Queue of window sets. Their cells are taken step by step, in order."""

    def __init__(self, window_sets: Iterator[WindowSet]) -> None:
        self._window_sets = window_sets  # `next` starts to read a window set
        # window sets that are being read or have been read. Steps take their cells from the first of them
        self._started: list[WindowSet] = []

    def take_group(self, global_step: int, cells_per_step: np.ndarray) -> tuple[int, StreamCells]:
        """Take the cells of step `global_step`, together with following steps if the steps are small.

        `cells_per_step`, `(steps,)`, has the number of cells of step `global_step` and of the steps after
        it. Returns the number of steps taken, and the cells of these steps.
        """
        # drop window sets if all their cells are taken, then start to read the next window sets
        self._started = [
            window_set
            for window_set in self._started
            if window_set.cells.global_steps[-1] >= global_step
        ]
        self._started += islice(self._window_sets, max(0, 2 - len(self._started)))
        n_steps = self._count_group_steps(global_step, cells_per_step)
        n_cells = int(cells_per_step[:n_steps].sum())
        return n_steps, self._take_cells(global_step, n_steps, n_cells)

    def _count_group_steps(self, global_step: int, cells_per_step: np.ndarray) -> int:
        """Count the steps to take together. There is at least one.

        Another step is added if the group then has at most `_MAX_GROUP_CELLS` cells. But a step with cells in
        the second window set is not added, because cells of two window sets would have to be copied.
        """
        if len(self._started) > 1:
            first_of_second = int(self._started[1].cells.global_steps[0])
            cells_per_step = cells_per_step[: max(0, first_of_second - global_step)]
        total = cells_per_step.cumsum()
        return max(1, int(np.searchsorted(total, _MAX_GROUP_CELLS, side="right")))

    def _take_cells(self, global_step: int, n_steps: int, n_cells: int) -> StreamCells:
        """Take the cells of `n_steps` steps, beginning with step `global_step`. There are `n_cells` cells."""
        pieces = []  # one per window set that has some of the cells
        n_left = n_cells
        index = 0
        while n_left:
            # lanes may end a window at different steps, so a step may need further window sets
            if index == len(self._started):
                self._started += islice(self._window_sets, 1)
            assert index < len(self._started), "cells of a step are in no window"
            piece = self._started[index].take(global_step, n_steps)
            if len(piece.ids):
                pieces.append(piece)
            n_left -= len(piece.ids)
            index += 1
        return pieces[0] if len(pieces) == 1 else join_stream_cells(pieces)


@dataclass(frozen=True)
class StepGroup:
    """Consecutive steps of an epoch. Only the cells of this data rank are read."""

    epoch: int
    # `(cells of all ranks,)`: number of genes. Cells are sorted by step, then rank
    genes_per_cell: np.ndarray
    cells_by_rank: np.ndarray  # `(steps, ranks)` int64: number of cells of each rank in each step
    local_cells: StreamCells  # the cells of this data rank, in stream order


class StepReader:
    """Reads the cells of one data rank in the order of `order_rule`, beginning at any step.

    Attribute `lanes_by_rank`, `(ranks, lanes of a rank)`, has the lanes that each data rank reads.
    """

    def __init__(
        self,
        shards: list[PackedCellFile],
        order_rule: OrderRule,
        data_rank: DataRank,
        io_threads: int,
    ):
        self._shards = shards
        self._order_rule = order_rule
        self._data_rank = data_rank.rank
        self.lanes_by_rank = list_lanes_by_rank(order_rule.n_lanes, data_rank.n_ranks)
        # lanes of the other ranks, rank after rank
        self._other_lanes = np.delete(self.lanes_by_rank, self._data_rank, axis=0).ravel()
        self._orders = OrderCache(order_rule)
        self._window_reader = WindowReader(
            shards,
            order_rule,
            self._orders,
            self.lanes_by_rank[self._data_rank].tolist(),
            io_threads,
        )

    def close(self) -> None:
        """Wait for the reads in progress, cancel the reads that have not begun, and end the threads."""
        self._window_reader.close()

    def read_steps(self, first_epoch: int, first_step: int) -> Iterator[StepGroup]:
        """Read groups of steps, beginning with step `first_step` of epoch `first_epoch`.

        In training the iterator is endless. Otherwise it stops at the end of the epoch.
        """
        # position in each lane of the first cell to read, `(lanes,)`
        lane_starts = self._order_rule.count_cells_before(first_step)
        window_sets = WindowSetQueue(self._window_reader.read_window_sets(first_epoch, lane_starts))
        other_lanes = self._make_other_lanes_queue(first_epoch, lane_starts)
        for epoch, step, cells_by_lane in self._count_cells(first_epoch, first_step):
            first_global_step = epoch * self._order_rule.steps_per_epoch + step
            cells_by_rank = cells_by_lane[:, self.lanes_by_rank].sum(2)  # (steps, ranks)
            n_yielded = 0  # number of steps of `cells_by_lane` that are yielded
            while n_yielded < len(cells_by_lane):
                n_steps, local_cells = window_sets.take_group(
                    first_global_step + n_yielded, cells_by_rank[n_yielded:, self._data_rank]
                )
                in_group = slice(n_yielded, n_yielded + n_steps)
                genes_per_cell = local_cells.packed.lengths
                if len(self._other_lanes):
                    genes_per_cell = self._merge_genes_per_cell(
                        genes_per_cell,
                        other_lanes,
                        cells_by_rank[in_group],
                        cells_by_lane[in_group],
                    )
                yield StepGroup(epoch, genes_per_cell, cells_by_rank[in_group], local_cells)
                del local_cells  # so that the next window set can use the memory of these cells
                n_yielded += n_steps

    def _count_cells(self, epoch: int, step: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """Count the cells that each step takes of each lane, for many consecutive steps at a time.

        Yields the epoch, the number of the first of these steps in the epoch, and the numbers of cells,
        `(steps, lanes)` int64. Begins with step `step` of epoch `epoch`.
        """
        order_rule = self._order_rule
        while True:
            for first_step in range(step, order_rule.steps_per_epoch, _STEPS_COUNTED_AT_ONCE):
                stop_step = min(first_step + _STEPS_COUNTED_AT_ONCE, order_rule.steps_per_epoch)
                steps = np.arange(first_step, stop_step + 1)[:, None]
                yield epoch, first_step, np.diff(order_rule.count_cells_before(steps), axis=0)
            if not order_rule.options.is_training:
                return
            epoch += 1
            step = 0

    def _make_other_lanes_queue(self, epoch: int, lane_starts: np.ndarray) -> GenesPerCellQueue:
        """Make the queue with the numbers of genes of cells in the lanes of other ranks.

        `lane_starts`, `(lanes,)`, has the position of the first cell to read in each lane of all ranks.
        """
        order = self._orders.get(epoch)
        genes_by_window = []
        n_skipped = []
        for lane in self._other_lanes.tolist():
            position = int(lane_starts[lane])
            window_number = order.find_window(lane, position)
            n_skipped.append(position - int(order.window_offsets[lane][window_number]))
            genes_by_window.append(self._iterate_genes_per_cell(lane, epoch, window_number))
        return GenesPerCellQueue(genes_by_window, n_skipped)

    def _iterate_genes_per_cell(
        self, lane: int, epoch: int, first_number: int
    ) -> Iterator[np.ndarray]:
        """Yield the number of genes of each cell of a lane, as an array `(cells of the window,)` per window.

        Begins with window number `first_number` of `epoch`. In training the iterator is endless.
        """
        if not self._orders.get(epoch).lane_cells[lane]:
            return  # the lane has no cells in any epoch: the loop would neither yield nor end
        while True:
            order = self._orders.get(epoch)
            for window_number in range(first_number, order.n_windows(lane)):
                spans = order.list_window_spans(lane, window_number)
                genes_per_cell = count_genes(self._shards, spans)
                yield genes_per_cell[order.make_window_order(lane, window_number)]
            if not self._order_rule.options.is_training:
                return
            epoch += 1
            first_number = 0

    def _merge_genes_per_cell(
        self,
        local_genes_per_cell: np.ndarray,
        other_lanes: GenesPerCellQueue,
        cells_by_rank: np.ndarray,
        cells_by_lane: np.ndarray,
    ) -> np.ndarray:
        """Merge the numbers of genes of the cells of all ranks in some consecutive steps.

        Returns an array `(cells of all ranks,)`, sorted by step, then by rank. `local_genes_per_cell`,
        `(cells of this rank,)`, has the numbers of genes of this rank's cells. The numbers of other ranks are
        taken from `other_lanes`. `cells_by_rank`, `(steps, ranks)`, and `cells_by_lane`, `(steps, lanes)`,
        have the number of cells of each step.
        """
        # split the numbers of this rank by step
        stops = np.cumsum(cells_by_rank[:-1, self._data_rank])
        local_by_step = np.split(local_genes_per_cell, stops)
        # in each step, insert these numbers between the numbers of lower ranks and of higher ranks
        # number of cells of lower ranks in each step
        n_before_by_step = cells_by_rank[:, : self._data_rank].sum(1).tolist()
        cells_by_other_lane = cells_by_lane[:, self._other_lanes]
        pieces = []
        for local, n_before, lane_cells in zip(
            local_by_step, n_before_by_step, cells_by_other_lane
        ):
            others = other_lanes.take(lane_cells)
            pieces += [others[:n_before], local, others[n_before:]]
        return np.concatenate(pieces)
