"""Pipeline schedules: micro-batches whose activations a rank holds, and idle time.

The unit of time is one forward pass of one micro-batch through a pipeline stage. A backward pass takes 2
units: 1 for the gradients of inputs, and 1 for the gradients of weights. All stages are assumed to be
alike.

A stage holds the activations of a micro-batch from its forward pass to the end of its backward pass.

Sources: Narayanan et al. 2021, section 2.2 (1F1B, interleaved); Qi et al. 2024 (zero bubble, ZBV);
DeepSeek-V3, 2024, section 3.2.1 (DualPipe, here in V shape).
"""

from cellmill.config.parallel import Parallel
from cellmill.parallel.mesh import V_SHAPED
from cellmill.planner.units import FORWARDS_PER_BACKWARD

# Units of time that a rank is idle in a step, for each other rank of the pipeline. A forward and a
# backward pass are 3 units. Zero bubble fills 2 of them with gradients of weights, and DualPipeV fills 1.
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

    A step has `micro_batches` micro-batches. A micro-batch that both stages of the rank hold counts twice.
    """
    pp = parallel.pp
    later_ranks = pp - 1 - pp_rank
    all_at_once = micro_batches * parallel.n_stages // pp
    # micro-batches that the rank holds, by schedule
    in_flight = {
        # all forward passes come before the first backward pass
        "GPipe": all_at_once,
        # 1 forward pass per later rank, and the one right before the first backward pass
        "1F1B": later_ranks + 1,
        # pp forward passes of the first stage, 2 more per later rank, and the one right before the first
        # backward pass
        "Interleaved1F1B": pp + 2 * later_ranks + 1,
        # pp forward passes of the first stage, 1 more per later rank, and the one right before the first
        # backward pass: pp + later_ranks + 1. The rank computes gradients of weights later than gradients
        # of inputs, and so holds pp_rank more micro-batches. On every rank the sum is 2 pp.
        "InterleavedZeroBubble": 2 * pp,
        # Every rank needs as much memory as the first rank of 1F1B, which holds pp micro-batches. Here a
        # rank has two stages, each half as large as a stage of 1F1B.
        "ZBV": 2 * pp,
        # as in DualPipe on 2 pp ranks of one stage each; the V shape puts two of these stages on one rank
        "DualPipeV": 2 * pp + 1,
    }
    return min(all_at_once, in_flight[parallel.schedule])


def list_splits(parallel: Parallel, pp_rank: int, micro_batches: int) -> list[tuple[int, ...]]:
    """List how many micro-batches each stage of a rank holds, at the moments when the rank holds the most.

    A rank with two stages has two such moments, each with numbers (first stage, second stage). At one
    moment the first stage holds as many as it can, at the other the second stage does.
    """
    pp = parallel.pp
    in_flight = count_in_flight(parallel, pp_rank, micro_batches)
    if parallel.n_stages == pp:
        return [(in_flight,)]
    # the most that each stage can hold: its forward passes before its first gradient arrives
    max_first = 2 * pp
    max_second = pp
    if parallel.schedule in V_SHAPED:
        # one micro-batch for each stage from this stage to the last of the model
        max_first -= pp_rank
        max_second = pp_rank + 1
    first = min(max_first, in_flight)
    second = min(max_second, in_flight - pp)  # the first stage still holds pp
    return [(first, in_flight - first), (in_flight - second, second)]


def estimate_idle_frac(parallel: Parallel, micro_batches: float) -> float:
    """Estimate the fraction of a step in which a pipeline rank waits; 0 without a pipeline.

    `micro_batches` is the mean number of micro-batches in a step. It is rounded to a whole number.
    """
    stages_per_rank = parallel.n_stages // parallel.pp
    # a coupled loss has a second forward pass, which is left out here
    units_per_micro_batch = 1 + FORWARDS_PER_BACKWARD
    busy_units = units_per_micro_batch * max(1, round(micro_batches)) * stages_per_rank
    idle_units = (parallel.pp - 1) * IDLE_UNITS[parallel.schedule]
    return idle_units / (busy_units + idle_units)


def estimate_validation_idle_frac(parallel: Parallel, micro_batches: float) -> float:
    """Estimate the fraction of a validation in which a pipeline rank waits; 0 without a pipeline.

    A validation has only forward passes. A rank computes all micro-batches in one of its stages before the
    next stage (`parallel.pipeline`). The rank waits one unit for each other rank. In a V shape it waits so
    in each of its two stages, since micro-batches pass the ranks in both directions.
    """
    # units of work for each such wait: of all stages of the rank, or in a V shape of one
    busy_units = max(1, round(micro_batches))
    if parallel.schedule not in V_SHAPED:
        busy_units *= parallel.n_stages // parallel.pp
    idle_units = parallel.pp - 1
    return idle_units / (busy_units + idle_units)
