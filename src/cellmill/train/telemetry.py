"""Throughput and memory of each rank for metrics.jsonl, and profiler traces of chosen steps.

Memory is that of tensors on a GPU, and of the whole process, libraries included, on a CPU. The two are not comparable,
so they have different keys, `allocated_gb` and `resident_gb`, each with its peak: a list with one number for each rank.
"""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from cellmill.parallel.mesh import Mesh

PROFILED_RANKS = 8
"""Ranks below this write a trace, some MB each: a node, or the stages of a pipeline."""


@dataclass
class Meter:
    """Counts since the last `read`, and the rates over the wall clock, which includes waiting for data.

    Parameters
    ----------
    peak_flops
        Peak FLOP/s of one rank's device; None when unknown, and no MFU is reported.
    """

    peak_flops: float | None
    world: int
    cells: int = 0
    tokens: int = 0
    flops: float = 0.0
    waited_s: float = 0.0
    since: float = field(default_factory=time.perf_counter)

    def read(self, now: float) -> dict[str, float]:
        """Return rates over all ranks from the last reading to `now`, and start a new window."""
        wall = max(now - self.since, 1e-9)
        line = {
            "cells_per_s": self.cells / wall,
            "tokens_per_s": self.tokens / wall,
            "data_wait_frac": min(1.0, self.waited_s / wall),
        }
        if self.peak_flops is not None:
            line["mfu"] = self.flops / wall / (self.peak_flops * self.world)
        self.cells, self.tokens, self.flops, self.waited_s, self.since = 0, 0, 0.0, 0.0, now
        return line


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """Return peak and current memory of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    current = pages * resource.getpagesize()
    return max(peak, current), current


def own_memory(mesh: Mesh) -> list[float]:
    """Return (2 * ranks) bytes: peak and current memory of this rank at its position, zeros elsewhere.

    Meant for `mesh.sum`, after which every rank has all; scaled, since the sum counts model-parallel peers once.
    """
    of_ranks = [0.0] * (2 * dist.get_world_size())
    position = 2 * dist.get_rank()
    scaled = [float(mesh.model_parallel_size * n_bytes) for n_bytes in memory_bytes(mesh.device)]
    of_ranks[position : position + 2] = scaled
    return of_ranks


def memory_line(device_type: str, of_ranks: list[float]) -> dict[str, list[float]]:
    """Return the memory keys of metrics.jsonl from the summed `own_memory`, rounded to a MB."""
    name = "allocated" if device_type == "cuda" else "resident"
    peaks, currents = ([round(n_bytes / 1e9, 3) for n_bytes in of_ranks[first::2]] for first in (0, 1))
    return {f"peak_{name}_gb": peaks, f"{name}_gb": currents}


class StepProfile:
    """Profiler trace of the steps `first` to `last`, counted from 1, in `folder`.

    profile/rank-0.trace.json.gz      operations, kernels and named parts of each step: chrome://tracing or Perfetto
    profile/rank-0.memory.pickle      allocations on a GPU: pytorch.org/memory_viz

    Ranks from `PROFILED_RANKS` on record nothing. Steps before a resume are not recorded again.
    """

    def __init__(self, folder: Path, first: int, last: int, rank: int, device: torch.device) -> None:
        self.folder, self.first, self.last, self.rank = folder, first, last, rank
        self.cuda = device.type == "cuda"
        self._running: torch.profiler.profile | None = None

    @contextmanager
    def of(self, step: int) -> Iterator[None]:
        """Wrap optimizer step `step`."""
        if self.rank < PROFILED_RANKS and self.first <= step <= self.last and self._running is None:
            self._begin()
        yield
        if step == self.last:
            self.close()

    def close(self) -> None:
        """Write what was recorded, also when the run ends before `last`."""
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
