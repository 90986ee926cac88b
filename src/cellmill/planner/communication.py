"""Bytes that a process sends in an optimizer step, by collective and by link: arithmetic. Torch-free.

Collectives are counted as rings: of n processes each sends (n - 1) / n of the tensor for an all-gather or a
reduce-scatter, and twice that for an all-reduce. Where a ring leaves a node that has k of its processes, one hop of k
does, and rings take turns over the node's network cards: each process sends 1 / k of its bytes over its card.
Sums of a few numbers (targets, norms, signals) are left out. A test counts what torch sends.

Source: ZeRO, Rajbhandari et al. 2020, section 7; sequence parallel, Korthikanti et al. 2022, section 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from cellmill.config.parallel import Layout, Parallel
from cellmill.parallel.stage_assignment import stages_of
from cellmill.planner.memory import ELEMENT, FLOAT32, is_sharded
from cellmill.planner.size import ModelSize
from cellmill.planner.stage_share import shares_of

BUCKET_BYTES = 25 << 20  # DistributedDataParallel's own choice

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "point to point"]


@dataclass(frozen=True)
class Traffic:
    """All collectives of one kind over one axis of the mesh, in a step of one process."""

    kind: Kind
    axis: str
    processes: int
    """That take part."""
    in_a_node: int
    """Of these, those of one node."""
    payload_bytes: float
    """Of the whole tensors, before an all-gather's or after a reduce-scatter's cut."""
    calls: float
    """How many collectives these are."""

    @property
    def sent_bytes(self) -> float:
        """What this process sends."""
        if self.kind == "point to point":
            return self.payload_bytes
        share = (self.processes - 1) / self.processes
        return self.payload_bytes * share * (2 if self.kind == "all-reduce" else 1)

    @property
    def inter_node_bytes(self) -> float:
        """Of what it sends, over its share of the node's network."""
        return self.sent_bytes / self.in_a_node if self.processes > self.in_a_node else 0.0

    @property
    def intra_node_bytes(self) -> float:
        """Of what it sends, to processes of its node."""
        return self.sent_bytes - self.inter_node_bytes


def traffic_per_rank(
    size: ModelSize,
    parallel: Parallel,
    layout: Layout,
    local_world: int,
    tokens: float,
    micro_batches: float,
) -> list[Traffic]:
    """A step's, of that process of a pipeline that sends most; without one all send alike.

    Parameters
    ----------
    size
        Of what one tensor-parallel process holds.
    local_world
        Processes of a node.
    tokens
        Of the step's share that one process takes, over all its micro-batches.
    """
    ranks = (traffic_of(rank, size, parallel, layout, local_world, tokens, micro_batches) for rank in range(layout.pp))
    return max(ranks, key=lambda traffic: sum(part.sent_bytes for part in traffic))


def traffic_of(
    rank: int,
    size: ModelSize,
    parallel: Parallel,
    layout: Layout,
    local_world: int,
    tokens: float,
    micro_batches: float,
) -> list[Traffic]:
    """The same of process `rank` of a pipeline."""
    payloads: dict[tuple[Kind, str], float] = {}
    calls: dict[tuple[Kind, str], float] = {}
    for kind, axis, payload, number in (
        *_of_data(rank, size, parallel, layout, micro_batches),
        *_of_tensors(rank, size, parallel, tokens, micro_batches),
        *_of_pipeline(rank, size, parallel, layout, tokens, micro_batches),
    ):
        payloads[kind, axis] = payloads.get((kind, axis), 0.0) + payload
        calls[kind, axis] = calls.get((kind, axis), 0.0) + number
    # of each axis its processes, and how far apart they are: tp is the innermost of the mesh
    axes = {
        "tp": (layout.tp, 1),
        "dp_shard": (layout.dp_shard, layout.tp),
        "dp_replicate": (layout.dp_replicate, layout.tp * layout.dp_shard),
        "pp": (layout.pp, layout.tp * layout.dp),
    }
    return [
        Traffic(
            kind,
            axis,
            processes=axes[axis][0],
            in_a_node=min(axes[axis][0], max(1, local_world // axes[axis][1])),
            payload_bytes=payload,
            calls=calls[kind, axis],
        )
        for (kind, axis), payload in payloads.items()
        if payload and axes[axis][0] > 1
    ]


def _of_data(
    rank: int, size: ModelSize, parallel: Parallel, layout: Layout, micro_batches: float
) -> Iterator[tuple[Kind, str, float, float]]:
    """Weights and gradients between those that read different cells."""
    stages = shares_of(rank, parallel, size.blocks)
    whole = sum(stage.parameters(size) for stage in stages)
    outside = sum(stage.outside(size) for stage in stages)
    trained = sum(stage.trained(size) for stage in stages)
    if not is_sharded(parallel, layout):
        yield "all-reduce", "dp_replicate", FLOAT32 * trained, 1 + FLOAT32 * trained // BUCKET_BYTES
        return
    # the root's weights are gathered once and kept for the backward pass; a pipeline keeps all for its micro-batches
    passes = 2 if parallel.reshards_after_forward else 1
    gathered = outside + (whole - outside) * passes
    times = 1 if parallel.pp > 1 else micro_batches
    blocks, root = sum(stage.blocks for stage in stages), int(outside > 0)
    yield "all-gather", "dp_shard", ELEMENT[parallel.precision] * gathered * times, (root + blocks * passes) * times
    yield "reduce-scatter", "dp_shard", FLOAT32 * trained, root + blocks  # with the last micro-batch alone
    yield "all-reduce", "dp_replicate", FLOAT32 * trained / layout.dp_shard, root + blocks


def _of_tensors(
    rank: int, size: ModelSize, parallel: Parallel, tokens: float, micro_batches: float
) -> Iterator[tuple[Kind, str, float, float]]:
    """Activations between those that share the matrices."""
    stages = shares_of(rank, parallel, size.blocks)
    element = ELEMENT[parallel.precision]
    blocks = sum(stage.blocks for stage in stages)
    first, last = any(stage.first for stage in stages), any(stage.last for stage in stages)
    outside = first * size.begin.sums_per_token + last * size.finish.sums_per_token
    ends = (first and size.begin.sums_per_token > 0) + (last and size.finish.sums_per_token > 0)
    yield "all-reduce", "tp", element * tokens * outside, ends * micro_batches
    sums = size.block.sums_per_token
    recomputed = parallel.activation_checkpointing == "full"
    # recomputing ends with the last thing that is wanted, before the block's last sum
    again = sums / 2 if recomputed else 0
    if not parallel.sequence_parallel:
        yield (
            "all-reduce",
            "tp",
            element * tokens * blocks * (2 * sums + again),
            blocks * (4 + recomputed) * micro_batches,
        )
        return
    yield (
        "reduce-scatter",
        "tp",
        element * tokens * blocks * (2 * sums + again),
        blocks * (4 + recomputed) * micro_batches,
    )
    # gradients of what entered the blocks, and what leaves them
    gathered = blocks * (2 + recomputed) * sums + size.width * parallel.tp * (first + last)
    yield (
        "all-gather",
        "tp",
        element * tokens * gathered,
        (blocks * (4 + 2 * recomputed) + first + last) * micro_batches,
    )


def _of_pipeline(
    rank: int, size: ModelSize, parallel: Parallel, layout: Layout, tokens: float, micro_batches: float
) -> Iterator[tuple[Kind, str, float, float]]:
    """Activations to the next stage, their gradients to the one before, and what the ends have in common."""
    own = stages_of(rank, parallel)
    neighbours = [other for stage in own for other in (stage - 1, stage + 1) if 0 <= other < parallel.stages]
    sent = sum(other not in own for other in neighbours)
    yield "point to point", "pp", ELEMENT[parallel.precision] * tokens * size.width * sent, sent * micro_batches
    if (0 in own) != (parallel.stages - 1 in own):
        share = layout.dp_shard if is_sharded(parallel, layout) else 1
        yield "point to point", "pp", FLOAT32 * size.tied.parameters / share, 1
