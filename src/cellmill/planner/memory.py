"""Planned memory of a training process by part, and idle time of its pipeline schedule.

Memory: weights, gradients and the optimizer's state are float32 in every precision. The peak is at
one of three moments: when the backward pass begins, when the backward passes of the blocks have
ended, or at the last reduction of a sharded model. The framework's own memory (about 1 GB with CUDA
and NCCL) belongs to the fraction that `plan.memory_frac` leaves free.

Pipelines: schedules are counted in the units of the papers, forward 1 and backward 2 (1 for inputs,
1 for weights), with all pipeline stages alike.

Sources: Narayanan et al. 2021, section 2.2 (1F1B, interleaved); Qi et al. 2024 (zero bubble, ZBV);
DeepSeek-V3, 2024, section 3.2.1 (DualPipe, here in V shape).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple, Self

from cellmill.config.options import TrainOptions
from cellmill.config.parallel import Layout, Parallel, layout
from cellmill.models.build import ModelSpec
from cellmill.parallel.mesh import list_blocks, list_stages
from cellmill.planner.passes import FLOAT32
from cellmill.planner.size import Load, ModelSize, measure

AUTOCAST_BYTES = 2.5
"""Mean bytes of an element that autocast keeps for the backward pass: the residual stream and
inputs of norms stay float32. 2.3 were measured, on a CPU.
"""


class RankTotals(NamedTuple):
    """Totals over the stages of one pipeline rank."""

    n_blocks: int
    n_begin: int  # 1 with the part before the blocks, else 0
    n_finish: int  # 1 with the part after the blocks, else 0
    parameters: int
    trained: int  # parameters with a gradient and optimizer state
    # parameters outside the blocks; tied parameters are in both the first and the last stage
    outside: int
    outside_trained: int


@dataclass(frozen=True)
class Stage:
    """One pipeline stage; the whole model without a pipeline."""

    size: ModelSize
    n_blocks: int
    has_begin: bool  # True with the part before the blocks
    has_finish: bool  # True with the part after the blocks

    def flops(self, load: Load) -> float:
        """Return the FLOPs of the stage for `load`."""
        return self.size.flops.count(load, self.n_blocks, self.has_begin, self.has_finish)

    def activations(self, per_block: float) -> float:
        """Return the elements kept per token for the backward pass, with `per_block` in each block."""
        begin = int(self.has_begin) * self.size.begin.activations_per_token
        finish = int(self.has_finish) * self.size.finish.activations_per_token
        return self.n_blocks * per_block + (begin + finish)


@dataclass(frozen=True)
class PlannedModel:
    """A model in a parallel layout."""

    size: ModelSize  # on one tensor-parallel rank
    parallel: Parallel
    layout: Layout
    local_world: int  # processes per node
    keeps_average: bool = False  # average of the trained weights, by train.ema_decay
    states: int = 2  # tensors of the optimizer's state per trained parameter

    @classmethod
    def measure(
        cls,
        options: TrainOptions,
        n_genes: int,
        world: int,
        local_world: int,
        levels: Mapping[str, Sequence[str]] | None = None,
    ) -> Self:
        """Measure the model of a run on `world` processes.

        Raise ConfigError if the layout does not divide them.
        """
        parallel = options.parallel
        spec = ModelSpec.of(options, n_genes, levels)
        return cls(
            size=measure(spec, parallel.tp, parallel.sequence_parallel, options.finetune),
            parallel=parallel,
            layout=layout(parallel, world, local_world),
            local_world=local_world,
            keeps_average=options.train.ema_decay is not None,
            states=options.train.optimizer.states_per_parameter,
        )

    @property
    def element_bytes(self) -> int:
        """Bytes of an element that the forward and backward passes compute with."""
        return 2 if self.parallel.half_precision else FLOAT32

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
        """Stages of pipeline rank `rank`, in the order of `list_stages`."""
        n_stages = self.parallel.stages
        stages = []
        for stage in list_stages(rank, self.parallel):
            blocks = len(list_blocks(stage, n_stages, self.size.n_blocks))
            stages.append(Stage(self.size, blocks, stage == 0, stage == n_stages - 1))
        return stages

    def totals(self, rank: int) -> RankTotals:
        """Totals over the stages of pipeline rank `rank`."""
        size = self.size
        stages = self.stages(rank)
        n_blocks = sum(stage.n_blocks for stage in stages)
        n_begin = sum(int(stage.has_begin) for stage in stages)
        n_finish = sum(int(stage.has_finish) for stage in stages)
        tied = int(self.parallel.stages == 1)  # a single stage has tied parameters once, not twice
        outside = n_begin * size.begin.parameters + n_finish * size.finish.parameters
        outside -= tied * size.tied.parameters
        outside_trained = n_begin * size.begin.trained + n_finish * size.finish.trained
        outside_trained -= tied * size.tied.trained
        return RankTotals(
            n_blocks=n_blocks,
            n_begin=n_begin,
            n_finish=n_finish,
            parameters=n_blocks * size.block.parameters + outside,
            trained=n_blocks * size.block.trained + outside_trained,
            outside=outside,
            outside_trained=outside_trained,
        )


def kept_micro_batches(parallel: Parallel, rank: int, micro_batches: int) -> int:
    """Return the most micro-batches whose activations a pipeline rank holds, summed over its stages."""
    pp = parallel.pp
    all_at_once = micro_batches * parallel.stages // pp
    in_flight = {
        # every forward pass comes before the first backward pass
        "GPipe": all_at_once,
        # the first backward pass returns after pp - 1 - rank further ranks; one more has begun
        "1F1B": pp - rank,
        # pp of the first stage, then 2 for each further rank, on the way there and back; one more
        "Interleaved1F1B": pp + 2 * (pp - 1 - rank) + 1,
        # as interleaved with 1 for each further rank, 2 pp - rank; `rank` more wait for the gradients
        # of their weights, which are computed after those of inputs
        "InterleavedZeroBubble": 2 * pp,
        # both stages of a rank hold as much as 1F1B's first rank in one stage of twice the size
        "ZBV": 2 * pp,
        # DualPipe on 2 pp ranks of one stage holds 2 pp + 1; its V shape has two of them on a rank
        "DualPipeV": 2 * pp + 1,
    }
    return min(all_at_once, in_flight[parallel.schedule])


def idle_frac(parallel: Parallel, micro_batches: int) -> float:
    """Return the fraction of a step in which a pipeline rank waits; 0 without a pipeline.

    Each of the pp - 1 other ranks costs units of one stage: forward and backward, 1 + 2, in GPipe and
    1F1B; 1 less in DualPipeV, and 2 less with zero bubble, where gradients of weights fill the time.
    """
    stages_per_rank = parallel.stages // parallel.pp
    idle_units = {"GPipe": 3, "1F1B": 3, "Interleaved1F1B": 3, "DualPipeV": 2}
    lost = (parallel.pp - 1) * idle_units.get(parallel.schedule, 1)
    return lost / (3 * micro_batches * stages_per_rank + lost)


@dataclass(frozen=True)
class Memory:
    """Peak bytes of one process."""

    parameters: int = 0  # this rank's shard, and all buffers
    # this rank's shard, those accumulated over micro-batches, and those being computed
    gradients: int = 0
    optimizer: int = 0  # its state, such as both moments of AdamW
    average: int = 0  # average of the trained weights, with train.ema_decay
    gathered: int = 0  # full weights gathered for a forward or backward pass, or cast to 16 bits
    communication: int = 0  # gradients in a reduce-scatter
    pipeline: int = 0  # receive buffers of a pipeline for all micro-batches of a step
    # kept for the backward pass, and the workspace of one block's backward pass
    activations: int = 0
    logits: int = 0  # logits and their gradient, and the table's gradient of a chunked loss

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


def format_bytes(n_bytes: float) -> str:
    """Format a number of bytes in the largest unit that gives at least 1."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= factor:
            return f"{n_bytes / factor:.3g} {unit}"
    return f"{n_bytes:.0f} bytes"


def host_bytes(model: PlannedModel) -> tuple[int, int]:
    """Pinned host memory of one process: for `parallel.cpu_offload`, and for staging a checkpoint.

    Offloaded are weights, gradients, optimizer state and, if full, the average. The staged copy of
    a GPU's checkpoint has weights, optimizer state and average.
    """
    offload = model.parallel.cpu_offload
    average = int(model.keeps_average)
    offloaded = 1 + model.states
    if offload == "full":
        offloaded += average

    def copy_bytes(n_tensors: int) -> int:
        """Return the bytes of a rank's weights, and of `n_tensors` further tensors of each trained one."""
        elements = 0
        for rank in range(model.layout.pp):
            totals = model.totals(rank)
            elements = max(elements, totals.parameters + n_tensors * totals.trained)
        return FLOAT32 * -(-elements // model.shards)

    return copy_bytes(offloaded) if offload else 0, copy_bytes(model.states + average)


def peak_memory(
    model: PlannedModel, micro_tokens: int, micro_batches: int, ranks: Iterable[int] | None = None
) -> Memory:
    """Return the memory of the pipeline rank that needs most, for `micro_tokens` in a micro-batch.

    `micro_batches` is their number in a step; `ranks` limits the pipeline ranks.
    """
    moments = []
    for rank in range(model.layout.pp) if ranks is None else ranks:
        planned = _RankMemory(model, rank, micro_tokens, micro_batches)
        moments.append(planned.at_backward_start())
        if model.layout.pp == 1:
            moments.append(planned.at_blocks_end())
        if model.is_sharded:
            moments.append(planned.at_last_reduction())
    return max(moments, key=lambda memory: memory.total)


class _RankMemory:
    """Memory of a process of pipeline rank `rank` at three moments of a step."""

    def __init__(self, model: PlannedModel, rank: int, tokens: int, micro_batches: int) -> None:
        self.model = model
        self.parallel = model.parallel
        self.totals = model.totals(rank)
        self.stages = model.stages(rank)
        self.tokens = tokens  # tokens of a micro-batch
        self.micro_batches = micro_batches
        self.in_flight = kept_micro_batches(self.parallel, rank, micro_batches)
        offload = self.parallel.cpu_offload
        trained_shard = -(-self.totals.trained // model.shards)
        self.shard_gradients = 0 if offload == "full" else FLOAT32 * trained_shard
        self.accumulated = 0  # gradients kept from one micro-batch of a sharded model to the next
        if micro_batches > 1 and self.parallel.reduces_each_micro_batch:
            self.accumulated = self.shard_gradients
        elif micro_batches > 1:
            self.accumulated = FLOAT32 * self.totals.trained
        self.constant = self._plan_constant(trained_shard)

    def _plan_constant(self, trained_shard: int) -> Memory:
        """Memory that stays allocated for the whole step."""
        model = self.model
        size = model.size
        totals = self.totals
        offload = self.parallel.cpu_offload
        weights = 0 if offload == "full" else -(-totals.parameters // model.shards)
        average = 0
        if model.keeps_average and offload != "full":
            average = FLOAT32 * trained_shard
        pipeline = 0
        if self.parallel.pp > 1:
            # each stage receives activations and gradients, except at the ends of the model
            messages = (
                2 * len(self.stages) - totals.n_begin - totals.n_finish
            ) * self.micro_batches
            pipeline = round(model.element_bytes * (messages * size.width * self.tokens))
        return Memory(
            parameters=FLOAT32 * (size.buffers + weights),
            optimizer=0 if offload else model.states * FLOAT32 * trained_shard,
            average=average,
            pipeline=pipeline,
        )

    def at_backward_start(self) -> Memory:
        """Return the memory when the backward pass begins.

        It has all activations, and the gradients being computed.
        """
        model = self.model
        totals = self.totals
        block = model.size.block
        logits = 0
        if totals.n_finish:  # float32 in every precision
            logits = round(FLOAT32 * model.size.finish_workspace(self.tokens))
        memory = replace(
            self.constant,
            activations=round(self._activation_bytes * self._kept_per_token() * self.tokens),
            logits=logits,
            gathered=self._gathered,
        )
        if not model.is_sharded:
            # DistributedDataParallel's buckets persist and are sent as they are; accumulated
            # gradients are a further copy
            copies = int(model.layout.dp > 1) + int(self.micro_batches > 1)
            elements = copies * totals.trained
            if elements == 0:  # no gradient is there yet, except those being computed
                elements = block.trained
            return replace(memory, gradients=FLOAT32 * elements)
        communication = 0
        if self.micro_batches > 1 and self.parallel.reduces_each_micro_batch:
            # a block is scattered while the shards are kept
            communication = FLOAT32 * (block.trained + -(-block.trained // model.shards))
        return replace(
            memory,
            gradients=self.accumulated + model.element_bytes * block.trained,
            communication=communication,
        )

    def at_blocks_end(self) -> Memory:
        """Return the memory when the backward pass has reached the first block.

        It has gradients of all blocks, and activations of the first block and the part before it.
        """
        model = self.model
        size = model.size
        block = size.block
        totals = self.totals
        kept_per_token = (
            block.activations_per_token
            + size.begin.activations_per_token
            + size.block_workspace_per_token
        )
        memory = replace(
            self.constant, activations=round(self._activation_bytes * kept_per_token * self.tokens)
        )
        if not model.is_sharded:
            gradients = FLOAT32 * totals.trained
            return replace(memory, gradients=gradients, gathered=self._gathered)
        # one block is reduced, in float32, while gradients of the part before it are computed
        computed = totals.outside_trained + block.trained
        return replace(
            memory,
            gradients=self.shard_gradients + model.element_bytes * computed,
            gathered=model.element_bytes * (totals.outside + block.parameters),
            communication=FLOAT32 * block.trained,
        )

    def at_last_reduction(self) -> Memory:
        """Return the memory when the last gradients of a sharded model are reduced.

        They are those of a pipeline stage or, without a pipeline, of the root.
        """
        totals = self.totals
        if self.parallel.pp > 1:  # each stage's gradients are reduced after its last micro-batch
            return replace(
                self.constant,
                gradients=self.accumulated + self.shard_gradients,
                gathered=self._gathered,
                communication=FLOAT32 * max(self.model.size.block.trained, totals.outside_trained),
            )
        element_bytes = self.model.element_bytes
        return replace(
            self.constant,
            gradients=self.shard_gradients + element_bytes * totals.outside_trained,
            gathered=element_bytes * totals.outside,
            communication=FLOAT32 * totals.outside_trained,
        )

    @property
    def _activation_bytes(self) -> float:
        """Return the bytes of one activation that is kept for the backward pass."""
        if self.parallel.half_precision and not self.model.is_sharded:
            return AUTOCAST_BYTES
        return self.model.element_bytes

    @property
    def _gathered(self) -> int:
        """Return the bytes of full weights in a forward pass, or of autocast's casts of them."""
        totals = self.totals
        size = self.model.size
        if not self.model.is_sharded:
            return 2 * totals.parameters if self.parallel.half_precision else 0
        weights = totals.parameters
        if self.parallel.reshards_after_forward:  # the next block is gathered while one computes
            weights = totals.outside + min(2, size.n_blocks) * size.block.parameters
        return self.model.element_bytes * weights

    def _kept_per_token(self) -> float:
        """Return elements per token when a backward pass begins: kept activations, one block's workspace."""
        size = self.model.size
        kept_by_checkpointing = {
            None: size.block.activations_per_token,
            "selective": size.selective_per_token,
            "full": size.width,  # only the block's input
        }
        per_block = kept_by_checkpointing[self.parallel.activation_checkpointing]
        kept = 0.0
        for n_micro_batches, stage in zip(self._in_flight_by_stage(), self.stages):
            kept += n_micro_batches * stage.activations(per_block)
        # a block computes again what it has not kept before its backward pass begins
        recomputed = size.block.activations_per_token - per_block
        workspace = size.block_workspace_per_token + recomputed
        # the part after the blocks has freed its activations when a block's backward pass begins
        freed = int(any(stage.has_finish for stage in self.stages))
        return kept + max(workspace - freed * size.finish.activations_per_token, 0)

    def _in_flight_by_stage(self) -> list[int]:
        """Return the micro-batches whose activations each stage holds."""
        if self.parallel.pp == 1:
            return [1]
        if len(self.stages) == 1:
            return [self.in_flight]
        # the first of two stages gets the odd one: it waits longer for gradients
        return [-(-self.in_flight // 2), self.in_flight // 2]
