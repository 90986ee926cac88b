"""Speed and memory of training, from the wall clock over a window that includes waiting for data."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass, field

import torch


@dataclass
class Meter:
    """Counts since the last reading.

    Parameters
    ----------
    device
        Where the model is.
    peak_flops
        Of one process's device, FLOP/s; None where it is not known, and then no MFU is given.
    """

    device: torch.device
    peak_flops: float | None
    world: int
    cells: int = 0
    tokens: int = 0
    flops: float = 0.0
    waited_s: float = 0.0
    since: float = field(default_factory=time.perf_counter)

    def read(self, now: float) -> dict[str, float]:
        """Rates over all processes from the last reading to `now`, and this process's memory; starts a new window."""
        wall = max(now - self.since, 1e-9)
        line = {
            "cells_per_s": self.cells / wall,
            "tokens_per_s": self.tokens / wall,
            "data_wait_frac": min(1.0, self.waited_s / wall),
            "memory_gb": peak_memory_bytes(self.device) / 1e9,
        }
        if self.peak_flops is not None:
            line["mfu"] = self.flops / wall / (self.peak_flops * self.world)
        self.cells, self.tokens, self.flops, self.waited_s, self.since = 0, 0, 0.0, 0.0, now
        return line


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory this process has had: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
