"""Bytes that training takes on each process, part by part: arithmetic, before any device is asked for. Torch-free.

Weights, gradients and AdamW's two moments are float32 in both precisions, as they are kept. What lives for the
length of a block only is counted where it piles up. What the framework itself takes (about 1 GB with CUDA and NCCL)
is what `plan.memory_frac` leaves free.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from cellmill.config.family import ModelSize
from cellmill.config.layout import Layout
from cellmill.config.run import Parallel

FLOAT32 = 4
ACTIVATION = {"32-true": 4.0, "bf16-mixed": 2.0, "16-mixed": 2.0}
"""Bytes of an element kept for the backward pass."""
AUTOCAST_ACTIVATION = 2.5  # the residual stream and what enters the norms stay float32: 2.3 measured, on a CPU


@dataclass(frozen=True)
class Memory:
    """Bytes on one process, at the moment it needs most."""

    parameters: int
    """This process's share of the weights."""
    gradients: int
    """Its share of the gradients, and whole ones where micro-batches are accumulated before they are reduced."""
    optimizer: int
    """Both moments of AdamW."""
    gathered: int
    """Whole weights put together for a forward or backward pass, or cast to 16 bits."""
    communication: int
    """Gradients on their way to other processes."""
    activations: int
    """Kept from the forward pass for the backward pass."""
    logits: int
    """Predictions and their gradient."""

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


def memory_per_rank(
    size: ModelSize, parallel: Parallel, layout: Layout, micro_tokens: int, micro_batches: int
) -> Memory:
    """What one process of `layout` needs.

    Parameters
    ----------
    size
        Of what one tensor-parallel process holds.
    micro_tokens
        Tokens of the largest micro-batch.
    micro_batches
        Most micro-batches of one optimizer step.
    """
    whole, low = size.parameters, parallel.low
    kept = {
        None: size.activations_per_token,
        "selective": size.activations_per_token_selective,
        "full": size.activations_per_token_checkpointed,
    }[parallel.activation_checkpointing]
    sharded = layout.dp > 1 and (parallel.strategy == "fsdp" or layout.tp > 1)  # as parallel.wrap has it
    if sharded:
        share, gradients, gathered, communication = _fsdp(size, parallel, layout, micro_batches)
        element = ACTIVATION[parallel.precision]
    else:
        share, gradients = whole, FLOAT32 * whole
        gathered = 2 * whole if low else 0  # autocast keeps the weights it casts until the backward pass
        communication = 0  # DistributedDataParallel's buckets are the gradients themselves
        element = AUTOCAST_ACTIVATION if low else ACTIVATION["32-true"]
    on_host = parallel.cpu_offload
    return Memory(
        parameters=0 if on_host == "full" else FLOAT32 * share,
        gradients=gradients - FLOAT32 * share if on_host == "full" else gradients,
        optimizer=0 if on_host else 2 * FLOAT32 * share,
        gathered=gathered,
        communication=communication,
        activations=round(element * kept * micro_tokens),
        logits=round(2 * FLOAT32 * size.logits_per_token * micro_tokens),
    )


def host_bytes_per_rank(size: ModelSize, parallel: Parallel, layout: Layout) -> int:
    """Pinned memory of the host that one process takes for `parallel.cpu_offload`: weights, gradients, two moments.

    Of "optimizer" the first two are copies. Where the device is the CPU there are none, and nothing is spared.
    """
    return 0 if parallel.cpu_offload is None else 4 * FLOAT32 * -(-size.parameters // layout.dp_shard)


def _fsdp(size: ModelSize, parallel: Parallel, layout: Layout, micro_batches: int) -> tuple[int, int, int, int]:
    """Parameters of a share, then bytes of gradients, of gathered weights, and of gradients being reduced."""
    whole, block = size.parameters, size.block_parameters
    outside = whole - size.blocks * block
    share = -(-whole // layout.dp_shard)
    gradients = FLOAT32 * share
    if micro_batches > 1:
        gradients += FLOAT32 * whole  # reduced with the last micro-batch only
    element = 2 if parallel.low else FLOAT32
    # the root's weights stay for the backward pass; a block's go, but the next is fetched while one computes
    reshards = parallel.strategy == "fsdp" and parallel.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD")
    gathered = outside + min(2, size.blocks) * block if reshards else whole
    # one piece is reduced, in float32, while the gradients of the next are made
    in_flight = (element + FLOAT32) * (max(outside, block) + block)
    return share, gradients, element * gathered, in_flight
