"""Use, memory and power of each rank's GPU, as nvidia-smi shows them, for metrics.jsonl.

Read through NVML by torch, which needs the package nvidia-ml-py (`cellmill[nvml]`); without it, or where NVML does not
answer (a MIG slice has no such figures), the keys are left out. Memory is that of all processes on the GPU.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from cellmill.parallel.mesh import Mesh

UNKNOWN = -1.0
KEYS = {"gpu_busy_frac": 1e-2, "gpu_used_gb": 1e-9, "gpu_power_w": 1e-3}
"""Keys of metrics.jsonl, and their units in those of NVML: per cent, bytes, mW."""


def gpu_readings(device: torch.device) -> list[float]:
    """Return the readings of KEYS in NVML's units; UNKNOWN for those that cannot be had."""
    readers: tuple[Callable[[torch.device], int], ...]
    readers = (torch.cuda.utilization, torch.cuda.device_memory_used, torch.cuda.power_draw)
    return [_read(reader, device) for reader in readers]


def _read(reader: Callable[[torch.device], int], device: torch.device) -> float:
    try:
        return float(reader(device))
    except Exception:  # no package, no driver, or an error of NVML's own types; nothing of it matters to a training
        return UNKNOWN


def own_gpu(mesh: Mesh) -> np.ndarray:
    """Return (3 * ranks,) float64: readings of this rank's GPU at its position, zeros elsewhere; empty on CPUs.

    Meant for `mesh.sum`, scaled as `telemetry.own_memory` is.
    """
    if mesh.device.type != "cuda":
        return np.empty(0)
    of_ranks = np.zeros((dist.get_world_size(), len(KEYS)))
    of_ranks[dist.get_rank()] = gpu_readings(mesh.device)
    return mesh.model_parallel_size * of_ranks.ravel()


def gpu_line(of_ranks: list[float]) -> dict[str, list[float]]:
    """Return keys of metrics.jsonl, a number for each rank, from the summed `own_gpu`; those that all ranks have."""
    columns = np.array(of_ranks).reshape(-1, len(KEYS)).T
    known = {key: (unit * column).round(3) for (key, unit), column in zip(KEYS.items(), columns) if (column >= 0).all()}
    return {key: column.tolist() for key, column in known.items() if column.size}
