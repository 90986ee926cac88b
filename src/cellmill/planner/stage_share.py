"""What one stage of a pipeline has of a model: blocks, parameters, FLOPs, kept activations."""

from __future__ import annotations

from dataclasses import dataclass

from cellmill.config.parallel import Parallel
from cellmill.parallel.stage_assignment import blocks_of, stages_of
from cellmill.planner.size import ModelSize


@dataclass(frozen=True)
class Share:
    """What one stage has of a model."""

    blocks: int
    first: bool
    """Whether it has what goes before the blocks."""
    last: bool
    """Whether it has what follows them."""

    def parameters(self, size: ModelSize) -> int:
        """Parameters of the stage."""
        return self.blocks * size.block.parameters + self.outside(size)

    def outside(self, size: ModelSize) -> int:
        """Parameters outside the blocks; tied ones are in both the first and the last stage."""
        if self.first and self.last:
            return size.outside_parameters
        return self.first * size.begin.parameters + self.last * size.finish.parameters

    def trained(self, size: ModelSize) -> int:
        """Parameters of the stage that have a gradient and optimizer state."""
        return self.blocks * size.block.trained + self.outside_trained(size)

    def outside_trained(self, size: ModelSize) -> int:
        """Return the same outside the blocks."""
        tied = size.tied.trained if self.first and self.last else 0
        return self.first * size.begin.trained + self.last * size.finish.trained - tied

    def flops(self, size: ModelSize, tokens: float, pairs: float) -> float:
        """Forward and backward FLOPs for so many tokens and (query, key) pairs."""
        of_token = self.blocks * size.block.flops_per_token
        of_token += self.first * size.begin.flops_per_token + self.last * size.finish.flops_per_token
        return of_token * tokens + self.blocks * size.pair_flops * pairs

    def activations(self, size: ModelSize, of_block: float) -> float:
        """Elements kept per token between the passes, `of_block` of them in each block."""
        outside = self.first * size.begin.activations_per_token + self.last * size.finish.activations_per_token
        return self.blocks * of_block + outside


def shares_of(rank: int, parallel: Parallel, blocks: int) -> list[Share]:
    """Of each stage of process `rank` of a pipeline, in the order of `stages_of`."""
    stages = parallel.stages
    return [
        Share(len(blocks_of(stage, stages, blocks)), first=stage == 0, last=stage == stages - 1)
        for stage in stages_of(rank, parallel)
    ]
