"""What the schedule of a pipeline costs: micro-batches that are kept at once, and time in which processes wait.

Counted in the units of the papers, forward 1 and backward 2 (1 for inputs, 1 for weights), all stages alike. A test
plays torch's own tables through and finds the same. Torch-free.

Source: Narayanan et al. 2021, section 2.2 (1F1B, interleaved); Qi et al. 2024 (zero bubble, ZBV); DeepSeek-V3, 2024,
section 3.2.1 (DualPipe, here its V).
"""

from __future__ import annotations

from cellmill.config.parallel import Parallel


def kept_micro_batches(parallel: Parallel, rank: int, micro_batches: int) -> int:
    """Most micro-batches whose activations process `rank` of a pipeline keeps, those of each of its stages counted."""
    pp = parallel.pp
    most = micro_batches * parallel.stages // pp
    kept = {
        "GPipe": most,
        "1F1B": pp - rank,
        "Interleaved1F1B": 3 * pp - 1 - 2 * rank,
        # their gradients of weights come later than those of inputs
        "InterleavedZeroBubble": 2 * pp,
        "ZBV": 2 * pp,
        "DualPipeV": 2 * pp + 1,
    }[parallel.schedule]
    return min(most, kept)


def idle_frac(parallel: Parallel, micro_batches: int) -> float:
    """Share of a step in which a process of a pipeline waits for others; 0 without one."""
    stages_each = parallel.stages // parallel.pp
    lost = (parallel.pp - 1) * {"GPipe": 3, "1F1B": 3, "Interleaved1F1B": 3, "DualPipeV": 2}.get(parallel.schedule, 1)
    return lost / (3 * micro_batches * stages_each + lost)
