"""Cells of windows in the order in which steps take them, and the reads that fill their memory."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from cellmill.data.scattered_read import places
from cellmill.data.shard_file import RowFile

_TASKS = 32  # of the windows read into one buffer: handing one over costs as much as reading some cells


@dataclass(frozen=True)
class WindowCells:
    """Cells in the order in which steps take them: windows of the same number of some lanes, or part of these."""

    steps: np.ndarray  # step that takes each cell, counted over all epochs
    lanes: np.ndarray  # lane of each cell, ascending in a step
    cells: np.ndarray
    lengths: np.ndarray  # number of genes of each cell in the shards
    starts: np.ndarray  # offset of each cell's first gene; in a part, of that which it is a part of
    genes: np.ndarray
    counts: np.ndarray | None

    def of_step(self, step: int) -> WindowCells:
        return self._part(self.steps, step)

    def of_lane(self, lane: int) -> WindowCells:
        """Cells of a lane, of a part that is of one step."""
        return self._part(self.lanes, lane)

    def of_cells(self) -> tuple[np.ndarray, ...]:
        """The arrays with one entry a cell."""
        return self.steps, self.lanes, self.cells, self.lengths

    def _part(self, ascending: np.ndarray, value: int) -> WindowCells:
        start, stop = ascending.searchsorted(np.array([value, value + 1])).tolist()
        starts = self.starts[start : stop + 1]
        span = slice(starts[0] - self.starts[0], starts[-1] - self.starts[0])
        counts = None if self.counts is None else self.counts[span]
        steps, lanes, cells, lengths = (array[start:stop] for array in self.of_cells())
        return WindowCells(steps, lanes, cells, lengths, starts, self.genes[span], counts)


@dataclass(frozen=True)
class WindowPlan:
    """Windows to be read: `spans` are (shard, first row, rows); their i-th cell goes to `position[i]`."""

    spans: list[tuple[int, int, int]]
    position: np.ndarray
    window: WindowCells  # without genes and counts


class Buffer:
    """Reusable memory that grows on demand."""

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}

    def array(self, name: str, size: int, dtype: np.dtype | type) -> np.ndarray:
        if name not in self._arrays or len(self._arrays[name]) < size:
            self._arrays[name] = np.empty(size + size // 8, dtype)
        return self._arrays[name][:size]


class WindowReader:
    """Reads windows of cells of `shards` by threads; counts, as `dtype`, unless it is None."""

    def __init__(self, shards: list[RowFile], dtype: np.dtype | None, threads: int) -> None:
        self._shards, self._dtype = shards, dtype
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="cellmill-read")

    def close(self) -> None:
        """End the threads after the reads in progress."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def start(self, plan: WindowPlan, buffer: Buffer) -> tuple[WindowCells, list[Future[None]]]:
        """Start to read windows into `buffer`: the cells, and the reads that they wait for."""
        total = int(plan.window.starts[-1])
        counts = buffer.array("counts", total, self._dtype) if self._dtype is not None else None
        window = replace(plan.window, genes=buffer.array("genes", total, np.int32), counts=counts)
        run_starts = np.cumsum([0, *(n for _, _, n in plan.spans)]).tolist()
        runs = [(self._shards[shard], first, at, n) for (shard, first, n), at in zip(plan.spans, run_starts)]
        reads, per_task = _Reads(window, plan.position), -(-len(runs) // _TASKS)
        parts = [runs[first : first + per_task] for first in range(0, len(runs), per_task)]
        return window, [self._pool.submit(reads.read, part) for part in parts]


class _Reads:
    """Target position of each row of a window, in file order."""

    def __init__(self, window: WindowCells, position: np.ndarray) -> None:
        self._memory = window.counts
        self._starts, self._lengths = window.starts[position], window.lengths[position]
        kept = window.starts[position + 1] - self._starts
        cut = self._lengths - kept
        # the end of a cut row is read into `rest` and ignored, so that it is still one read in disk order
        self._rest, self._genes = np.empty(int(cut.max(initial=0)), np.int32), places(window.genes, self._starts, kept)
        self._each = 2 if len(self._rest) else 1
        if len(self._rest):
            ignored = places(self._rest, np.zeros_like(cut), cut)
            self._genes = np.stack([self._genes, ignored], 1).reshape(-1, 2)
        if self._memory is not None:
            self._counts = places(self._memory, self._starts, self._lengths)
        self._window = window  # lives as long as its places

    def read(self, runs: list[tuple[RowFile, int, int, int]]) -> None:
        """Read runs of cells: shard, first row in it, position of the first among all rows, and number."""
        for shard, first, at, n in runs:
            start = int(shard.indptr[first])
            shard.scatter_genes(start, self._genes[self._each * at : self._each * (at + n)])
            if self._memory is not None and self._memory.dtype == shard.dtype:
                shard.scatter_counts(start, self._counts[at : at + n])
            elif self._memory is not None:
                self._read_wider(self._memory, shard, start, slice(at, at + n))

    def _read_wider(self, memory: np.ndarray, shard: RowFile, start: int, rows: slice) -> None:
        """Counts of a shard that has 16 bits for them, where another of the split has 32."""
        starts, lengths = self._starts[rows].tolist(), self._lengths[rows]
        counts = np.empty(int(lengths.sum()), shard.dtype)
        shard.read_counts(start, [counts])
        for at, part in zip(starts, np.split(counts, np.cumsum(lengths)[:-1])):
            memory[at : at + len(part)] = part
