"""Throughput, memory and GPU readings for metrics.jsonl, and profiler traces of chosen steps.

Memory of tensors on a GPU (`allocated_gb`) is not comparable with memory of the whole process on a
CPU (`resident_gb`), hence the two keys. GPU use, memory (of all processes) and power are read
through NVML by torch, which needs the package nvidia-ml-py (`cellmill[nvml]`). Without it, or if
NVML does not answer (as on a MIG slice), the keys are left out.
"""

import resource
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from cellmill.parallel.mesh import Mesh
from cellmill.parallel.torch_private import record_memory, write_memory_record

# ranks below this write a trace, some MB each: a node, or the stages of a pipeline
PROFILED_RANKS = 8
UNKNOWN = -1.0
GPU_KEYS = {"gpu_busy_frac": 1e-2, "gpu_used_gb": 1e-9, "gpu_power_w": 1e-3}
"""Keys of metrics.jsonl, and their units in NVML's: per cent, bytes, mW."""


class Meter:
    """Counts since the last `read`, and rates over the wall clock.

    MFU needs `peak_flops`, the peak of one rank.
    """

    def __init__(self, peak_flops: float | None, world: int) -> None:
        self.peak_flops = peak_flops
        self.world = world
        self.counts = np.zeros(4)
        self.since = time.perf_counter()

    def add(self, cells: int, tokens: int, flops: float, waited_s: float) -> None:
        self.counts += (cells, tokens, flops, waited_s)

    def read(self, now: float) -> dict[str, float]:
        """Return rates over all ranks from the last reading to `now`, and start a new window."""
        seconds = max(now - self.since, 1e-9)
        cells_per_s, tokens_per_s, flops_per_s, waited = (self.counts / seconds).tolist()
        line = {
            "cells_per_s": cells_per_s,
            "tokens_per_s": tokens_per_s,
            "data_wait_frac": min(1.0, waited),
        }
        if self.peak_flops is not None:
            line["mfu"] = flops_per_s / (self.peak_flops * self.world)
        self.counts = np.zeros(4)
        self.since = now
        return line


class TimeLeft:
    """Estimate of the seconds that a run has left.

    A remaining step takes the median pace of the last ten logged windows, and the mean pause per
    step so far, for validation and checkpoints.
    """

    def __init__(self, steps: int, first: int, since: float) -> None:
        self.steps = steps
        self.first = first
        self.last = first
        self.since = since
        self.paused_s = 0.0
        self.window_paused_s = 0.0
        self.paces: deque[float] = deque(maxlen=10)

    def pause(self, seconds: float) -> None:
        self.paused_s += seconds
        self.window_paused_s += seconds

    def line(self, step: int, now: float) -> dict[str, float]:
        """Return the key of metrics.jsonl for `step`, which ended at `now`."""
        if step > self.last:
            window_s = max(0.0, now - self.since - self.window_paused_s)
            self.paces.append(window_s / (step - self.last))
        self.last = step
        self.since = now
        self.window_paused_s = 0.0
        pause_s = self.paused_s / max(1, step - self.first)
        step_s = statistics.median(self.paces or [0.0]) + pause_s
        return {"left_s": round((self.steps - step) * step_s, 1)}


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """Return the peak and the current memory of this rank."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    current = pages * resource.getpagesize()
    return max(peak, current), current


def gpu_readings(device: torch.device) -> list[float]:
    """Return the readings of GPU_KEYS in NVML's units; UNKNOWN if NVML does not answer."""
    readings = []
    for reader in (torch.cuda.utilization, torch.cuda.device_memory_used, torch.cuda.power_draw):
        try:
            readings.append(float(reader(device)))
        except Exception:  # no package, no driver, or one of NVML's errors: the training goes on
            readings.append(UNKNOWN)
    return readings


def local_readings(mesh: Mesh) -> np.ndarray:
    """Return (readings * ranks,) float64 for `mesh.sum`: this rank's at its index, otherwise 0."""
    readings: list[float] = [*memory_bytes(mesh.device)]
    if mesh.device.type == "cuda":
        readings += gpu_readings(mesh.device)
    by_rank = np.zeros((dist.get_world_size(), len(readings)))
    by_rank[dist.get_rank()] = readings
    return mesh.model_parallel_size * by_rank.ravel()


def readings_line(device_type: str, by_rank: list[float], ranks: int) -> dict[str, list[float]]:
    """Return keys of metrics.jsonl, a number for each rank, from the summed `local_readings`.

    Readings that NVML does not give are left out.
    """
    name = "allocated" if device_type == "cuda" else "resident"
    units = {f"peak_{name}_gb": 1e-9, f"{name}_gb": 1e-9} | GPU_KEYS
    line = {}
    for (key, unit), column in zip(units.items(), np.array(by_rank).reshape(ranks, -1).T):
        if (column >= 0).all():
            line[key] = (unit * column).round(3).tolist()
    return line


class StepProfile:
    """Profiler trace of steps, [first, last] from 1, in `folder`, on the first PROFILED_RANKS ranks.

    rank-0.trace.json.gz has operations, kernels and named parts of each step (chrome://tracing,
    Perfetto); rank-0.memory.pickle allocations on a GPU (pytorch.org/memory_viz).
    """

    def __init__(
        self, folder: Path, steps: Sequence[int] | None, rank: int, device: torch.device
    ) -> None:
        self.folder = folder
        self.rank = rank
        self.cuda = device.type == "cuda"
        self.first, self.last = (0, -1)  # no step
        if steps is not None and rank < PROFILED_RANKS:
            self.first, self.last = steps
        self.running: torch.profiler.profile | None = None

    @contextmanager
    def record(self, step: int) -> Iterator[None]:
        """Record what runs inside, if `step` is one of the steps."""
        if self.first <= step <= self.last and self.running is None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self.cuda:
                activities.append(torch.profiler.ProfilerActivity.CUDA)
                record_memory(100_000)
            self.running = torch.profiler.profile(activities=activities, record_shapes=True)
            self.running.start()
        yield
        if step == self.last:
            self.close()

    def close(self) -> None:
        """Write what was recorded, also when the run ends before `last`."""
        if self.running is None:
            return
        self.running.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        file = str(self.folder / f"rank-{self.rank}")
        self.running.export_chrome_trace(f"{file}.trace.json.gz")
        self.running = None
        if self.cuda:
            write_memory_record(f"{file}.memory.pickle")
            record_memory(None)
