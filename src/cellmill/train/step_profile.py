"""What some steps of a run did, operation by operation: a trace for chrome://tracing or Perfetto, and GPU memory.

profile/rank-0.trace.json.gz      operations, kernels and the named parts of each step
profile/rank-0.memory.pickle      allocations, for pytorch.org/memory_viz; where there is CUDA
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

RANKS = 8
"""The first so many processes write theirs: a node, or the stages of a pipeline. A trace is some MB."""


class StepProfile:
    """Records the steps from `first` to `last`, both counted from 1, and writes them to `folder`.

    Processes after the first `RANKS` record nothing. Steps before a resume are not recorded again.
    """

    def __init__(self, folder: Path, first: int, last: int, rank: int, device: torch.device) -> None:
        self.folder, self.first, self.last, self.rank = folder, first, last, rank
        self.cuda = device.type == "cuda"
        self._running: torch.profiler.profile | None = None

    @contextmanager
    def of(self, step: int) -> Iterator[None]:
        """Around optimizer step `step`."""
        if self.rank < RANKS and self.first <= step <= self.last and self._running is None:
            self._begin()
        yield
        if step == self.last:
            self.close()

    def close(self) -> None:
        """Writes what was recorded, also of a run that ended before `last`."""
        if self._running is None:
            return
        self._running.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._running.export_chrome_trace(str(self.folder / f"rank-{self.rank}.trace.json.gz"))
        self._running = None
        if self.cuda:
            torch.cuda.memory._dump_snapshot(str(self.folder / f"rank-{self.rank}.memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)

    def _begin(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=100_000)
        self._running = torch.profiler.profile(activities=activities, record_shapes=True)
        self._running.start()
