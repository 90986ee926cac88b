"""A model in a parallel layout: its pipeline stages, and the parameters that each pipeline rank holds."""

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from cellmill.config.options import TrainOptions
from cellmill.config.parallel import Layout, Parallel
from cellmill.models.build import ModelSpec
from cellmill.parallel.mesh import list_blocks, list_stages
from cellmill.planner.hardware import Hardware
from cellmill.planner.measure.load import Load
from cellmill.planner.measure.size import ModelSize, measure_size
from cellmill.planner.step_counts import CorpusSize
from cellmill.planner.units import FLOAT32_BYTES, HALF_BYTES


class PlannedStage(NamedTuple):
    """One pipeline stage of a model. Without a pipeline the only stage is the whole model."""

    blocks: range  # numbers of the stage's blocks in the model
    has_begin: bool  # True if the stage has the part before the blocks
    has_finish: bool  # True if the stage has the part after the blocks


class RankTotals(NamedTuple):
    """Totals over the stages of one pipeline rank."""

    n_blocks: int
    has_begin: bool  # True if a stage has the part before the blocks
    has_finish: bool  # True if a stage has the part after the blocks
    parameters: int
    trained: int  # parameters with a gradient and optimizer state
    # Parameters, and trained parameters, outside the blocks. In a pipeline both the first and the last
    # stage have the tied parameters.
    outside_parameters: int
    outside_trained: int


@dataclass(frozen=True)
class PlannedModel:
    """A model in a parallel layout."""

    size: ModelSize  # on one tensor-parallel rank
    parallel: Parallel
    layout: Layout
    nproc_per_node: int  # processes per node
    keeps_average: bool = False  # True if train.ema_decay keeps an average of the trained weights
    optimizer_states: int = 2  # numbers in the optimizer's state per trained parameter
    # In a step, the optimizer allocates this many copies of the rank's shard of the blocks' matrices.
    optimizer_copies: int = 0
    pins_memory: bool = True  # False on CPUs, whose processes pin no host memory

    @classmethod
    def measure(cls, options: TrainOptions, corpus: CorpusSize, hardware: Hardware) -> Self:
        """Measure the model of a run in its layout.

        Raise ConfigError if the layout does not divide the processes.
        """
        parallel = options.parallel
        is_on_cpus = hardware.device_name == "cpu"
        if is_on_cpus:  # a CPU has no other memory to offload to
            parallel = parallel.model_copy(update={"cpu_offload": None})
        spec = ModelSpec.of(options, corpus.n_genes, corpus.levels)
        optimizer = options.train.optimizer
        model = cls(
            size=measure_size(spec, parallel.tp, parallel.sequence_parallel, options.finetune),
            parallel=parallel,
            layout=hardware.divide(parallel),
            nproc_per_node=hardware.nproc_per_node,
            keeps_average=options.train.ema_decay is not None,
            optimizer_states=optimizer.states_per_parameter,
            pins_memory=not is_on_cpus,
        )
        copies = optimizer.count_step_copies(sharded=parallel.tp * model.ranks_per_copy > 1)
        return replace(model, optimizer_copies=copies)

    @property
    def element_bytes(self) -> int:
        """Bytes of an element in the forward and backward passes."""
        return HALF_BYTES if self.parallel.half_precision else FLOAT32_BYTES

    def count_block_input_bytes(self, load: Load) -> float:
        """Count the bytes that one block passes to the next.

        Autocast keeps these activations in float32, but FSDP2 does not.
        """
        element_bytes = self.element_bytes if self.uses_fsdp else FLOAT32_BYTES
        return element_bytes * self.size.block_input.total(load)

    @property
    def uses_fsdp(self) -> bool:
        """True if FSDP2 wraps the model: with several data-parallel ranks, under fsdp, tp or pp.

        FSDP2 may shard nothing, as under NO_SHARD.
        """
        is_model_parallel = self.layout.tp * self.layout.pp > 1
        return self.layout.dp > 1 and (self.parallel.strategy == "fsdp" or is_model_parallel)

    @property
    def ranks_per_copy(self) -> int:
        """Number of data-parallel ranks that share one copy of the weights."""
        return self.layout.dp_shard if self.uses_fsdp else 1

    def divide_by_shards(self, elements: int) -> int:
        """Divide a number of elements by the ranks that share a copy of the weights, and round up."""
        return -(-elements // self.ranks_per_copy)

    def list_rank_stages(self, pp_rank: int) -> list[PlannedStage]:
        """List the stages of pipeline rank `pp_rank`, in the order of `parallel.mesh.list_stages`."""
        n_stages = self.parallel.n_stages
        stages = []
        for stage in list_stages(pp_rank, self.parallel):
            blocks = list_blocks(stage, n_stages, self.size.n_blocks)
            stages.append(PlannedStage(blocks, stage == 0, stage == n_stages - 1))
        return stages

    def sum_rank_totals(self, pp_rank: int) -> RankTotals:
        """Sum blocks and parameters over the stages of pipeline rank `pp_rank`."""
        size = self.size
        stages = self.list_rank_stages(pp_rank)
        blocks = [block for stage in stages for block in stage.blocks]
        has_begin = stages[0].has_begin
        has_finish = stages[-1].has_finish

        ends = [size.begin] if has_begin else []
        if has_finish:
            ends.append(size.finish)
        outside_parameters = sum(end.parameters for end in ends)
        outside_trained = sum(end.trained for end in ends)
        if self.parallel.n_stages == 1:
            # `begin` and `finish` both count tied parameters, but a single stage has them once
            outside_parameters -= size.tied.parameters
            outside_trained -= size.tied.trained

        return RankTotals(
            n_blocks=len(blocks),
            has_begin=has_begin,
            has_finish=has_finish,
            parameters=len(blocks) * size.block.parameters + outside_parameters,
            trained=sum(size.trained_by_block[block] for block in blocks) + outside_trained,
            outside_parameters=outside_parameters,
            outside_trained=outside_trained,
        )
