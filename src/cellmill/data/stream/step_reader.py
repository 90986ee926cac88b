"""Cells of a data rank, step by step, and the numbers of cells and genes of all ranks.

The next window is read while one is used (`WindowQueue`). Several small steps are yielded together,
to spread Python's overhead. Cells are unpacked when their step is taken. Only cells of a step that
spans windows are copied.

Numbers of cells are computed for many steps at once. For lanes of other ranks only the lengths of
cells are looked up (`LaneLengths`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from cellmill.data.packing.row_file import RowFile
from cellmill.data.stream.lane_lengths import LaneLengths
from cellmill.data.stream.order import DataRank, EpochLayout, EpochOrders
from cellmill.data.stream.windows import (
    CellWindow,
    StreamCells,
    WindowReader,
    cell_lengths,
    join_stream_cells,
)

_STEPS = 256  # steps whose numbers of cells are computed at once
# cells of small steps that are yielded together
_CELLS_TOGETHER = 256


class WindowQueue:
    """The window in use and those that are being read, in stream order.

    Steps are counted over all epochs and taken in order.
    """

    def __init__(self, windows: Iterator[CellWindow]) -> None:
        self._windows = windows  # `next` starts to read a window
        self._started: list[CellWindow] = []

    def n_steps_together(self, step: int, n_cells: np.ndarray) -> int:
        """Number of steps from `step` on to take together.

        At least one; more if one window has all of their `n_cells`, `(steps,)`, and these are at
        most `_CELLS_TOGETHER`.
        """
        self._drop_before(step)
        if len(self._started) > 1:
            first_of_next = int(self._started[1].cells.steps[0])
            n_cells = n_cells[: max(0, first_of_next - step)]
        return max(1, int(np.searchsorted(n_cells.cumsum(), _CELLS_TOGETHER, side="right")))

    def take(self, step: int, n_cells: np.ndarray) -> StreamCells:
        """Cells of `len(n_cells)` steps from `step` on, which have `n_cells` each."""
        parts = []
        number = 0
        n_left = int(n_cells.sum())
        while n_left:
            if number == len(self._started):  # windows of lanes may end at different steps
                self._started += islice(self._windows, 1)
            assert number < len(self._started), "cells of a step are in no window"
            part = self._started[number].take(step, len(n_cells))
            if len(part.ids):
                parts.append(part)
            n_left -= len(part.ids)
            number += 1
        return parts[0] if len(parts) == 1 else join_stream_cells(parts)

    def _drop_before(self, step: int) -> None:
        """Drop windows without cells from `step` on; start to read the next ones."""
        self._started = [window for window in self._started if window.cells.steps[-1] >= step]
        self._started += islice(self._windows, max(0, 2 - len(self._started)))


@dataclass(frozen=True)
class StepGroup:
    """Cells of some consecutive steps of an epoch."""

    epoch: int
    n_genes: np.ndarray  # `(cells of all ranks,)`: of each cell, by step and rank
    n_cells: np.ndarray  # `(steps, world)` int64: number of cells of each rank
    local: StreamCells  # this data rank's cells, by step and lane


class StepReader:
    """Reader of the cells of a split in the order of `layout`, starting at any step.

    Reads the lanes of one data rank: lane l belongs to rank l % `world`. Of other lanes only the
    lengths are looked up.
    """

    def __init__(
        self, shards: list[RowFile], layout: EpochLayout, data_rank: DataRank, io_threads: int
    ):
        self._shards = shards
        self._layout = layout
        rank, world = data_rank
        self._rank = rank
        self._world = world
        lanes = np.arange(layout.stream.lanes).reshape(-1, world).T  # (ranks, lanes of each)
        self._other_lanes = np.delete(lanes, rank, axis=0).ravel()  # rank after rank
        self._orders = EpochOrders(layout)
        self._reader = WindowReader(shards, layout, self._orders, lanes[rank].tolist(), io_threads)
        self.close = self._reader.close

    def steps(self, epoch: int, step: int) -> Iterator[StepGroup]:
        """Steps from `step` of `epoch` on: endless if the layout shuffles, else to the end of the
        epoch.
        """
        layout = self._layout
        per_epoch = layout.steps_per_epoch
        first_cells = layout.cells_before(step)
        lengths_of_others = self._look_up_others(epoch, first_cells)
        queue = WindowQueue(self._reader.windows(epoch, first_cells))
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
                    n = queue.n_steps_together(step_in_run, n_local)
                    local = queue.take(step_in_run, n_local[:n])
                    lengths = local.packed.lengths
                    if len(self._other_lanes):
                        lengths = self._insert_lengths(
                            lengths, lengths_of_others, in_ranks[:n], in_lanes[:n]
                        )
                    yield StepGroup(epoch, lengths, in_ranks[:n], local)
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
        order = self._orders.of(epoch)
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

    def _lengths_of_windows(self, lane: int, epoch: int, first: int) -> Iterator[np.ndarray]:
        """Lengths of the cells of each window of a lane, from window `first` of an epoch on."""
        while self._orders.of(epoch).lane_cells[lane]:
            order = self._orders.of(epoch)
            for window in range(first, order.n_windows(lane)):
                lengths = cell_lengths(self._shards, order.window_runs(lane, window))
                yield lengths[order.window_order(lane, window)]
            if not self._layout.shuffle:
                return
            epoch += 1
            first = 0
