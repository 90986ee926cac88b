"""Bytes that training takes on each process, part by part: arithmetic, before any device is asked for. Torch-free.

Weights, gradients and AdamW's two moments are float32 in both precisions, as they are kept. A step needs most either
when its backward pass begins, with all activations, or when it ends, with all gradients; the larger counts. What the
framework itself takes (about 1 GB with CUDA and NCCL) is what `plan.memory_frac` leaves free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from cellmill.config.parallel import Layout, Parallel
from cellmill.planner.bubble import kept_micro_batches
from cellmill.planner.size import ModelSize
from cellmill.planner.stage_share import Share, shares_of

FLOAT32 = 4
ELEMENT = {"32-true": 4, "bf16-mixed": 2, "16-mixed": 2}
"""Bytes of an element in forward and backward, and of one kept for the backward pass."""
AUTOCAST_ACTIVATION = 2.5  # the residual stream and what enters the norms stay float32: 2.3 measured, on a CPU


@dataclass(frozen=True)
class Memory:
    """Bytes on one process, at the moment it needs most."""

    parameters: int
    """This process's share of the weights."""
    gradients: int
    """Its share of the gradients, whole ones where micro-batches are accumulated, and those being made."""
    optimizer: int
    """Both moments of AdamW."""
    gathered: int
    """Buffers of whole weights put together for a forward or backward pass, or cast to 16 bits."""
    communication: int
    """Buffers of gradients on their way to other processes."""
    pipeline: int
    """Buffers into which a pipeline receives the micro-batches of a step."""
    activations: int
    """Kept from the forward pass for the backward pass, and what that makes of them."""
    logits: int
    """Predictions and their gradient, and of a chunked loss what it has of the table's."""

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


def is_sharded(parallel: Parallel, layout: Layout) -> bool:
    """Whether FSDP2 wraps the model: `parallel.fsdp` leaves a single process alone, and uses it for ddp's products."""
    return layout.dp > 1 and (parallel.strategy == "fsdp" or layout.tp * layout.pp > 1)


def kept_in_a_block(size: ModelSize, parallel: Parallel) -> float:
    """Elements a token that each block keeps between the passes."""
    return {
        None: size.block.activations_per_token,
        "selective": size.selective_per_token,
        "full": size.width,
    }[parallel.activation_checkpointing]


def host_bytes_per_rank(size: ModelSize, parallel: Parallel, layout: Layout) -> int:
    """Pinned memory of the host that one process takes for `parallel.cpu_offload`: weights, gradients, two moments.

    Of "optimizer" the first two are copies. Where the device is the CPU there are none, and nothing is spared.
    """
    if parallel.cpu_offload is None:
        return 0
    stages = (shares_of(rank, parallel, size.blocks) for rank in range(layout.pp))
    most = max(sum(stage.parameters(size) + 3 * stage.trained(size) for stage in of_rank) for of_rank in stages)
    return FLOAT32 * (-(-most // layout.dp_shard) if is_sharded(parallel, layout) else most)


def memory_per_rank(
    size: ModelSize, parallel: Parallel, layout: Layout, micro_tokens: int, micro_batches: int
) -> Memory:
    """What the process of `layout` that needs most needs.

    Parameters
    ----------
    size
        Of what one tensor-parallel process holds.
    micro_tokens
        Tokens of the largest micro-batch.
    micro_batches
        Most micro-batches of one optimizer step.
    """
    ranks = (memory_of(rank, size, parallel, layout, micro_tokens, micro_batches) for rank in range(layout.pp))
    return max(ranks, key=lambda memory: memory.total)


def memory_of(
    rank: int, size: ModelSize, parallel: Parallel, layout: Layout, micro_tokens: int, micro_batches: int
) -> Memory:
    """The same of process `rank` of a pipeline; 0 without one."""
    stages = shares_of(rank, parallel, size.blocks)
    moments = _moments(rank, stages, size, parallel, layout, micro_tokens, micro_batches)
    return max(moments, key=lambda memory: memory.total)


def _logits(size: ModelSize, tokens: int) -> int:
    """Logits and their gradients, in chunks where the loss makes them so; float32 in every precision."""
    return round(FLOAT32 * size.workspace_of(tokens))


def _moments(
    rank: int,
    stages: list[Share],
    size: ModelSize,
    parallel: Parallel,
    layout: Layout,
    tokens: int,
    micro_batches: int,
) -> Iterator[Memory]:
    """The backward pass as it begins, and in its last block."""
    low, sharded = parallel.low, is_sharded(parallel, layout)
    element = ELEMENT[parallel.precision]
    whole, trained = (sum(count) for count in zip(*((s.parameters(size), s.trained(size)) for s in stages)))
    outside = sum(stage.outside(size) for stage in stages)
    outside_trained = sum(stage.outside_trained(size) for stage in stages)
    block, block_trained = size.block.parameters, size.block.trained
    share, trained_share = (-(-count // layout.dp_shard) if sharded else count for count in (whole, trained))
    on_host = parallel.cpu_offload
    own_gradients = 0 if on_host == "full" else FLOAT32 * trained_share
    of_block = kept_in_a_block(size, parallel)
    activation = AUTOCAST_ACTIVATION if low and not sharded else element
    # one block's backward pass beside what is kept
    working = size.working_per_token + size.block.activations_per_token - of_block
    passes = [1]
    if parallel.pp > 1:
        kept = kept_micro_batches(parallel, rank, micro_batches)
        passes = [-(-kept // 2), kept // 2] if len(stages) > 1 else [kept]
    held = sum(number * stage.activations(size, of_block) for number, stage in zip(passes, stages))
    # what follows the blocks has let go of its own by then
    held += max(working - any(stage.last for stage in stages) * size.finish.activations_per_token, 0)
    logits = _logits(size, tokens) if any(stage.last for stage in stages) else 0
    received = sum((not stage.first) + (not stage.last) for stage in stages) * micro_batches * size.width * tokens
    lasting = {
        "parameters": FLOAT32 * (size.buffers + (0 if on_host == "full" else share)),
        "optimizer": 0 if on_host else 2 * FLOAT32 * trained_share,
        "pipeline": element * received if parallel.pp > 1 else 0,
    }
    begun = {
        **lasting,
        "activations": round(activation * held * tokens),
        "logits": logits,
    }
    if not sharded:
        gathered = 2 * whole if low else 0  # autocast keeps the weights it casts until the backward pass
        # DistributedDataParallel's buckets stay, and are what is sent; what is accumulated lies beside them
        copies = (layout.dp > 1) + (micro_batches > 1)
        before = FLOAT32 * (copies * trained or block_trained)
        yield Memory(**begun, gradients=before, gathered=gathered, communication=0)
        if parallel.pp == 1:
            left = size.block.activations_per_token + size.begin.activations_per_token + size.working_per_token
            ended = lasting | {"activations": round(activation * left * tokens), "logits": 0}
            yield Memory(**ended, gradients=FLOAT32 * trained, gathered=gathered, communication=0)
        return
    accumulated = FLOAT32 * trained if micro_batches > 1 else 0  # reduced with the last micro-batch only
    several = outside + min(2, size.blocks) * block  # the next is fetched while one computes
    gathered = element * (several if parallel.reshards_after_forward else whole)
    yield Memory(**begun, gradients=accumulated + element * block_trained, gathered=gathered, communication=0)
    if parallel.pp > 1:
        # each stage's gradients are reduced when its last micro-batch is through
        yield Memory(
            **lasting,
            activations=0,
            logits=0,
            gradients=accumulated + own_gradients,
            gathered=gathered,
            communication=FLOAT32 * max(block_trained, outside_trained),
        )
        return
    left = size.block.activations_per_token + size.begin.activations_per_token + size.working_per_token
    ended = lasting | {"activations": round(activation * left * tokens), "logits": 0}
    # one piece is reduced, in float32, while the gradients of the next are made; the root's come last
    yield Memory(
        **ended,
        gradients=own_gradients + element * (outside_trained + block_trained),
        gathered=element * (outside + block),
        communication=FLOAT32 * block_trained,
    )
    yield Memory(
        **(ended | {"activations": 0}),
        gradients=own_gradients + element * outside_trained,
        gathered=element * outside,
        communication=FLOAT32 * outside_trained,
    )
