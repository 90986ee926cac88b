"""Planned memory of a training process, part by part.

Weights, gradients and AdamW's two moments are kept in float32 in every precision. A step peaks either when its
backward pass begins, with all activations, or when it ends, with all gradients; the larger one counts. The framework's
own memory (about 1 GB with CUDA and NCCL) belongs to the fraction that `plan.memory_frac` leaves free.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from cellmill.planner.planned_model import PlannedModel, kept_micro_batches
from cellmill.planner.size import FLOAT32

AUTOCAST_ACTIVATION = 2.5  # bytes: the residual stream and inputs of norms stay float32; 2.3 measured, on a CPU


@dataclass(frozen=True)
class Memory:
    """Peak bytes of one process."""

    parameters: int = 0  # this rank's shard, and all buffers
    gradients: int = 0  # this rank's shard, those accumulated over micro-batches, and those being computed
    optimizer: int = 0  # both moments of AdamW
    average: int = 0  # of the trained weights, with train.ema_decay
    gathered: int = 0  # full weights gathered for a forward or backward pass, or cast to 16 bits
    communication: int = 0  # gradients in a reduce-scatter
    pipeline: int = 0  # receive buffers of a pipeline for all micro-batches of a step
    activations: int = 0  # kept for the backward pass, and the workspace of one block's backward pass
    logits: int = 0  # logits and their gradient, and the table's gradient of a chunked loss

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


def host_bytes(model: PlannedModel) -> int:
    """Pinned host memory of one process for `parallel.cpu_offload`: weights, gradients, two moments and an average.

    With "optimizer" the first two are copies, and an average is on the device. On a CPU device nothing is offloaded.
    """
    if model.parallel.cpu_offload is None:
        return 0
    copies = 3 + (model.keeps_average and model.parallel.cpu_offload == "full")
    elements = max(own.parameters + copies * own.trained for own in map(model.counts, range(model.layout.pp)))
    return FLOAT32 * -(-elements // model.shards)


def staging_bytes(model: PlannedModel) -> int:
    """Host memory of one process, pinned beside a GPU, for the copy of a checkpoint: weights, two moments, average."""
    copies = 2 + model.keeps_average
    elements = max(own.parameters + copies * own.trained for own in map(model.counts, range(model.layout.pp)))
    return FLOAT32 * -(-elements // model.shards)


def peak_memory(model: PlannedModel, micro_tokens: int, micro_batches: int) -> Memory:
    """Return the memory of the rank that needs the most.

    A step has at most `micro_batches` micro-batches, the largest of `micro_tokens` tokens.
    """
    ranks = (memory_of(model, rank, micro_tokens, micro_batches) for rank in range(model.layout.pp))
    return max(ranks, key=lambda memory: memory.total)


def memory_of(model: PlannedModel, rank: int, micro_tokens: int, micro_batches: int) -> Memory:
    """Return the memory of pipeline rank `rank`; 0 without a pipeline."""
    return max(_moments(model, rank, micro_tokens, micro_batches), key=lambda memory: memory.total)


def _moments(model: PlannedModel, rank: int, tokens: int, micro_batches: int) -> Iterator[Memory]:
    """Memory at the beginning and at the end of the backward pass."""
    size, parallel, own = model.size, model.parallel, model.counts(rank)
    block, element, offload = size.block, model.element_bytes, parallel.cpu_offload
    trained_shard = -(-own.trained // model.shards)
    received = (2 * len(model.stages(rank)) - own.first - own.last) * micro_batches * size.width * tokens
    constant = {
        "parameters": FLOAT32 * (size.buffers + (0 if offload == "full" else -(-own.parameters // model.shards))),
        "optimizer": 0 if offload else 2 * FLOAT32 * trained_shard,
        "average": FLOAT32 * trained_shard if model.keeps_average and offload != "full" else 0,
        "pipeline": round(element * received) if parallel.pp > 1 else 0,
    }
    activation = AUTOCAST_ACTIVATION if parallel.half_precision and not model.is_sharded else element
    first_blocks = block.activations_per_token + size.begin.activations_per_token + size.working_per_token
    begun = constant | {
        "activations": round(activation * _kept_per_token(model, rank, micro_batches) * tokens),
        "logits": round(FLOAT32 * size.workspace_of(tokens)) if own.last else 0,  # float32 in every precision
    }
    ended = constant | {"activations": round(activation * first_blocks * tokens)}
    if not model.is_sharded:
        gathered = 2 * own.parameters if parallel.half_precision else 0  # autocast keeps its casts until the backward
        # DistributedDataParallel's buckets persist and are sent themselves; accumulated gradients are beside them
        copies = (model.layout.dp > 1) + (micro_batches > 1)
        yield Memory(**begun, gradients=FLOAT32 * (copies * own.trained or block.trained), gathered=gathered)
        if parallel.pp == 1:
            yield Memory(**ended, gradients=FLOAT32 * own.trained, gathered=gathered)
        return
    shard_gradients = 0 if offload == "full" else FLOAT32 * trained_shard
    accumulated, sent = 0, 0
    if micro_batches > 1 and parallel.reduces_each_micro_batch:  # a block is scattered while the shards are kept
        accumulated, sent = shard_gradients, FLOAT32 * (block.trained + -(-block.trained // model.shards))
    elif micro_batches > 1:
        accumulated = FLOAT32 * own.trained
    prefetched = own.outside + min(2, size.blocks) * block.parameters  # the next block is gathered during one
    gathered = element * (prefetched if parallel.reshards_after_forward else own.parameters)
    yield Memory(**begun, gradients=accumulated + element * block.trained, gathered=gathered, communication=sent)
    if parallel.pp > 1:  # each stage's gradients are reduced after its last micro-batch
        sent = FLOAT32 * max(block.trained, own.outside_trained)
        yield Memory(**constant, gradients=accumulated + shard_gradients, gathered=gathered, communication=sent)
        return
    # one module is reduced, in float32, while gradients of the next are computed; the root comes last
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
    """Elements per token at the beginning of a backward pass: kept ones, and the workspace of one block."""
    size, stages = model.size, model.stages(rank)
    per_block = {
        None: size.block.activations_per_token,
        "selective": size.selective_per_token,
        "full": size.width,
    }[model.parallel.activation_checkpointing]
    passes = [1]
    if model.parallel.pp > 1:
        in_flight = kept_micro_batches(model.parallel, rank, micro_batches)
        passes = [-(-in_flight // 2), in_flight // 2] if len(stages) > 1 else [in_flight]
    kept = sum(number * stage.activations(per_block) for number, stage in zip(passes, stages))
    workspace = size.working_per_token + size.block.activations_per_token - per_block
    # the part after the blocks has freed its own activations by then
    freed = any(stage.last for stage in stages) * size.finish.activations_per_token
    return kept + max(workspace - freed, 0)
