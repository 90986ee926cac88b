"""Pipeline schedules: micro-batches whose activations a rank holds, and idle time.

Time is in units of one forward pass through a pipeline stage. A backward pass takes 2: 1 for the
gradients of inputs and 1 for the gradients of weights. All stages are assumed to be alike.

Sources: Narayanan et al. 2021, section 2.2 (1F1B, interleaved); Qi et al. 2024 (zero bubble, ZBV);
DeepSeek-V3, 2024, section 3.2.1 (DualPipe, here in V shape).
"""

from cellmill.config.parallel import Parallel
from cellmill.parallel.mesh import V_SHAPED
from cellmill.planner.units import FORWARDS_PER_BACKWARD

# Idle time of a rank per other rank of the pipeline: a forward and a backward pass. Zero bubble fills
# 2 of these 3 units with gradients of weights, and DualPipeV 1.
IDLE_UNITS = {
    "GPipe": 3,
    "1F1B": 3,
    "Interleaved1F1B": 3,
    "InterleavedZeroBubble": 1,
    "ZBV": 1,
    "DualPipeV": 2,
}


def count_in_flight(parallel: Parallel, pp_rank: int, micro_batches: int) -> int:
    """Count the micro-batches whose activations a pipeline rank holds at most.

    A micro-batch that both stages of a rank hold counts twice.
    """
    pp = parallel.pp
    later_ranks = pp - 1 - pp_rank
    all_at_once = micro_batches * parallel.n_stages // pp
    in_flight = {
        # all forward passes come before the first backward pass
        "GPipe": all_at_once,
        # `later_ranks` forward passes of warm-up, and the one before the first backward pass
        "1F1B": later_ranks + 1,
        # the warm-up has pp forward passes of the first stage, and 2 more per later rank
        "Interleaved1F1B": pp + 2 * later_ranks + 1,
        # The warm-up has pp forward passes of the first stage, and 1 more per later rank. The gradients
        # of weights, computed later than those of inputs, keep `pp_rank` more: the same on every rank.
        "InterleavedZeroBubble": 2 * pp,
        # 1F1B's first rank holds pp micro-batches of a stage twice as large: here 2 pp of half the size
        "ZBV": 2 * pp,
        # as DualPipe on 2 pp ranks of one stage each; the V shape puts two stages on a rank
        "DualPipeV": 2 * pp + 1,
    }
    return min(all_at_once, in_flight[parallel.schedule])


def list_splits(parallel: Parallel, pp_rank: int, micro_batches: int) -> list[tuple[int, ...]]:
    """List by how many of these micro-batches each stage of a rank holds, at moments when it holds most.

    Of two stages, the first one holds as many as possible at one of these moments, and the second one
    at the other.
    """
    pp = parallel.pp
    in_flight = count_in_flight(parallel, pp_rank, micro_batches)
    if parallel.n_stages == pp:
        return [(in_flight,)]
    # forward passes of the first stage before a gradient arrives; and of the second stage
    first = 2 * pp
    second = pp
    if parallel.schedule in V_SHAPED:  # gradients come back through the ranks after this one
        first -= pp_rank
        second = pp_rank + 1
    first = min(first, in_flight)
    second = min(second, in_flight - pp)
    return [(first, in_flight - first), (in_flight - second, second)]


def estimate_idle_frac(parallel: Parallel, micro_batches: float) -> float:
    """Estimate the fraction of a step in which a pipeline rank waits; 0 without a pipeline.

    `micro_batches` is their mean number in a step, which is rounded.
    """
    stages_per_rank = parallel.n_stages // parallel.pp
    # the further forward pass of a coupled loss is left out
    units_per_micro_batch = 1 + FORWARDS_PER_BACKWARD
    busy_units = units_per_micro_batch * max(1, round(micro_batches)) * stages_per_rank
    idle_units = (parallel.pp - 1) * IDLE_UNITS[parallel.schedule]
    return idle_units / (busy_units + idle_units)


def estimate_validation_idle_frac(parallel: Parallel, micro_batches: float) -> float:
    """Estimate the fraction of a validation in which a pipeline rank waits; 0 without a pipeline.

    A validation has only forward passes, and a rank computes all micro-batches in one of its stages
    before the next (`parallel.pipeline`). It waits once for each other rank; in a V shape once in
    each of its two stages, since micro-batches pass the ranks in both directions.
    """
    busy_units = max(1, round(micro_batches))  # between two waits
    if parallel.schedule not in V_SHAPED:
        busy_units *= parallel.n_stages // parallel.pp
    idle_units = parallel.pp - 1
    return idle_units / (busy_units + idle_units)
