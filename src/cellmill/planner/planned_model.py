"""A measured model in a parallel layout: its pipeline stages on each rank, and idle time of the pipeline schedule.

Schedules are counted in the units of the papers, forward 1 and backward 2 (1 for inputs, 1 for weights), with all
stages alike. A test replays torch's own schedule tables and gets the same numbers.

Source: Narayanan et al. 2021, section 2.2 (1F1B, interleaved); Qi et al. 2024 (zero bubble, ZBV); DeepSeek-V3, 2024,
section 3.2.1 (DualPipe, here in V shape).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from cellmill.config.options import TrainOptions
from cellmill.config.parallel import Layout, Parallel, layout
from cellmill.models.build import ModelSpec
from cellmill.parallel.stage_assignment import blocks_of, stages_of
from cellmill.planner.size import ModelSize, measure

ELEMENT_BYTES = {"32-true": 4, "bf16-mixed": 2, "16-mixed": 2}


class Counts(NamedTuple):
    """Numbers of parameters and parts in one pipeline stage, or in all stages of a rank."""

    blocks: int
    first: int  # 1 with the part before the blocks
    last: int  # 1 with the part after the blocks
    parameters: int
    trained: int  # parameters with a gradient and optimizer state
    outside: int  # parameters outside the blocks; tied ones are in both the first and the last stage
    outside_trained: int


@dataclass(frozen=True)
class Stage:
    """One pipeline stage; the whole model without a pipeline."""

    size: ModelSize
    blocks: int
    first: bool
    last: bool

    @property
    def counts(self) -> Counts:
        size, block = self.size, self.size.block
        ends = self.first * size.begin.parameters + self.last * size.finish.parameters
        ends_trained = self.first * size.begin.trained + self.last * size.finish.trained
        if self.first and self.last:
            ends, ends_trained = ends - size.tied.parameters, ends_trained - size.tied.trained
        parameters, trained = self.blocks * block.parameters + ends, self.blocks * block.trained + ends_trained
        return Counts(self.blocks, self.first, self.last, parameters, trained, ends, ends_trained)

    def flops(self, tokens: float, pairs: float, cells: float) -> float:
        """Forward and backward FLOPs for `cells` cells of `tokens` tokens and `pairs` (query, key) pairs in total."""
        per_token = self.blocks * self.size.block.flops_per_token
        per_token += self.first * self.size.begin.flops_per_token + self.last * self.size.finish.flops_per_token
        per_cell = self.blocks * self.size.block.flops_per_cell + self.last * self.size.finish.flops_per_cell
        return per_token * tokens + self.blocks * self.size.pair_flops * pairs + per_cell * cells

    def activations(self, per_block: float) -> float:
        """Elements kept per token for the backward pass, with `per_block` in each block."""
        begin, finish = self.size.begin.activations_per_token, self.size.finish.activations_per_token
        return self.blocks * per_block + (self.first * begin + self.last * finish)


@dataclass(frozen=True)
class PlannedModel:
    """A model in a parallel layout."""

    size: ModelSize  # sizes on one tensor-parallel rank
    parallel: Parallel
    layout: Layout
    local_world: int  # processes per node
    keeps_average: bool = False  # of the trained weights

    @classmethod
    def of(
        cls,
        options: TrainOptions,
        n_genes: int,
        world: int,
        local_world: int,
        levels: Mapping[str, Sequence[str]] | None = None,
    ) -> Self:
        """Measure the model of a run on `world` processes. Raises ConfigError if they do not fit the layout."""
        parallel = options.parallel
        spec = ModelSpec.of(options, n_genes, levels)
        size = measure(spec, parallel.tp, parallel.sequence_parallel, options.finetune)
        sizes, keeps_average = layout(parallel, world, local_world), options.train.ema_decay is not None
        return cls(size, parallel, sizes, local_world, keeps_average)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element in forward and backward, and of one kept for the backward pass."""
        return ELEMENT_BYTES[self.parallel.precision]

    @property
    def is_sharded(self) -> bool:
        """True if FSDP2 wraps the model: with several data-parallel ranks under fsdp, tp or pp."""
        sizes = self.layout
        return sizes.dp > 1 and (self.parallel.strategy == "fsdp" or sizes.tp * sizes.pp > 1)

    @property
    def shards(self) -> int:
        """Data-parallel ranks that share one copy of the weights."""
        return self.layout.dp_shard if self.is_sharded else 1

    def stages(self, rank: int) -> list[Stage]:
        """Stages of pipeline rank `rank`, in the order of `stages_of`."""
        number = self.parallel.stages
        return [
            Stage(self.size, len(blocks_of(stage, number, self.size.blocks)), stage == 0, stage == number - 1)
            for stage in stages_of(rank, self.parallel)
        ]

    def counts(self, rank: int) -> Counts:
        """Counts summed over the stages of pipeline rank `rank`."""
        return Counts(*map(sum, zip(*(stage.counts for stage in self.stages(rank)))))


def kept_micro_batches(parallel: Parallel, rank: int, micro_batches: int) -> int:
    """Maximum number of micro-batches whose activations pipeline rank `rank` holds, summed over its stages."""
    pp = parallel.pp
    in_flight = {
        "GPipe": micro_batches * parallel.stages // pp,
        "1F1B": pp - rank,
        "Interleaved1F1B": 3 * pp - 1 - 2 * rank,
        # these compute gradients of weights after those of inputs
        "InterleavedZeroBubble": 2 * pp,
        "ZBV": 2 * pp,
        "DualPipeV": 2 * pp + 1,
    }
    return min(in_flight["GPipe"], in_flight[parallel.schedule])


def idle_frac(parallel: Parallel, micro_batches: int) -> float:
    """Fraction of a step in which a pipeline rank waits for others; 0 without a pipeline."""
    stages_per_rank = parallel.stages // parallel.pp
    lost = (parallel.pp - 1) * {"GPipe": 3, "1F1B": 3, "Interleaved1F1B": 3, "DualPipeV": 2}.get(parallel.schedule, 1)
    return lost / (3 * micro_batches * stages_per_rank + lost)
