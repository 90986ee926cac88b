"""Speed of this machine's CPU cores, for the hours of a plan without a GPU."""

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from cellmill.parallel.apply import COMPUTE_DTYPE
from cellmill.planner.devices import Device

SIDE = 768  # rows and columns of the multiplied matrices
MEASURED_S = 0.1  # least time of the measurement
# assumed GB/s between processes, also on different nodes; it counts only with several CPU processes
LINK_GB_PER_S = 10.0


def measure_cpu(
    device: Device,
    nproc_per_node: int,
    precision: str = "32-true",
    clock: Callable[[], float] = time.perf_counter,
) -> Device:
    """Give `device` the FLOP/s that a process reaches if `nproc_per_node` share the cores.

    The rate is the best of several matrix products by torch in the number format of `precision`, on the
    cores that torch uses here, not those that a job requests. With one thread, pass its clock of CPU
    time to leave out other programs.
    """
    matrix = torch.ones(SIDE, SIDE, dtype=COMPUTE_DTYPE.get(precision, torch.float32))
    best_s = float("inf")
    began = time.perf_counter()
    while time.perf_counter() - began < MEASURED_S:
        start = clock()
        torch.mm(matrix, matrix)
        best_s = min(best_s, clock() - start)
    flops_per_s = 2 * SIDE**3 / best_s / nproc_per_node
    return replace(
        device,
        half_flops_per_s=flops_per_s,
        fp32_flops_per_s=flops_per_s,
        tf32_flops_per_s=flops_per_s,
        intra_node_gb_per_s=LINK_GB_PER_S,
        inter_node_gb_per_s=LINK_GB_PER_S,
    )
