"""Speed of this machine's CPU cores, for the hours of a plan without a GPU."""

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from cellmill.parallel.apply import COMPUTE_DTYPE
from cellmill.planner.devices import Device

SIDE = 768  # rows and columns of the multiplied matrices
MEASURED_S = 0.1  # seconds that the measurement takes at least
# Assumed rate between processes, in GB/s, also for processes on different nodes. It is used only if a
# run has several CPU processes.
LINK_GB_PER_S = 10.0


def measure_cpu(
    device: Device,
    nproc_per_node: int,
    precision: str = "32-true",
    clock: Callable[[], float] = time.perf_counter,
) -> Device:
    """Return `device` with the FLOP/s of one process if `nproc_per_node` processes share the cores.

    torch multiplies matrices in the number format of `precision`, several times, and the fastest product
    counts. The product runs on the cores that torch uses in this process, not on those that a job
    requests. `clock` returns seconds. A caller that limits torch to one thread can pass
    time.thread_time, which other programs do not slow.
    """
    matrix = torch.ones(SIDE, SIDE, dtype=COMPUTE_DTYPE.get(precision, torch.float32))
    best_s = float("inf")
    began = time.perf_counter()
    while time.perf_counter() - began < MEASURED_S:
        start = clock()
        torch.mm(matrix, matrix)
        best_s = min(best_s, clock() - start)
    flops_per_s = 2 * SIDE**3 / best_s / nproc_per_node
    # the rate is that of `precision`, and a caller reads no other format
    return replace(
        device,
        half_flops_per_s=flops_per_s,
        fp32_flops_per_s=flops_per_s,
        tf32_flops_per_s=flops_per_s,
        intra_node_gb_per_s=LINK_GB_PER_S,
        inter_node_gb_per_s=LINK_GB_PER_S,
    )
