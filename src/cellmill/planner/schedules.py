"""Pipeline schedules: micro-batches whose activations a rank holds, and idle time.

Time is counted in the units of the papers, forward 1 and backward 2 (1 for inputs, 1 for weights),
with all pipeline stages alike.

Sources: Narayanan et al. 2021, section 2.2 (1F1B, interleaved); Qi et al. 2024 (zero bubble, ZBV);
DeepSeek-V3, 2024, section 3.2.1 (DualPipe, here in V shape).
"""

from cellmill.config.parallel import Parallel
from cellmill.planner.measure.size import FORWARDS_PER_BACKWARD

# Idle time of a rank for each other rank, in forward passes of one stage. A forward and a backward
# pass take 3 units. Gradients of weights fill 1 of them in DualPipeV, and 2 with zero bubble.
IDLE_UNITS = {
    "GPipe": 3,
    "1F1B": 3,
    "Interleaved1F1B": 3,
    "InterleavedZeroBubble": 1,
    "ZBV": 1,
    "DualPipeV": 2,
}


def count_in_flight(parallel: Parallel, pp_rank: int, micro_batches: int) -> int:
    """Count the micro-batches in flight, at most: those whose activations a pipeline rank holds.

    A micro-batch counts once for each stage of the rank that holds it.
    """
    pp = parallel.pp
    all_at_once = micro_batches * parallel.n_stages // pp
    in_flight = {
        # Every forward pass comes before the first backward pass.
        "GPipe": all_at_once,
        # A rank holds one for each of the pp - 1 - pp_rank later ranks, and its own.
        "1F1B": pp - pp_rank,
        # A rank holds pp in its first stage, 2 for each later rank (there and back), and its own.
        "Interleaved1F1B": pp + 2 * (pp - 1 - pp_rank) + 1,
        # With 1 instead of 2 for each later rank these are 2 pp - pp_rank. `pp_rank` more are held
        # until the gradients of weights are computed, after the gradients of inputs.
        "InterleavedZeroBubble": 2 * pp,
        # Both stages of a rank hold as much as 1F1B's first rank does in one stage of twice the size.
        "ZBV": 2 * pp,
        # DualPipe on 2 pp ranks of one stage holds 2 pp + 1. The V shape has two stages on a rank.
        "DualPipeV": 2 * pp + 1,
    }
    return min(all_at_once, in_flight[parallel.schedule])


def estimate_idle_frac(parallel: Parallel, micro_batches: float) -> float:
    """Estimate the fraction of a step in which a pipeline rank waits; 0 without a pipeline.

    `micro_batches` is their mean number in a step, which is rounded.
    """
    stages_per_rank = parallel.n_stages // parallel.pp
    # the further forward pass of a loss over rows of the global batch is left out
    units_per_micro_batch = 1 + FORWARDS_PER_BACKWARD
    busy_units = units_per_micro_batch * max(1, round(micro_batches)) * stages_per_rank
    idle_units = (parallel.pp - 1) * IDLE_UNITS[parallel.schedule]
    return idle_units / (busy_units + idle_units)
