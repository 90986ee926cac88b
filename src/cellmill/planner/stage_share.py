"""What one stage of a pipeline has of a model: blocks, parameters, FLOPs, kept activations."""

from __future__ import annotations

from dataclasses import dataclass

from cellmill.config.family import ModelSize
from cellmill.config.run import Parallel
from cellmill.parallel.partition import blocks_of, stages_of


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
