"""Bytes that a training process sends per step, by collective and mesh axis.

Collectives are counted as rings. Each of n processes sends (n - 1) / n of the tensor in an
all-gather or reduce-scatter, and twice that in an all-reduce. If a ring has k processes on a node,
one of its k hops leaves the node, and rings take turns over the node's network cards: each process
sends 1 / k of its bytes over its card. A message of a pipeline is sent over the card of its own
process, or inside the node. Reductions of a few numbers (targets, norms, signals) are
left out.

Sources: ZeRO, Rajbhandari et al. 2020, section 7; sequence parallelism, Korthikanti et al. 2022,
section 4.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np

from cellmill.parallel.mesh import list_stages
from cellmill.planner.measure.passes import FLOAT32_BYTES
from cellmill.planner.planned_model import PlannedModel, RankTotals

BUCKET_BYTES = 25 << 20  # default of DistributedDataParallel
Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "point to point"]


@dataclass(frozen=True)
class Traffic:
    """All collectives of one kind over one mesh axis, in one step of one process."""

    kind: Kind
    axis: str
    processes: int  # processes of the group
    # processes of the group on one node; for point to point 1 between nodes, or all in a node
    processes_per_node: int
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
        """Bytes sent to other nodes, over this process's share of its node's network cards."""
        is_on_one_node = self.processes <= self.processes_per_node
        return 0.0 if is_on_one_node else self.sent_bytes / self.processes_per_node

    @property
    def intra_node_bytes(self) -> float:
        return self.sent_bytes - self.inter_node_bytes


@dataclass(frozen=True, order=True)
class LinkBytes:
    """Bytes that a process sends in a step, by kind of link; the slower kind comes first."""

    inter_node: float
    intra_node: float


def sum_link_bytes(traffic: Sequence[Traffic]) -> LinkBytes:
    return LinkBytes(
        inter_node=sum(part.inter_node_bytes for part in traffic),
        intra_node=sum(part.intra_node_bytes for part in traffic),
    )


class CollectiveCalls(NamedTuple):
    """Calls of one collective in one part of a step; `Traffic` is the sum over all parts."""

    kind: Kind
    axis: str  # mesh axis
    payload_bytes: float  # bytes of the full tensors
    calls: float
    leaves_node: bool = False  # for point to point: the receiver is on another node


def list_traffic(
    model: PlannedModel, pp_rank: int, tokens: float, micro_batches: float
) -> list[Traffic]:
    """Sum the calls of pipeline rank `pp_rank` in a step of `tokens` tokens, in all micro-batches."""
    totals = model.sum_rank_totals(pp_rank)
    # (bytes of the full tensors, calls)
    sums = defaultdict[tuple[Kind, str, bool], np.ndarray](lambda: np.zeros(2))
    for part in chain(
        _list_data_parallel(model, totals, micro_batches),
        _list_tensor_parallel(model, totals, tokens, micro_batches),
        _list_pipeline(model, pp_rank, tokens, micro_batches),
    ):
        sums[part.kind, part.axis, part.leaves_node] += (part.payload_bytes, part.calls)
    layout = model.layout
    # neighbours on an axis are this many processes apart: tp is the innermost axis of the mesh
    distances = {
        "tp": 1,
        "dp_shard": layout.tp,
        "dp_replicate": layout.tp * layout.dp_shard,
        "pp": layout.tp * layout.dp,
    }
    traffic = []
    for (kind, axis, leaves_node), (payload, n_calls) in sums.items():
        processes = getattr(layout, axis)
        processes_per_node = min(processes, max(1, model.nproc_per_node // distances[axis]))
        if kind == "point to point":
            processes_per_node = 1 if leaves_node else processes
        if payload and processes > 1:
            traffic.append(Traffic(kind, axis, processes, processes_per_node, payload, n_calls))
    return traffic


def _list_data_parallel(
    model: PlannedModel, totals: RankTotals, micro_batches: float
) -> Iterator[CollectiveCalls]:
    """Yield calls that gather weights, and calls that reduce gradients."""
    parallel = model.parallel
    gradient_bytes = FLOAT32_BYTES * totals.trained
    if not model.is_sharded:
        yield CollectiveCalls(
            "all-reduce", "dp_replicate", gradient_bytes, 1 + gradient_bytes // BUCKET_BYTES
        )
        return
    root = int(totals.outside > 0)
    modules = root + totals.n_blocks
    # the root's weights are gathered once and kept for the backward pass; a pipeline keeps all for
    # a whole step
    gathers_per_micro_batch = 2 if parallel.reshards_after_forward else 1
    weights = totals.outside + (totals.parameters - totals.outside) * gathers_per_micro_batch
    gathered_modules = root + totals.n_blocks * gathers_per_micro_batch
    repetitions = 1 if parallel.pp > 1 else micro_batches
    gathered_bytes = model.element_bytes * weights * repetitions
    yield CollectiveCalls("all-gather", "dp_shard", gathered_bytes, gathered_modules * repetitions)
    reductions = micro_batches if parallel.reduces_each_micro_batch else 1
    yield CollectiveCalls(
        "reduce-scatter", "dp_shard", gradient_bytes * reductions, modules * reductions
    )
    yield CollectiveCalls(
        "all-reduce", "dp_replicate", gradient_bytes / model.layout.dp_shard, modules
    )


def _list_tensor_parallel(
    model: PlannedModel, totals: RankTotals, tokens: float, micro_batches: float
) -> Iterator[CollectiveCalls]:
    """Yield calls that sum activations and their gradients over tensor-parallel ranks.

    With sequence parallelism, also calls that gather them.
    """
    size = model.size
    parallel = model.parallel
    token_bytes = model.element_bytes * tokens  # of one element of every token
    for n, end in ((totals.n_begin, size.begin), (totals.n_finish, size.finish)):
        payload = token_bytes * n * end.collective_elements_per_token
        yield CollectiveCalls("all-reduce", "tp", payload, n * end.collectives * micro_batches)
    # the backward pass sums as often as the forward pass: twice in a block of attention, once in one
    # without; recomputation of either kind keeps no sums, and stops before the last, which the
    # backward pass does not need
    forward_sums = size.block.collectives
    recomputes = parallel.activation_checkpointing is not None
    recomputed_sums = max(0, forward_sums - 1) if recomputes else 0
    sums_per_block = 2 * forward_sums + recomputed_sums
    elements_per_sum = size.block.collective_elements_per_token / max(1, forward_sums)
    payload = token_bytes * totals.n_blocks * (sums_per_block * elements_per_sum)
    kind: Kind = "reduce-scatter" if parallel.sequence_parallel else "all-reduce"
    yield CollectiveCalls(kind, "tp", payload, totals.n_blocks * sums_per_block * micro_batches)
    if parallel.sequence_parallel:
        # each sum is a reduce-scatter paired with an all-gather of the same size; recomputation
        # also gathers the input of the last sum
        gathers_per_block = (3 if recomputes else 2) * forward_sums
        # the gradients of the blocks' input and the blocks' output are gathered at the model's ends
        ends = totals.n_begin + totals.n_finish
        elements = totals.n_blocks * gathers_per_block * elements_per_sum
        elements += size.width * model.layout.tp * ends
        calls = (totals.n_blocks * gathers_per_block + ends) * micro_batches
        yield CollectiveCalls("all-gather", "tp", token_bytes * elements, calls)


def _list_pipeline(
    model: PlannedModel, pp_rank: int, tokens: float, micro_batches: float
) -> Iterator[CollectiveCalls]:
    """Yield calls that send activations and gradients between stages, and gradients of tied parameters."""
    parallel = model.parallel
    layout = model.layout
    pp_ranks = range(layout.pp)
    rank_by_stage = {stage: rank for rank in pp_ranks for stage in list_stages(rank, parallel)}
    # node of the first process of each pipeline rank
    nodes = [rank * layout.tp * layout.dp // model.nproc_per_node for rank in pp_ranks]
    message_bytes = model.element_bytes * tokens * model.size.width
    for stage in list_stages(pp_rank, parallel):
        for neighbour in (stage - 1, stage + 1):
            receiver = rank_by_stage.get(neighbour, pp_rank)
            if receiver != pp_rank:
                leaves_node = nodes[receiver] != nodes[pp_rank]
                yield CollectiveCalls(
                    "point to point", "pp", message_bytes, micro_batches, leaves_node
                )
    tied = model.size.tied.trained
    ends = {rank_by_stage[0], rank_by_stage[parallel.n_stages - 1]}
    if tied and len(ends) == 2 and pp_rank in ends:
        tied_bytes = FLOAT32_BYTES * tied / model.ranks_per_copy
        leaves_node = len({nodes[rank] for rank in ends}) == 2
        yield CollectiveCalls("point to point", "pp", tied_bytes, 1, leaves_node)
