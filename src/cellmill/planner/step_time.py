"""Time of an optimizer step on a device and network.

Communication is called exposed while no computation runs at the same time.

Assumptions:

- Computation reaches `plan.mfu_frac` of the device's peak rate (`planner.devices`). Links reach
  NETWORK_FRAC of their nominal rate.
- Weights and gradients are sent while blocks compute, for as long as blocks compute.
- Tensor-parallel collectives are all exposed. With a pipeline all communication is exposed.
- With `parallel.gradient_reduction: micro_batch`, exposed communication is overestimated.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cellmill.planner.measure.load import Load
from cellmill.planner.planned_model import PlannedModel
from cellmill.planner.schedules import estimate_idle_frac, estimate_validation_idle_frac
from cellmill.planner.traffic import CollectiveTraffic
from cellmill.planner.units import FORWARDS_PER_BACKWARD, GB

# Fraction of the nominal rate that links reach. NCCL's own tests reach about 360 of 450 GB/s on eight H100,
# and 230 of 300 GB/s on eight A100.
NETWORK_FRAC = 0.8
# Seconds of latency of a call, and of each hop in a ring or in a tree, inside a node or between nodes. They
# are those of protocol LL128 in NCCL 2.20, src/graph/tuning.cc.
CALL_S = 14e-6
RING_INTRA_NODE_S = 1.9e-6
RING_INTER_NODE_S = 4.0e-6
TREE_INTRA_NODE_S = 1.25e-6
TREE_INTER_NODE_S = 8.5e-6


@dataclass(frozen=True)
class Network:
    """Nominal rates at which one process sends, in one direction, in GB/s."""

    intra_node_gb_per_s: float
    inter_node_gb_per_s: float

    def estimate_seconds(self, collective: CollectiveTraffic) -> float:
        """Estimate the time of all calls: of the kind of link that takes longer, plus the latency."""
        intra_node_s = collective.intra_node_bytes / (NETWORK_FRAC * GB * self.intra_node_gb_per_s)
        inter_node_s = collective.inter_node_bytes / (NETWORK_FRAC * GB * self.inter_node_gb_per_s)
        return max(intra_node_s, inter_node_s) + collective.calls * estimate_latency(collective)


def estimate_latency(collective: CollectiveTraffic) -> float:
    """Estimate the seconds of one call without the time of its bytes: the hops, one after another.

    An all-gather or a reduce-scatter travels a ring of all processes. With many nodes this latency makes
    FULL_SHARD slow, not the bytes. An all-reduce travels the ring twice, or up and down a tree. Every node
    is assumed to have as few processes of the group as the node with the fewest.
    """
    if collective.kind == "point to point":
        return CALL_S
    nodes = -(-collective.processes // collective.processes_per_node)
    # one round of the ring
    ring_s = (collective.processes - nodes) * RING_INTRA_NODE_S + (nodes - 1) * RING_INTER_NODE_S
    if collective.kind != "all-reduce":
        return CALL_S + ring_s
    tree_s = (collective.processes_per_node - 1) * TREE_INTRA_NODE_S
    tree_s += math.log2(nodes) * TREE_INTER_NODE_S
    return CALL_S + 2 * min(ring_s, tree_s)


@dataclass(frozen=True)
class StepTime:
    """Estimated seconds of an optimizer step, on the ranks that take the longest.

    Launches of kernels and copies of `parallel.cpu_offload` are not counted.
    """

    compute_s: float
    exposed_s: float  # communication during which nothing computes
    idle_s: float  # time that a rank waits for other ranks of its pipeline
    # A validation of as many cells as the step has, with its idle time in a pipeline. It is not part of
    # `step_s`.
    validation_s: float

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exposed_s + self.idle_s


def estimate_step_time(
    model: PlannedModel,
    traffic: Sequence[CollectiveTraffic],
    network: Network,
    flops_per_s: float,
    load: Load,
    micro_batches: float,
) -> StepTime:
    """Estimate the time of a step in which each rank computes `load` at `flops_per_s`.

    `traffic` is the traffic of the rank that sends the most. `micro_batches` is the mean number of
    micro-batches in a step.
    """
    compute = _estimate_compute_time(model, load, flops_per_s)

    # sum the seconds of the traffic by kind
    exposed_s = 0.0
    gathers_s = 0.0
    reductions_s = 0.0
    for collective in traffic:
        seconds = network.estimate_seconds(collective)
        if collective.axis in ("tp", "pp"):
            # only the communication of data parallelism overlaps with computation
            exposed_s += seconds
        elif collective.kind == "all-gather":
            gathers_s += seconds
        else:
            reductions_s += seconds

    if model.layout.pp > 1:
        exposed_s += gathers_s + reductions_s
    else:
        n_modules = model.size.n_blocks + 1
        exposed_s += _estimate_exposed_s(compute, gathers_s, reductions_s, micro_batches, n_modules)

    idle_frac = estimate_idle_frac(model.parallel, micro_batches)
    idle_s = (compute.step_s + exposed_s) * idle_frac / (1 - idle_frac)
    validation_idle_frac = estimate_validation_idle_frac(model.parallel, micro_batches)
    validation_s = compute.validation_s / (1 - validation_idle_frac)
    return StepTime(compute.step_s, exposed_s, idle_s, validation_s)


class _ComputeTime(NamedTuple):
    """Seconds of computation, each of the pipeline rank that takes the longest for it."""

    step_s: float  # all passes of a step, with recomputation
    validation_s: float  # a validation of as many cells as the step has
    backward_s: float  # backward passes of the step, with recomputation


def _estimate_exposed_s(
    compute: _ComputeTime,
    gathers_s: float,
    reductions_s: float,
    micro_batches: float,
    n_modules: int,
) -> float:
    """Estimate the exposed seconds of gathered weights and reduced gradients without a pipeline.

    There are three causes of exposed communication. Each has an estimate, and the largest counts. With
    gradient_reduction micro_batch every backward pass sends some gradients, so the first and the third
    estimate are too large.
    """
    # 1. No block computes while the weights of the first module and the gradients of the last module are
    # sent. The modules are the blocks, and one with all weights outside the blocks. They are assumed to be
    # equally large.
    first_and_last_s = (gathers_s / micro_batches + reductions_s) / n_modules

    # 2. Communication takes longer than all computation.
    beyond_compute_s = gathers_s + reductions_s - compute.step_s

    # 3. All gradients are sent during the backward pass of the last micro-batch, and sending them takes
    # longer than this pass.
    beyond_last_backward_s = reductions_s - compute.backward_s / micro_batches

    return max(first_and_last_s, beyond_compute_s, beyond_last_backward_s)


def _estimate_compute_time(model: PlannedModel, load: Load, flops_per_s: float) -> _ComputeTime:
    """Estimate the seconds to compute `load` at `flops_per_s` FLOP/s, without communication.

    Selective recomputation counts as full recomputation, although it computes less.
    """
    flops = model.size.flops
    flops_by_rank = []
    for pp_rank in range(model.layout.pp):
        totals = model.sum_rank_totals(pp_rank)
        blocks = totals.n_blocks * flops.count_block(load)
        begin = flops.count_begin(load) if totals.has_begin else 0.0
        finish = flops.count_finish(load) if totals.has_finish else 0.0

        # FLOPs of one forward pass. All passes of a step have the FLOPs of `n_forwards` forward passes. The
        # second forward pass of a coupled loss has no `finish`.
        n_forwards = flops.forward_passes + FORWARDS_PER_BACKWARD
        forward = (begin + blocks) / n_forwards
        forward_of_finish = finish / (1 + FORWARDS_PER_BACKWARD)

        recomputes = model.parallel.activation_checkpointing is not None
        recomputed = blocks / n_forwards if recomputes else 0.0
        step = begin + blocks + finish + recomputed
        validation = flops.validation_passes * forward + forward_of_finish
        backward = FORWARDS_PER_BACKWARD * (forward + forward_of_finish) + recomputed
        flops_by_rank.append((step, validation, backward))
    return _ComputeTime(*(max(by_rank) / flops_per_s for by_rank in zip(*flops_by_rank)))
