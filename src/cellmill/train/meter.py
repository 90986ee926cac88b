"""Speed of training, from the wall clock over a window that includes waiting for data."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Meter:
    """Counts since the last reading.

    Parameters
    ----------
    peak_flops
        Of one process's device, FLOP/s; None where it is not known, and then no MFU is given.
    """

    peak_flops: float | None
    world: int
    cells: int = 0
    tokens: int = 0
    flops: float = 0.0
    waited_s: float = 0.0
    since: float = field(default_factory=time.perf_counter)

    def read(self, now: float) -> dict[str, float]:
        """Rates over all processes from the last reading to `now`; starts a new window."""
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
