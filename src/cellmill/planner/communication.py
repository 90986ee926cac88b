"""Bytes that a process sends in an optimizer step, by collective and by link.

Collectives are counted as rings: each of n processes sends (n - 1) / n of the tensor in an all-gather or
reduce-scatter, and twice that in an all-reduce. If a ring has k processes on a node, one of its k hops leaves the node,
and rings take turns over the node's network cards: each process sends 1 / k of its bytes over its card. Reductions of a
few numbers (targets, norms, signals) are left out. A test compares these numbers with what torch sends.

Source: ZeRO, Rajbhandari et al. 2020, section 7; sequence parallelism, Korthikanti et al. 2022, section 4.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from cellmill.parallel.stage_assignment import stages_of
from cellmill.planner.planned_model import PlannedModel
from cellmill.planner.size import FLOAT32

BUCKET_BYTES = 25 << 20  # default of DistributedDataParallel

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "point to point"]
Sent = Iterator[tuple[Kind, str, float, float]]  # kind of collective, mesh axis, payload bytes, number of calls


@dataclass(frozen=True)
class Traffic:
    """All collectives of one kind over one mesh axis, in one step of one process."""

    kind: Kind
    axis: str
    processes: int  # of the group
    in_a_node: int  # those on one node
    payload_bytes: float  # bytes of the full tensors, before a reduce-scatter or after an all-gather
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
        """Bytes sent to processes of the same node."""
        return self.sent_bytes - self.inter_node_bytes


def link_bytes(traffic: Sequence[Traffic]) -> dict[str, float]:
    """Return the bytes that a process sends in a step over each kind of link."""
    return {
        "intra_node": sum(part.intra_node_bytes for part in traffic),
        "inter_node": sum(part.inter_node_bytes for part in traffic),
    }


def peak_traffic(model: PlannedModel, tokens: float, micro_batches: float) -> list[Traffic]:
    """Return the traffic of the pipeline rank that sends the most; without a pipeline all ranks send the same."""
    ranks = (traffic_of(model, rank, tokens, micro_batches) for rank in range(model.layout.pp))
    return max(ranks, key=lambda traffic: sum(part.sent_bytes for part in traffic))


def traffic_of(model: PlannedModel, rank: int, tokens: float, micro_batches: float) -> list[Traffic]:
    """Return the traffic of pipeline rank `rank` in a step of `tokens` tokens, in all its micro-batches."""
    totals: dict[tuple[Kind, str], tuple[float, float]] = {}
    for sent in (_data_parallel, _tensor_parallel, _pipeline):
        for kind, axis, payload, calls in sent(model, rank, tokens, micro_batches):
            before = totals.get((kind, axis), (0.0, 0.0))
            totals[kind, axis] = (before[0] + payload, before[1] + calls)
    sizes = model.layout
    # processes of each axis, and the distance between them: tp is the innermost axis of the mesh
    axes = {
        "tp": (sizes.tp, 1),
        "dp_shard": (sizes.dp_shard, sizes.tp),
        "dp_replicate": (sizes.dp_replicate, sizes.tp * sizes.dp_shard),
        "pp": (sizes.pp, sizes.tp * sizes.dp),
    }
    return [
        Traffic(kind, axis, processes, min(processes, max(1, model.local_world // distance)), payload, calls)
        for (kind, axis), (payload, calls) in totals.items()
        for processes, distance in [axes[axis]]
        if payload and processes > 1
    ]


def _data_parallel(model: PlannedModel, rank: int, tokens: float, micro_batches: float) -> Sent:
    """Weights and gradients between ranks that read different cells."""
    own, parallel = model.counts(rank), model.parallel
    gradients = FLOAT32 * own.trained
    if not model.is_sharded:
        yield "all-reduce", "dp_replicate", gradients, 1 + gradients // BUCKET_BYTES
        return
    # the root's weights are gathered once and kept for the backward pass; a pipeline keeps all for its micro-batches
    passes = 2 if parallel.reshards_after_forward else 1
    gathered = own.outside + (own.parameters - own.outside) * passes
    times = 1 if parallel.pp > 1 else micro_batches
    root = int(own.outside > 0)
    yield "all-gather", "dp_shard", model.element_bytes * gathered * times, (root + own.blocks * passes) * times
    times = micro_batches if parallel.reduces_each_micro_batch else 1
    yield "reduce-scatter", "dp_shard", gradients * times, (root + own.blocks) * times
    yield "all-reduce", "dp_replicate", gradients / model.layout.dp_shard, root + own.blocks


def _tensor_parallel(model: PlannedModel, rank: int, tokens: float, micro_batches: float) -> Sent:
    """Activations between ranks that share the matrices."""
    size, own, n_bytes = model.size, model.counts(rank), model.element_bytes * tokens
    outside = own.first * size.begin.sums_per_token + own.last * size.finish.sums_per_token
    ends = (own.first and size.begin.sums_per_token > 0) + (own.last and size.finish.sums_per_token > 0)
    yield "all-reduce", "tp", n_bytes * outside, ends * micro_batches
    sums = size.block.sums_per_token
    recomputed = model.parallel.activation_checkpointing == "full"
    # recomputation stops at the last tensor that the backward pass needs, before the block's last reduction
    payload = n_bytes * own.blocks * (2 * sums + (sums / 2 if recomputed else 0))
    calls = own.blocks * (4 + recomputed) * micro_batches
    if not model.parallel.sequence_parallel:
        yield "all-reduce", "tp", payload, calls
        return
    yield "reduce-scatter", "tp", payload, calls
    # gradients of the blocks' input, and the blocks' output
    ends = own.first + own.last
    gathered = own.blocks * (2 + recomputed) * sums + size.width * model.layout.tp * ends
    yield "all-gather", "tp", n_bytes * gathered, (own.blocks * (4 + 2 * recomputed) + ends) * micro_batches


def _pipeline(model: PlannedModel, rank: int, tokens: float, micro_batches: float) -> Sent:
    """Activations to the next stage, gradients to the previous one, and gradients of tied parameters."""
    own, last = stages_of(rank, model.parallel), model.parallel.stages - 1
    neighbours = [other for stage in own for other in (stage - 1, stage + 1) if 0 <= other <= last]
    sent = sum(other not in own for other in neighbours)
    yield "point to point", "pp", model.element_bytes * tokens * model.size.width * sent, sent * micro_batches
    if (0 in own) != (last in own):
        yield "point to point", "pp", FLOAT32 * model.size.tied.parameters / model.shards, 1
