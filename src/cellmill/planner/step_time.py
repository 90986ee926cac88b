"""How long an optimizer step takes, from a stated device and network: arithmetic. Torch-free.

Assumed: computing reaches `plan.mfu_frac` of the device's peak; links carry NETWORK_FRAC of what they are sold for.
Weights and gradients travel while blocks compute, as far as there is something to compute. Sums of tensor parallel
are waited for, so are activations between stages, and gradients of a pipeline, which is through when they leave.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cellmill.config.parallel import Layout, Parallel
from cellmill.planner.bubble import idle_frac
from cellmill.planner.communication import Traffic
from cellmill.planner.size import ModelSize
from cellmill.planner.stage_share import shares_of

NETWORK_FRAC = 0.8  # NCCL's own tests reach some 360 of 450 GB/s on eight H100, 230 of 300 on eight A100
CALL_S = 14e-6
RING_S, TREE_S = (1.9e-6, 4.0e-6), (1.25e-6, 8.5e-6)  # of a hop inside a node, and of one between nodes
BACKWARD_FRAC = 2 / 3  # of a step's computing


@dataclass(frozen=True)
class Network:
    """What one process sends at most, in one direction, GB/s."""

    intra_node_gbs: float
    inter_node_gbs: float

    def seconds(self, traffic: Traffic) -> float:
        """Both kinds of links are busy at once; the slower counts. What each hop waits comes on top."""
        inside = traffic.intra_node_bytes / self.intra_node_gbs
        between = traffic.inter_node_bytes / self.inter_node_gbs
        return max(inside, between) / (NETWORK_FRAC * 1e9) + traffic.calls * latency(traffic)


def latency(traffic: Traffic) -> float:
    """Seconds that a collective takes of however few bytes: its hops one after the other.

    All-gather and reduce-scatter pass a ring from process to process: with many nodes this, not bytes, is what makes
    FULL_SHARD slow. An all-reduce passes the ring twice, or up and down a tree. Source: NCCL's own model of its costs
    (src/graph/tuning.cc of 2.20, protocol LL128).
    """
    nodes = -(-traffic.processes // traffic.in_a_node)
    if traffic.kind == "point to point":
        return CALL_S
    ring = (traffic.processes - nodes) * RING_S[0] + (nodes - 1) * RING_S[1]
    if traffic.kind != "all-reduce":
        return CALL_S + ring
    tree = (traffic.in_a_node - 1) * TREE_S[0] + math.log2(nodes) * TREE_S[1]
    return CALL_S + 2 * min(ring, tree)


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step, of the process that computes most."""

    compute_s: float
    communication_s: float
    """That nothing is computed meanwhile."""
    idle_s: float
    """That a process waits for others of its pipeline."""

    @property
    def step_s(self) -> float:
        return self.compute_s + self.communication_s + self.idle_s


def step_time(
    size: ModelSize,
    parallel: Parallel,
    layout: Layout,
    traffic: Sequence[Traffic],
    network: Network,
    computed_flops: float,
    tokens: float,
    pairs: float,
    micro_batches: float,
) -> StepTime:
    """The step in which one process takes so many `tokens` and (query, key) `pairs`.

    Parameters
    ----------
    size
        Of what one tensor-parallel process holds.
    traffic
        Of the process that sends most.
    computed_flops
        FLOP/s that computing reaches.
    """
    compute_s = max(
        sum(
            stage.flops(size, tokens, pairs) + _recomputed(size, parallel, stage.blocks, tokens, pairs)
            for stage in shares_of(rank, parallel, size.blocks)
        )
        for rank in range(layout.pp)
    )
    compute_s /= computed_flops
    communication_s = _waited_for(size, layout, traffic, network, compute_s, micro_batches)
    idle = idle_frac(parallel, max(1, round(micro_batches)))
    idle_s = (compute_s + communication_s) * idle / (1 - idle)
    return StepTime(compute_s, communication_s, idle_s)


def _recomputed(size: ModelSize, parallel: Parallel, blocks: int, tokens: float, pairs: float) -> float:
    """FLOPs of the forward passes that are done again."""
    if parallel.activation_checkpointing is None:
        return 0.0
    again = size.block.flops_per_token * tokens + size.pair_flops * pairs
    return (1 - BACKWARD_FRAC) * blocks * again


def _waited_for(
    size: ModelSize,
    layout: Layout,
    traffic: Sequence[Traffic],
    network: Network,
    compute_s: float,
    micro_batches: float,
) -> float:
    gathered = reduced = others = 0.0
    for part in traffic:
        if part.axis in ("tp", "pp"):
            others += network.seconds(part)
        elif part.kind == "all-gather":
            gathered += network.seconds(part)
        else:
            reduced += network.seconds(part)
    if layout.pp > 1:
        return others + gathered + reduced
    # the first weights and the last gradients meet no computing; gradients leave in the last backward pass alone
    first_and_last = (gathered / micro_batches + reduced) / (size.blocks + 1)
    last_backward = BACKWARD_FRAC * compute_s / micro_batches
    return others + max(first_and_last, gathered + reduced - compute_s, reduced - last_backward)
