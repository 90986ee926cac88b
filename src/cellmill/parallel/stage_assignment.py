"""Assignment of pipeline stages to ranks and of blocks to stages. Torch-free arithmetic.

Source: PipeDream and Megatron-LM, Narayanan et al. 2021, section 2.2 (interleaved stages); zero bubble, Qi et al. 2024,
section 6 (V shape: the first and the last stage share a rank).
"""

from cellmill.config.parallel import Parallel

V_SHAPED = ("ZBV", "DualPipeV")


def stages_of(rank: int, parallel: Parallel) -> list[int]:
    """Return the pipeline stages of pipeline rank `rank`, ascending."""
    if parallel.stages == parallel.pp:
        return [rank]
    second = parallel.stages - 1 - rank if parallel.schedule in V_SHAPED else rank + parallel.pp
    return [rank, second]


def process_of(stage: int, parallel: Parallel) -> int:
    """Return the pipeline rank that holds `stage`."""
    return next(rank for rank in range(parallel.pp) if stage in stages_of(rank, parallel))


def blocks_of(stage: int, stages: int, blocks: int) -> range:
    """Return the blocks of a stage. The remainder goes to the middle: the ends hold the embedding and the loss."""
    quotient, remainder = divmod(blocks, stages)
    sizes = [quotient + (1 <= number <= remainder) for number in range(stages)]
    first = sum(sizes[:stage])
    return range(first, first + sizes[stage])
