"""Which stages of a pipeline a process has, and what of the model a stage has. Torch-free arithmetic.

Source: PipeDream and Megatron-LM, Narayanan et al. 2021, section 2.2 (stages of one process interleaved); zero bubble,
Qi et al. 2024, section 6 (in a V: the first and the last stage share a process).
"""

from __future__ import annotations

from cellmill.config.run import Parallel

V_SHAPED = ("ZBV", "DualPipeV")


def stages_of(rank: int, parallel: Parallel) -> list[int]:
    """Numbers of the stages that process `rank` of a pipeline has, ascending."""
    if parallel.stages == parallel.pp:
        return [rank]
    second = parallel.stages - 1 - rank if parallel.schedule in V_SHAPED else rank + parallel.pp
    return [rank, second]


def process_of(stage: int, parallel: Parallel) -> int:
    """Which process of a pipeline has a stage."""
    return next(rank for rank in range(parallel.pp) if stage in stages_of(rank, parallel))


def blocks_of(stage: int, stages: int, blocks: int) -> range:
    """Which blocks a stage has. What does not divide goes to the middle: the ends have the embedding and the loss."""
    each, more = divmod(blocks, stages)
    sizes = [each + (1 <= number <= more) for number in range(stages)]
    first = sum(sizes[:stage])
    return range(first, first + sizes[stage])
