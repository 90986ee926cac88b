"""Bytes that a training process sends per step, by collective and mesh axis.

Collectives are counted as rings. In an all-gather or a reduce-scatter, each of n processes sends
(n - 1) / n of the tensor to the next process of the ring. In an all-reduce it sends twice as many bytes.

In one ring, only one of the k processes on a node sends to another node. NCCL builds several rings, and
in each another process of the node sends to another node. So on average a process sends 1 / k of its
bytes to other nodes. Groups on one axis may have different numbers of processes on a node: the smallest
number counts. A message between pipeline stages goes from one process to another.

These bytes are not counted:

- reductions of a few numbers, such as targets, norms and signals;
- reductions of the tables of a coupled loss;
- matrices that an optimizer exchanges, such as muon.

Sources: ZeRO, Rajbhandari et al. 2020, section 7; sequence parallelism, Korthikanti et al. 2022,
section 4.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np

from cellmill.parallel.mesh import AXES, list_stages
from cellmill.planner.measure.load import Load
from cellmill.planner.planned_model import PlannedModel, RankTotals
from cellmill.planner.units import FLOAT32_BYTES

BUCKET_BYTES = 25 << 20  # bytes of a bucket of gradients, by default of DistributedDataParallel
Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "point to point"]


@dataclass(frozen=True)
class CollectiveTraffic:
    """All calls of one collective over one mesh axis, in one step of one process."""

    kind: Kind
    axis: str  # mesh axis
    processes: int  # of the group that makes the call; 2 for a message between two processes
    processes_per_node: int  # the fewest processes that a group has on one node
    # bytes of the full tensors, before a reduce-scatter or after an all-gather
    payload_bytes: float
    calls: float  # number of calls; a mean, as the number of micro-batches is

    @property
    def sent_bytes(self) -> float:
        """Bytes that this process sends."""
        if self.kind == "point to point":
            return self.payload_bytes
        share = (self.processes - 1) / self.processes
        return self.payload_bytes * share * (2 if self.kind == "all-reduce" else 1)

    @property
    def inter_node_bytes(self) -> float:
        """Bytes that this process sends to other nodes: the mean over the processes of its node."""
        is_on_one_node = self.processes <= self.processes_per_node
        return 0.0 if is_on_one_node else self.sent_bytes / self.processes_per_node

    @property
    def intra_node_bytes(self) -> float:
        return self.sent_bytes - self.inter_node_bytes


@dataclass(frozen=True, order=True)
class LinkBytes:
    """Bytes that a process sends in a step, by kind of link. The slower kind comes first in the order."""

    inter_node: float
    intra_node: float


def sum_link_bytes(traffic: Sequence[CollectiveTraffic]) -> LinkBytes:
    return LinkBytes(
        inter_node=sum(collective.inter_node_bytes for collective in traffic),
        intra_node=sum(collective.intra_node_bytes for collective in traffic),
    )


class CollectiveCalls(NamedTuple):
    """Calls of one collective for one purpose. `CollectiveTraffic` is the sum over all purposes."""

    kind: Kind
    axis: str  # mesh axis
    payload_bytes: float  # bytes of the full tensors of all calls together
    n_calls: float
    leaves_node: bool = False  # True if a message between two processes goes to another node


def list_traffic(
    model: PlannedModel, pp_rank: int, load: Load, micro_batches: float
) -> list[CollectiveTraffic]:
    """List the collectives that a process of pipeline rank `pp_rank` calls in a step.

    `load` is the load of all micro-batches of the step together. `micro_batches` is their number.
    """
    rank_totals = model.sum_rank_totals(pp_rank)

    # sum the payload bytes and the number of calls, by (kind, axis, leaves_node)
    sums = defaultdict[tuple[Kind, str, bool], np.ndarray](lambda: np.zeros(2))
    for calls in chain(
        _list_data_parallel_calls(model, rank_totals, micro_batches),
        _list_tensor_parallel_calls(model, rank_totals, load, micro_batches),
        _list_pipeline_calls(model, pp_rank, load, micro_batches),
    ):
        sums[calls.kind, calls.axis, calls.leaves_node] += (calls.payload_bytes, calls.n_calls)

    nodes = _find_nodes(model)[pp_rank]
    traffic = []
    for (kind, axis, leaves_node), (payload_bytes, n_calls) in sums.items():
        if kind == "point to point":  # one sender and one receiver
            processes = 2
            processes_per_node = 1 if leaves_node else 2
        else:
            processes = getattr(model.layout, axis)
            # `nodes` has all AXES but the first, pp
            processes_per_node = _count_fewest_on_a_node(nodes, AXES.index(axis) - 1)
        if payload_bytes and processes > 1:
            traffic.append(
                CollectiveTraffic(kind, axis, processes, processes_per_node, payload_bytes, n_calls)
            )
    return traffic


def _find_nodes(model: PlannedModel) -> np.ndarray:
    """Find the number of the node of each process, in an array with one dimension for each of AXES."""
    sizes = [getattr(model.layout, axis) for axis in AXES]
    return np.arange(math.prod(sizes)).reshape(sizes) // model.nproc_per_node


def _count_fewest_on_a_node(nodes: np.ndarray, axis: int) -> int:
    """Count the fewest processes that a group along `axis` has on one node.

    `nodes` has the node of each process.
    """
    # (groups, processes of a group)
    groups = np.moveaxis(nodes, axis, -1).reshape(-1, nodes.shape[axis])
    # give a node another number in each group, and count how often each number occurs
    first_ids = np.arange(len(groups)) * (nodes.max() + 1)
    _, n_processes = np.unique(groups + first_ids[:, None], return_counts=True)
    return int(n_processes.min())


def _list_data_parallel_calls(
    model: PlannedModel, totals: RankTotals, micro_batches: float
) -> Iterator[CollectiveCalls]:
    """Yield the calls that gather weights, and the calls that reduce gradients."""
    parallel = model.parallel
    gradient_bytes = FLOAT32_BYTES * totals.trained
    if not model.uses_fsdp:
        n_buckets = 1 + gradient_bytes // BUCKET_BYTES
        yield CollectiveCalls("all-reduce", "dp_replicate", gradient_bytes, n_buckets)
        return

    # How often weights are gathered in a step. Weights outside the blocks stay gathered until the backward
    # pass has used them, and with SHARD_GRAD_OP all weights do: these are gathered once per micro-batch.
    forward_passes = model.size.flops.forward_passes
    outside_gathers = micro_batches
    block_gathers = micro_batches
    if parallel.pp > 1:  # weights stay gathered for all micro-batches
        outside_gathers = forward_passes
        block_gathers = forward_passes
    elif parallel.reshards_after_forward:  # each pass gathers a block and frees it again
        block_gathers = micro_batches * (forward_passes + 1)
    gathered = totals.outside_parameters * outside_gathers
    gathered += (totals.parameters - totals.outside_parameters) * block_gathers

    # FSDP2 makes one call per module: each block, and one module with all weights outside the blocks, if any
    outside_modules = int(totals.outside_parameters > 0)
    n_modules = outside_modules + totals.n_blocks
    n_gathers = outside_modules * outside_gathers + totals.n_blocks * block_gathers
    yield CollectiveCalls("all-gather", "dp_shard", model.element_bytes * gathered, n_gathers)

    reductions = micro_batches if parallel.reduces_each_micro_batch else 1
    yield CollectiveCalls(
        "reduce-scatter", "dp_shard", gradient_bytes * reductions, n_modules * reductions
    )
    # replicas sum their shards, once in a step
    yield CollectiveCalls(
        "all-reduce", "dp_replicate", gradient_bytes / model.layout.dp_shard, n_modules
    )


def _list_tensor_parallel_calls(
    model: PlannedModel, totals: RankTotals, load: Load, micro_batches: float
) -> Iterator[CollectiveCalls]:
    """Yield the calls that sum activations and their gradients over tensor-parallel ranks.

    With sequence parallelism, a reduce-scatter and an all-gather replace each all-reduce of a block.
    """
    size = model.size
    forward_passes = size.flops.forward_passes

    # the ends of the model; the calls of `finish` are already those of its forward and its backward pass
    begin_passes = forward_passes * int(totals.has_begin)
    for end, passes in ((size.begin, begin_passes), (size.finish, int(totals.has_finish))):
        end_bytes = model.element_bytes * passes * end.collective_elements.total(load)
        n_calls = passes * end.collectives * micro_batches
        yield CollectiveCalls("all-reduce", "tp", end_bytes, n_calls)

    # Sums of the blocks. A backward pass has as many sums as a forward pass. With activation checkpointing
    # it also repeats the sums of the forward pass, except the last, whose result it does not need.
    sums_per_pass = size.block.collectives
    recomputes = model.parallel.activation_checkpointing is not None
    n_repeated = max(0, sums_per_pass - 1) if recomputes else 0
    n_sums = totals.n_blocks * ((forward_passes + 1) * sums_per_pass + n_repeated)
    bytes_per_sum = model.element_bytes * size.block.collective_elements.total(load)
    bytes_per_sum /= max(1, sums_per_pass)
    kind: Kind = "reduce-scatter" if model.parallel.sequence_parallel else "all-reduce"
    yield CollectiveCalls(kind, "tp", n_sums * bytes_per_sum, n_sums * micro_batches)
    if not model.parallel.sequence_parallel:
        return

    # With sequence parallelism only. Recomputation repeats every gather, also the one before the last sum.
    n_gathers = totals.n_blocks * (forward_passes + 1 + int(recomputes)) * sums_per_pass
    yield CollectiveCalls("all-gather", "tp", n_gathers * bytes_per_sum, n_gathers * micro_batches)
    # Before the first block, a backward pass gathers the gradients of the block's input. After the last
    # block, a forward pass gathers the block's output.
    n_end_gathers = int(totals.has_begin) + forward_passes * int(totals.has_finish)
    bytes_per_end = model.element_bytes * size.block_input.total(load) * model.layout.tp
    yield CollectiveCalls(
        "all-gather", "tp", n_end_gathers * bytes_per_end, n_end_gathers * micro_batches
    )


def _list_pipeline_calls(
    model: PlannedModel, pp_rank: int, load: Load, micro_batches: float
) -> Iterator[CollectiveCalls]:
    """Yield the messages of a pipeline rank to others: activations, gradients, gradients of tied parameters."""
    parallel = model.parallel
    layout = model.layout
    pp_ranks = range(layout.pp)
    rank_by_stage = {stage: rank for rank in pp_ranks for stage in list_stages(rank, parallel)}
    nodes = _find_nodes(model)

    message_bytes = model.count_block_input_bytes(load)
    for stage in list_stages(pp_rank, parallel):
        # activations go to the next stage, gradients to the previous one
        for neighbour, passes in ((stage + 1, model.size.flops.forward_passes), (stage - 1, 1)):
            # outside the model there is no neighbour, and nothing is sent
            receiver = rank_by_stage.get(neighbour, pp_rank)
            if receiver != pp_rank:
                leaves_node = bool((nodes[receiver] != nodes[pp_rank]).any())
                n_messages = passes * micro_batches
                yield CollectiveCalls(
                    "point to point", "pp", passes * message_bytes, n_messages, leaves_node
                )

    # the ranks of the first and of the last stage exchange the gradients of tied parameters
    tied = model.size.tied.trained
    ends = {rank_by_stage[0], rank_by_stage[parallel.n_stages - 1]}
    if tied and len(ends) == 2 and pp_rank in ends:
        tied_bytes = FLOAT32_BYTES * tied / model.ranks_per_copy
        first_nodes, last_nodes = [nodes[rank] for rank in ends]
        leaves_node = bool((first_nodes != last_nodes).any())
        yield CollectiveCalls("point to point", "pp", tied_bytes, 1, leaves_node)
