"""Planned memory of a training process by part, idle time of its pipeline schedule, and bytes it
sends per step.

Memory: weights, gradients and the optimizer's state are float32 in every precision. A step peaks either when its
backward pass begins, with all activations, or when it ends, with all gradients; the larger one counts. The framework's
own memory (about 1 GB with CUDA and NCCL) belongs to the fraction that `plan.memory_frac` leaves free.

Pipelines: schedules are counted in the units of the papers, forward 1 and backward 2 (1 for inputs, 1 for weights),
with all stages alike.

Traffic: collectives are counted as rings. Each of n processes sends (n - 1) / n of the tensor in an all-gather or
reduce-scatter, and twice that in an all-reduce. If a ring has k processes on a node, one of its k hops leaves the node,
and rings take turns over the node's network cards: each process sends 1 / k of its bytes over its card. Reductions of a
few numbers (targets, norms, signals) are left out.

Sources: Narayanan et al. 2021, section 2.2 (1F1B, interleaved); Qi et al. 2024 (zero bubble, ZBV); DeepSeek-V3, 2024,
section 3.2.1 (DualPipe, here in V shape); ZeRO, Rajbhandari et al. 2020, section 7; sequence parallelism, Korthikanti
et al. 2022, section 4.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple, Self

from cellmill.config.options import TrainOptions
from cellmill.config.parallel import Layout, Parallel, layout
from cellmill.models.build import ModelSpec
from cellmill.parallel.mesh import blocks_of, stages_of
from cellmill.planner.size import FLOAT32, ModelSize, measure

# bytes: the residual stream and inputs of norms stay float32; 2.3 measured, on a CPU
AUTOCAST_ACTIVATION = 2.5
BUCKET_BYTES = 25 << 20  # default of DistributedDataParallel
Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "point to point"]


class Counts(NamedTuple):
    blocks: int
    first: int  # 1 with the part before the blocks
    last: int  # 1 with the part after the blocks
    parameters: int
    trained: int  # parameters with a gradient and optimizer state
    # parameters outside the blocks; tied ones are in both the first and the last stage
    outside: int
    outside_trained: int


@dataclass(frozen=True)
class Stage:
    """One pipeline stage; the whole model without a pipeline."""

    size: ModelSize
    blocks: int
    first: bool
    last: bool

    def flops(self, tokens: float, pairs: float, cells: float) -> float:
        return self.size.flops.of(tokens, pairs, cells, self.blocks, self.first, self.last)

    def activations(self, per_block: float) -> float:
        """Elements kept per token for the backward pass, with `per_block` in each block."""
        begin = self.size.begin.activations_per_token
        finish = self.size.finish.activations_per_token
        return self.blocks * per_block + (self.first * begin + self.last * finish)


@dataclass(frozen=True)
class PlannedModel:
    """A model in a parallel layout."""

    size: ModelSize  # sizes on one tensor-parallel rank
    parallel: Parallel
    layout: Layout
    local_world: int  # processes per node
    keeps_average: bool = False  # of the trained weights
    states: int = 2  # tensors of the optimizer's state per trained parameter

    @classmethod
    def of(
        cls,
        options: TrainOptions,
        n_genes: int,
        world: int,
        local_world: int,
        levels: Mapping[str, Sequence[str]] | None = None,
    ) -> Self:
        """Measure the model of a run on `world` processes. Raises ConfigError if they do not fit
        the layout.
        """
        parallel = options.parallel
        spec = ModelSpec.of(options, n_genes, levels)
        size = measure(spec, parallel.tp, parallel.sequence_parallel, options.finetune)
        states = options.train.optimizer.states_per_parameter
        keeps_average = options.train.ema_decay is not None
        return cls(
            size, parallel, layout(parallel, world, local_world), local_world, keeps_average, states
        )

    @property
    def element_bytes(self) -> int:
        """Bytes of one element in forward and backward, and of one kept for the backward pass."""
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
        """Stages of pipeline rank `rank`, in the order of `stages_of`."""
        number = self.parallel.stages
        return [
            Stage(
                self.size,
                len(blocks_of(stage, number, self.size.blocks)),
                stage == 0,
                stage == number - 1,
            )
            for stage in stages_of(rank, self.parallel)
        ]

    def counts(self, rank: int) -> Counts:
        """Counts summed over the stages of pipeline rank `rank`."""
        size = self.size
        stages = self.stages(rank)
        blocks = sum(stage.blocks for stage in stages)
        first = sum(stage.first for stage in stages)
        last = sum(stage.last for stage in stages)
        tied = self.parallel.stages == 1  # one stage has tied parameters once
        outside = (
            first * size.begin.parameters
            + last * size.finish.parameters
            - tied * size.tied.parameters
        )
        trained = first * size.begin.trained + last * size.finish.trained - tied * size.tied.trained
        every = blocks * size.block.parameters + outside
        return Counts(
            blocks, first, last, every, blocks * size.block.trained + trained, outside, trained
        )


def kept_micro_batches(parallel: Parallel, rank: int, micro_batches: int) -> int:
    """Maximum number of micro-batches whose activations pipeline rank `rank` holds, summed over its
    stages.
    """
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
    lost = (parallel.pp - 1) * {"GPipe": 3, "1F1B": 3, "Interleaved1F1B": 3, "DualPipeV": 2}.get(
        parallel.schedule, 1
    )
    return lost / (3 * micro_batches * stages_per_rank + lost)


@dataclass(frozen=True)
class Memory:
    """Peak bytes of one process."""

    parameters: int = 0  # this rank's shard, and all buffers
    # this rank's shard, those accumulated over micro-batches, and those being computed
    gradients: int = 0
    optimizer: int = 0  # its state, such as both moments of AdamW
    average: int = 0  # of the trained weights, with train.ema_decay
    gathered: int = 0  # full weights gathered for a forward or backward pass, or cast to 16 bits
    communication: int = 0  # gradients in a reduce-scatter
    pipeline: int = 0  # receive buffers of a pipeline for all micro-batches of a step
    # kept for the backward pass, and the workspace of one block's backward pass
    activations: int = 0
    logits: int = 0  # logits and their gradient, and the table's gradient of a chunked loss

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


def host_bytes(model: PlannedModel) -> tuple[int, int]:
    """Return pinned host memory of one process: for `parallel.cpu_offload` weights, gradients,
    their state and average, and, beside a GPU, for the copy of a checkpoint weights, their state
    and average.
    """
    offload = model.parallel.cpu_offload
    staged = model.states + model.keeps_average
    offloaded = 1 + model.states + (model.keeps_average and offload == "full")

    def copies(number: int) -> int:
        """Bytes of this rank's weights and of `number` further tensors of each trained one."""
        elements = max(
            own.parameters + number * own.trained
            for own in map(model.counts, range(model.layout.pp))
        )
        return FLOAT32 * -(-elements // model.shards)

    return copies(offloaded) if offload else 0, copies(staged)


def peak_memory(
    model: PlannedModel, micro_tokens: int, micro_batches: int, ranks: Iterable[int] | None = None
) -> Memory:
    """Return the memory of the pipeline rank that needs most, or of one of `ranks`, with
    `micro_batches` of at most `micro_tokens` tokens.
    """
    every = range(model.layout.pp) if ranks is None else ranks
    moments = (
        memory for rank in every for memory in _moments(model, rank, micro_tokens, micro_batches)
    )
    return max(moments, key=lambda memory: memory.total)


def _moments(model: PlannedModel, rank: int, tokens: int, micro_batches: int) -> Iterator[Memory]:
    """Memory at the beginning and at the end of the backward pass."""
    size = model.size
    parallel = model.parallel
    own = model.counts(rank)
    block = size.block
    element = model.element_bytes
    offload = parallel.cpu_offload
    trained_shard = -(-own.trained // model.shards)
    received = (
        (2 * len(model.stages(rank)) - own.first - own.last) * micro_batches * size.width * tokens
    )
    constant = {
        "parameters": FLOAT32
        * (size.buffers + (0 if offload == "full" else -(-own.parameters // model.shards))),
        "optimizer": 0 if offload else model.states * FLOAT32 * trained_shard,
        "average": FLOAT32 * trained_shard if model.keeps_average and offload != "full" else 0,
        "pipeline": round(element * received) if parallel.pp > 1 else 0,
    }
    activation = (
        AUTOCAST_ACTIVATION if parallel.half_precision and not model.is_sharded else element
    )
    first_blocks = (
        block.activations_per_token + size.begin.activations_per_token + size.working_per_token
    )
    begun = constant | {
        "activations": round(activation * _kept_per_token(model, rank, micro_batches) * tokens),
        # float32 in every precision
        "logits": round(FLOAT32 * size.workspace_of(tokens)) if own.last else 0,
    }
    ended = constant | {"activations": round(activation * first_blocks * tokens)}
    if not model.is_sharded:
        # autocast keeps its casts until the backward
        gathered = 2 * own.parameters if parallel.half_precision else 0
        # DistributedDataParallel's buckets persist and are sent themselves; accumulated gradients
        # are beside them
        copies = (model.layout.dp > 1) + (micro_batches > 1)
        yield Memory(
            **begun, gradients=FLOAT32 * (copies * own.trained or block.trained), gathered=gathered
        )
        if parallel.pp == 1:
            yield Memory(**ended, gradients=FLOAT32 * own.trained, gathered=gathered)
        return
    shard_gradients = 0 if offload == "full" else FLOAT32 * trained_shard
    accumulated = 0
    sent = 0
    # a block is scattered while the shards are kept
    if micro_batches > 1 and parallel.reduces_each_micro_batch:
        accumulated = shard_gradients
        sent = FLOAT32 * (block.trained + -(-block.trained // model.shards))
    elif micro_batches > 1:
        accumulated = FLOAT32 * own.trained
    # the next block is gathered during one
    prefetched = own.outside + min(2, size.blocks) * block.parameters
    gathered = element * (prefetched if parallel.reshards_after_forward else own.parameters)
    yield Memory(
        **begun,
        gradients=accumulated + element * block.trained,
        gathered=gathered,
        communication=sent,
    )
    if parallel.pp > 1:  # each stage's gradients are reduced after its last micro-batch
        sent = FLOAT32 * max(block.trained, own.outside_trained)
        yield Memory(
            **constant,
            gradients=accumulated + shard_gradients,
            gathered=gathered,
            communication=sent,
        )
        return
    # one module is reduced, in float32, while gradients of the next are computed; the root comes
    # last
    yield Memory(
        **ended,
        gradients=shard_gradients + element * (own.outside_trained + block.trained),
        gathered=element * (own.outside + block.parameters),
        communication=FLOAT32 * block.trained,
    )
    yield Memory(
        **constant,
        gradients=shard_gradients + element * own.outside_trained,
        gathered=element * own.outside,
        communication=FLOAT32 * own.outside_trained,
    )


def _kept_per_token(model: PlannedModel, rank: int, micro_batches: int) -> float:
    """Elements per token at the beginning of a backward pass: kept ones, and the workspace of one
    block.
    """
    size = model.size
    stages = model.stages(rank)
    kept_by = {
        None: size.block.activations_per_token,
        "selective": size.selective_per_token,
        "full": size.width,
    }
    per_block = kept_by[model.parallel.activation_checkpointing]
    passes = [1]
    if model.parallel.pp > 1:
        in_flight = kept_micro_batches(model.parallel, rank, micro_batches)
        passes = [-(-in_flight // 2), in_flight // 2] if len(stages) > 1 else [in_flight]
    kept = sum(number * stage.activations(per_block) for number, stage in zip(passes, stages))
    workspace = size.working_per_token + size.block.activations_per_token - per_block
    # the part after the blocks has freed its own activations by then
    freed = any(stage.last for stage in stages) * size.finish.activations_per_token
    return kept + max(workspace - freed, 0)


@dataclass(frozen=True)
class Traffic:
    """All collectives of one kind over one mesh axis, in one step of one process."""

    kind: Kind
    axis: str
    processes: int  # of the group
    in_a_node: int  # those on one node
    # bytes of the full tensors, before a reduce-scatter or after an all-gather
    payload_bytes: float
    calls: float

    @property
    def sent_bytes(self) -> float:
        if self.kind == "point to point":
            return self.payload_bytes
        share = (self.processes - 1) / self.processes
        return self.payload_bytes * share * (2 if self.kind == "all-reduce" else 1)

    @property
    def inter_node_bytes(self) -> float:
        """Bytes sent over this process's share of the node's network."""
        return self.sent_bytes / self.in_a_node if self.processes > self.in_a_node else 0.0

    @property
    def intra_node_bytes(self) -> float:
        return self.sent_bytes - self.inter_node_bytes


def link_bytes(traffic: Sequence[Traffic]) -> dict[str, float]:
    """Return the bytes that a process sends in a step over each kind of link: `intra_node` and
    `inter_node`.
    """
    return {
        link: sum(getattr(part, f"{link}_bytes") for part in traffic)
        for link in ("intra_node", "inter_node")
    }


def traffic_of(
    model: PlannedModel, rank: int, tokens: float, micro_batches: float
) -> list[Traffic]:
    """Return the traffic of pipeline rank `rank` in a step of `tokens` tokens, in all its
    micro-batches.
    """
    payloads: dict[tuple[Kind, str], float] = defaultdict(float)
    calls: dict[tuple[Kind, str], float] = defaultdict(float)
    for kind, axis, payload, times in _sent(model, rank, tokens, micro_batches):
        payloads[kind, axis] += payload
        calls[kind, axis] += times
    sizes = model.layout
    # processes of each axis, and the distance between them: tp is the innermost axis of the mesh
    axes = {
        "tp": (sizes.tp, 1),
        "dp_shard": (sizes.dp_shard, sizes.tp),
        "dp_replicate": (sizes.dp_replicate, sizes.tp * sizes.dp_shard),
        "pp": (sizes.pp, sizes.tp * sizes.dp),
    }
    traffic = []
    for (kind, axis), payload in payloads.items():
        processes, distance = axes[axis]
        if payload and processes > 1:
            in_a_node = min(processes, max(1, model.local_world // distance))
            traffic.append(Traffic(kind, axis, processes, in_a_node, payload, calls[kind, axis]))
    return traffic


def _sent(
    model: PlannedModel, rank: int, tokens: float, micro_batches: float
) -> Iterator[tuple[Kind, str, float, float]]:
    """Kind of collective, mesh axis, payload bytes and number of calls: data, tensor, then pipeline
    parallel.
    """
    size = model.size
    own = model.counts(rank)
    parallel = model.parallel
    n_bytes = model.element_bytes * tokens
    gradients = FLOAT32 * own.trained
    root = int(own.outside > 0)
    if model.is_sharded:
        # the root's weights are gathered once and kept for the backward pass; a pipeline keeps all
        # for a whole step
        passes = 2 if parallel.reshards_after_forward else 1
        gathered = own.outside + (own.parameters - own.outside) * passes
        times = 1 if parallel.pp > 1 else micro_batches
        yield (
            "all-gather",
            "dp_shard",
            model.element_bytes * gathered * times,
            (root + own.blocks * passes) * times,
        )
        times = micro_batches if parallel.reduces_each_micro_batch else 1
        yield "reduce-scatter", "dp_shard", gradients * times, (root + own.blocks) * times
        yield "all-reduce", "dp_replicate", gradients / model.layout.dp_shard, root + own.blocks
    else:
        yield "all-reduce", "dp_replicate", gradients, 1 + gradients // BUCKET_BYTES

    outside = own.first * size.begin.sums_per_token + own.last * size.finish.sums_per_token
    ends = (own.first and size.begin.sums_per_token > 0) + (
        own.last and size.finish.sums_per_token > 0
    )
    yield "all-reduce", "tp", n_bytes * outside, ends * micro_batches
    sums = size.block.sums_per_token
    recomputed = parallel.activation_checkpointing == "full"
    # recomputation stops at the last tensor that the backward pass needs, before the block's last
    # reduction
    payload = n_bytes * own.blocks * (2 * sums + (sums / 2 if recomputed else 0))
    kind: Kind = "reduce-scatter" if parallel.sequence_parallel else "all-reduce"
    yield kind, "tp", payload, own.blocks * (4 + recomputed) * micro_batches
    if parallel.sequence_parallel:  # gradients of the blocks' input, and the blocks' output
        ends = own.first + own.last
        elements = own.blocks * (2 + recomputed) * sums + size.width * model.layout.tp * ends
        yield (
            "all-gather",
            "tp",
            n_bytes * elements,
            (own.blocks * (4 + 2 * recomputed) + ends) * micro_batches,
        )

    # activations to the next stage, gradients to the previous one, and gradients of tied parameters
    stages, last = stages_of(rank, parallel), parallel.stages - 1
    neighbours = [
        other for stage in stages for other in (stage - 1, stage + 1) if 0 <= other <= last
    ]
    sent = sum(other not in stages for other in neighbours)
    yield "point to point", "pp", n_bytes * size.width * sent, sent * micro_batches
    if (0 in stages) != (last in stages):
        yield "point to point", "pp", FLOAT32 * size.tied.parameters / model.shards, 1
