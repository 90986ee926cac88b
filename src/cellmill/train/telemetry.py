"""Throughput, memory and GPU readings of each rank for metrics.jsonl, and profiler traces of chosen steps.

Memory of tensors on a GPU (`allocated_gb`) is not comparable with memory of the whole process on a CPU (`resident_gb`),
hence the two keys. GPU use, memory (of all processes) and power are read through NVML by torch, which needs the package
nvidia-ml-py (`cellmill[nvml]`). Without it, or where NVML does not answer (as on a MIG slice), the keys are left out.
"""

import resource
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from cellmill.parallel.mesh import Mesh
from cellmill.parallel.torch_private import record_memory, write_memory_record

PROFILED_RANKS = 8  # ranks below this write a trace, some MB each: a node, or the stages of a pipeline


@dataclass
class Meter:
    """Counts since the last `read`, and rates over the wall clock; MFU where `peak_flops`, a rank's, is known."""

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


@dataclass
class TimeLeft:
    """Estimate of the seconds that a run has left: the steps that remain, at the median pace of the last ten logged
    windows, and with the mean pause per step so far, for validation and checkpoints."""

    steps: int
    first: int  # step at which this process began
    since: float  # time of the last line, or of the begin

    def __post_init__(self) -> None:
        self.last, self.paused_s, self.window_paused_s = self.first, 0.0, 0.0
        self.paces: deque[float] = deque(maxlen=10)

    def pause(self, seconds: float) -> None:
        self.paused_s += seconds
        self.window_paused_s += seconds

    def line(self, step: int, now: float) -> dict[str, float]:
        """Key of metrics.jsonl for `step`, which ended at `now`."""
        if step > self.last:
            self.paces.append(max(0.0, now - self.since - self.window_paused_s) / (step - self.last))
        self.last, self.since, self.window_paused_s = step, now, 0.0
        each_s = statistics.median(self.paces or [0.0]) + self.paused_s / max(1, step - self.first)
        return {"left_s": round((self.steps - step) * each_s, 1)}


def memory_bytes(device: torch.device) -> tuple[int, int]:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    current = pages * resource.getpagesize()
    return max(peak, current), current


UNKNOWN = -1.0
GPU_KEYS = {"gpu_busy_frac": 1e-2, "gpu_used_gb": 1e-9, "gpu_power_w": 1e-3}
"""Keys of metrics.jsonl, and their units in NVML's: per cent, bytes, mW."""


def gpu_readings(device: torch.device) -> list[float]:
    """Return the readings of GPU_KEYS in NVML's units; UNKNOWN if NVML does not answer."""
    found = []
    for reader in (torch.cuda.utilization, torch.cuda.device_memory_used, torch.cuda.power_draw):
        try:
            found.append(float(reader(device)))
        except Exception:  # no package, no driver, or an error of NVML's own types; nothing of it matters to a training
            found.append(UNKNOWN)
    return found


def local_readings(mesh: Mesh) -> np.ndarray:
    """Return (readings * ranks,) float64 for `mesh.sum`: this rank's, scaled, at its index, zeros elsewhere."""
    own = [*memory_bytes(mesh.device), *(gpu_readings(mesh.device) if mesh.device.type == "cuda" else [])]
    by_rank = np.zeros((dist.get_world_size(), len(own)))
    by_rank[dist.get_rank()] = own
    return mesh.model_parallel_size * by_rank.ravel()


def readings_line(device_type: str, by_rank: list[float], ranks: int) -> dict[str, list[float]]:
    """Return keys of metrics.jsonl, a number for each rank, from the summed `local_readings`; of a GPU those known."""
    columns = np.array(by_rank).reshape(ranks, -1).T
    name = "allocated" if device_type == "cuda" else "resident"
    line = dict(zip((f"peak_{name}_gb", f"{name}_gb"), (columns[:2] / 1e9).round(3).tolist()))
    for (key, unit), column in zip(GPU_KEYS.items(), columns[2:]):
        if (column >= 0).all():
            line[key] = (unit * column).round(3).tolist()
    return line


class StepProfile:
    """Profiler trace of the steps `first` to `last`, counted from 1, in `folder`, on the first `PROFILED_RANKS` ranks.

    rank-0.trace.json.gz has operations, kernels and named parts of each step (chrome://tracing, Perfetto);
    rank-0.memory.pickle allocations on a GPU (pytorch.org/memory_viz).
    """

    def __init__(self, folder: Path, first: int, last: int, rank: int, device: torch.device) -> None:
        self.folder, self.first, self.last, self.rank = folder, first, last, rank
        self.cuda = device.type == "cuda"
        self._running: torch.profiler.profile | None = None

    @contextmanager
    def of(self, step: int) -> Iterator[None]:
        if self.rank < PROFILED_RANKS and self.first <= step <= self.last and self._running is None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self.cuda:
                activities.append(torch.profiler.ProfilerActivity.CUDA)
                record_memory(100_000)
            self._running = torch.profiler.profile(activities=activities, record_shapes=True)
            self._running.start()
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
            write_memory_record(str(self.folder / f"rank-{self.rank}.memory.pickle"))
            record_memory(None)
