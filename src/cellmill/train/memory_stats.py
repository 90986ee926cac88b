"""Memory that processes have: of tensors on a GPU, of the whole process, libraries included, on a CPU.

The two are not alike, so they have names of their own in metrics.jsonl: `allocated_gb` and `resident_gb`, each with
its peak, a list of one number for each rank.
"""

from __future__ import annotations

import resource
from pathlib import Path

import torch
import torch.distributed as dist

from cellmill.parallel.mesh import Mesh


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """Peak and current, of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    current = pages * resource.getpagesize()
    return max(peak, current), current


def own_memory(mesh: Mesh) -> list[float]:
    """Peak and current of this process in the place of its rank, zeros in those of others: (2 * processes), in bytes.

    For `mesh.sum`, which gives everybody the whole; it counts processes that share their cells once.
    """
    of_ranks = [0.0] * (2 * dist.get_world_size())
    place = 2 * dist.get_rank()
    of_ranks[place : place + 2] = [float(mesh.model_parallel_size * n_bytes) for n_bytes in memory_bytes(mesh.device)]
    return of_ranks


def memory_line(device_type: str, of_ranks: list[float]) -> dict[str, list[float]]:
    """For metrics.jsonl, from what the sum gave: to a MB, a number for each rank."""
    name = "allocated" if device_type == "cuda" else "resident"
    peaks, currents = ([round(n_bytes / 1e9, 3) for n_bytes in of_ranks[first::2]] for first in (0, 1))
    return {f"peak_{name}_gb": peaks, f"{name}_gb": currents}
