"""Memory that processes have: of tensors on a GPU, of the whole process, libraries included, on a CPU.

The two are not alike, so they have names of their own in metrics.jsonl: `allocated_gb` and `resident_gb`, each with
its peak, a list of one number for each rank.
"""

from __future__ import annotations

import resource
from pathlib import Path

import torch


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """Peak and current, of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    current = pages * resource.getpagesize()
    return max(peak, current), current


def memory_line(device_type: str, peak_and_current: list[list[float]]) -> dict[str, list[float]]:
    """For metrics.jsonl, from the bytes of each rank; to a MB."""
    name = "allocated" if device_type == "cuda" else "resident"
    peaks, currents = ([round(n_bytes / 1e9, 3) for n_bytes in column] for column in zip(*peak_and_current))
    return {f"peak_{name}_gb": peaks, f"{name}_gb": currents}
