"""Time of an optimizer step on a device and network.

Assumptions:

- Computation reaches `plan.mfu_frac` of the device's peak (`planner.devices`), and links reach
  NETWORK_FRAC of their nominal rate.
- Weights and gradients are sent while blocks compute, as far as there is computation to overlap
  with.
- Tensor-parallel collectives overlap with nothing. With a pipeline no communication overlaps.
- With `parallel.gradient_reduction: micro_batch`, exposed communication is overestimated.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cellmill.planner.measure.load import Load
from cellmill.planner.planned_model import PlannedModel
from cellmill.planner.schedules import estimate_idle_frac, estimate_validation_idle_frac
from cellmill.planner.traffic import CollectiveTraffic
from cellmill.planner.units import FORWARDS_PER_BACKWARD, GB

# NCCL's own tests reach about 360 of 450 GB/s on eight H100, 230 of 300 on eight A100
NETWORK_FRAC = 0.8
# latency of a call, and of each hop: NCCL 2.20, src/graph/tuning.cc, protocol LL128
CALL_S = 14e-6
RING_INTRA_NODE_S = 1.9e-6
RING_INTER_NODE_S = 4.0e-6
TREE_INTRA_NODE_S = 1.25e-6
TREE_INTER_NODE_S = 8.5e-6


@dataclass(frozen=True)
class Network:
    """Maximum rate at which one process sends, in one direction, in GB/s."""

    intra_node_gb_per_s: float
    inter_node_gb_per_s: float

    def seconds(self, collective: CollectiveTraffic) -> float:
        """Estimate the time of all calls: the bytes over the slower kind of link, plus latency."""
        intra_node_s = collective.intra_node_bytes / (NETWORK_FRAC * GB * self.intra_node_gb_per_s)
        inter_node_s = collective.inter_node_bytes / (NETWORK_FRAC * GB * self.inter_node_gb_per_s)
        return max(intra_node_s, inter_node_s) + collective.calls * estimate_latency(collective)


def estimate_latency(collective: CollectiveTraffic) -> float:
    """Estimate the seconds of one call without its bytes: its hops, one after another.

    All-gather and reduce-scatter travel a ring of all processes. With many nodes this latency, not
    the bytes, makes FULL_SHARD slow. An all-reduce travels the ring twice, or up and down a tree. Each
    node is assumed to have as few processes of the group as the one with the fewest.
    """
    if collective.kind == "point to point":
        return CALL_S
    nodes = -(-collective.processes // collective.processes_per_node)
    ring_s = (collective.processes - nodes) * RING_INTRA_NODE_S + (nodes - 1) * RING_INTER_NODE_S
    if collective.kind != "all-reduce":
        return CALL_S + ring_s
    tree_s = (collective.processes_per_node - 1) * TREE_INTRA_NODE_S
    tree_s += math.log2(nodes) * TREE_INTER_NODE_S
    return CALL_S + 2 * min(ring_s, tree_s)


@dataclass(frozen=True)
class StepTime:
    """Estimated seconds of an optimizer step, of the busiest ranks.

    Launches of kernels and copies of `parallel.cpu_offload` are not counted.
    """

    compute_s: float
    exposed_s: float  # communication that no computation overlaps
    idle_s: float  # time that a rank waits for others of its pipeline
    # a validation of the step's cells, with its idle time in a pipeline: not part of `step_s`
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
    """Estimate the duration of a step in which each rank computes `load` at `flops_per_s`.

    `traffic` is the traffic of the rank that sends the most.
    """
    compute_s, validation_s, backward_s = _estimate_compute_time(model, load, flops_per_s)
    exposed_s = 0.0
    gathers_s = 0.0
    reductions_s = 0.0
    for collective in traffic:
        seconds = network.seconds(collective)
        if collective.axis in ("tp", "pp"):  # only data parallelism overlaps with computation
            exposed_s += seconds
        elif collective.kind == "all-gather":
            gathers_s += seconds
        else:
            reductions_s += seconds
    if model.layout.pp > 1:
        exposed_s += gathers_s + reductions_s
    else:
        # Three estimates of the exposed communication, each of one cause; the largest is taken. With
        # gradient_reduction micro_batch every backward pass sends some gradients, so the first and the
        # third are too large.
        # 1. No block computes while the first module's weights and the last one's gradients are sent.
        # All modules, the blocks and one outside them, are assumed to be equally large.
        first_and_last_s = (gathers_s / micro_batches + reductions_s) / (model.size.n_blocks + 1)
        # 2. Communication that takes longer than all computation.
        beyond_compute_s = gathers_s + reductions_s - compute_s
        # 3. Reductions that take longer than the last micro-batch's backward pass, which sends all
        # gradients.
        beyond_last_backward_s = reductions_s - backward_s / micro_batches
        exposed_s += max(first_and_last_s, beyond_compute_s, beyond_last_backward_s)
    idle_frac = estimate_idle_frac(model.parallel, micro_batches)
    idle_s = (compute_s + exposed_s) * idle_frac / (1 - idle_frac)
    validation_idle_frac = estimate_validation_idle_frac(model.parallel, micro_batches)
    return StepTime(compute_s, exposed_s, idle_s, validation_s / (1 - validation_idle_frac))


def _estimate_compute_time(model: PlannedModel, load: Load, flops_per_s: float) -> list[float]:
    """Estimate the seconds of a step's computation, of its cells' validation, and of its backward passes.

    Each is the time of the pipeline rank that takes the longest for it. Backward passes include
    recomputation. Selective recomputation counts as full, though it computes less.
    """
    flops = model.size.flops
    flops_by_rank = []
    for pp_rank in range(model.layout.pp):
        totals = model.sum_rank_totals(pp_rank)
        blocks = totals.n_blocks * flops.count_block(load)
        begin = flops.count_begin(load) if totals.has_begin else 0.0
        finish = flops.count_finish(load) if totals.has_finish else 0.0
        # all passes have the FLOPs of this many forward passes; a coupled loss repeats all but `finish`
        n_forwards = flops.forward_passes + FORWARDS_PER_BACKWARD
        forward = (begin + blocks) / n_forwards
        forward_of_finish = finish / (1 + FORWARDS_PER_BACKWARD)
        validation = flops.validation_passes * forward + forward_of_finish
        recomputes = model.parallel.activation_checkpointing is not None
        recomputed = blocks / n_forwards if recomputes else 0.0
        step = begin + blocks + finish + recomputed
        backward = FORWARDS_PER_BACKWARD * (forward + forward_of_finish) + recomputed
        flops_by_rank.append((step, validation, backward))
    return [max(by_rank) / flops_per_s for by_rank in zip(*flops_by_rank)]
