"""Which stages of a pipeline a process has, and what of the model a stage has. Torch-free arithmetic.

Source: PipeDream and Megatron-LM, Narayanan et al. 2021, section 2.2 (stages of one process interleaved); zero bubble,
Qi et al. 2024, section 6 (in a V: the first and the last stage share a process).
"""

from __future__ import annotations

from dataclasses import dataclass

from cellmill.config.family import ModelSize
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


@dataclass(frozen=True)
class Share:
    """What one stage has of a model."""

    blocks: int
    first: bool
    """Whether it has what goes before the blocks."""
    last: bool
    """Whether it has what follows them."""

    def parameters(self, size: ModelSize) -> int:
        """Elements."""
        return self.blocks * size.block_parameters + self.outside(size)

    def outside(self, size: ModelSize) -> int:
        """Parameters outside the blocks; those that the first and the last stage share are in both."""
        if self.first and self.last:
            return size.outside_parameters
        return self.first * size.begin_parameters + self.last * size.finish_parameters

    def flops(self, size: ModelSize, tokens: float, pairs: float) -> float:
        """Forward and backward, of so many tokens and (query, key) pairs."""
        of_token = self.blocks * size.block_flops_per_token
        of_token += self.first * size.begin_flops_per_token + self.last * size.finish_flops_per_token
        return of_token * tokens + self.blocks * size.block_flops_per_token_pair * pairs

    def activations(self, size: ModelSize, of_block: int) -> int:
        """Elements a token kept between the passes, `of_block` of them in each block."""
        outside = self.first * size.begin_activations_per_token + self.last * size.finish_activations_per_token
        return self.blocks * of_block + outside


def shares_of(rank: int, parallel: Parallel, blocks: int) -> list[Share]:
    """Of each stage of process `rank` of a pipeline, in the order of `stages_of`."""
    stages = parallel.stages
    return [
        Share(len(blocks_of(stage, stages, blocks)), first=stage == 0, last=stage == stages - 1)
        for stage in stages_of(rank, parallel)
    ]
