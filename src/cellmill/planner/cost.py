"""Time of an optimizer step for a device (`planner.devices`) and network, and cost of a whole run.

Assumptions: computation reaches `plan.mfu_frac` of the device's peak; links reach NETWORK_FRAC of their nominal rate.
Weights and gradients are sent while blocks compute, as far as there is computation to overlap with. Tensor-parallel
reductions, activations sent between pipeline stages, and gradients of a pipeline (sent at its end) overlap with
nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cellmill.config.options import PlanOptions
from cellmill.config.parallel import Layout, Parallel, layout
from cellmill.models.batch import PAD_CELL
from cellmill.models.build import ModelSpec
from cellmill.planner.devices import Device
from cellmill.planner.memory import Memory, PlannedModel, Traffic, idle_frac, peak_traffic
from cellmill.planner.size import ModelSize, measure
from cellmill.planner.work import Cells, Work, measure_work

GB = 1e9


@dataclass(frozen=True)
class Hardware:
    """Processes of a run and their devices."""

    nodes: int
    nproc_per_node: int
    device: str
    device_bytes: int  # memory of one process
    usable_bytes: int  # `plan.memory_frac` of it

    @property
    def world(self) -> int:
        return self.nodes * self.nproc_per_node

    def layout(self, parallel: Parallel) -> Layout:
        """Return the mesh sizes. Raises ConfigError if the processes do not fit the layout."""
        return layout(parallel, self.world, self.nproc_per_node)


def amount(n_bytes: float) -> str:
    """Format a number of bytes in the largest unit that gives at least 1."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= factor:
            return f"{n_bytes / factor:.3g} {unit}"
    return f"{n_bytes:.0f} bytes"


def layout_words(sizes: dict[str, Any]) -> str:
    kind = "ddp" if sizes["strategy"] == "ddp" else sizes["sharding_strategy"]
    tensor = "" if sizes["tp"] == 1 else f" x tp {sizes['tp']}"
    pipeline = "" if sizes["pp"] == 1 else f" x pp {sizes['pp']} {sizes['schedule']}"
    return f"{kind} ({sizes['dp_replicate']} replicas of {sizes['dp_shard']} shards{tensor}{pipeline})"


NETWORK_FRAC = 0.8  # NCCL's own tests reach some 360 of 450 GB/s on eight H100, 230 of 300 on eight A100
CALL_S = 14e-6
RING_S, TREE_S = (1.9e-6, 4.0e-6), (1.25e-6, 8.5e-6)  # per hop inside a node, and between nodes
BACKWARD_FRAC = 2 / 3  # of a step's computation


@dataclass(frozen=True)
class Network:
    """Maximum rate at which one process sends, in one direction, in GB/s."""

    intra_node_gbs: float
    inter_node_gbs: float

    def seconds(self, traffic: Traffic) -> float:
        """Time of all calls: both kinds of links work at once and the slower one counts, plus the latency."""
        inside = traffic.intra_node_bytes / self.intra_node_gbs
        between = traffic.inter_node_bytes / self.inter_node_gbs
        return max(inside, between) / (NETWORK_FRAC * 1e9) + traffic.calls * latency(traffic)


def latency(traffic: Traffic) -> float:
    """Seconds of one collective without payload: its hops in sequence.

    All-gather and reduce-scatter travel a ring of all processes: with many nodes this latency, not the bytes, makes
    FULL_SHARD slow. An all-reduce travels the ring twice, or up and down a tree. Source: NCCL's own cost model
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
    """Seconds of an optimizer step on the rank that computes the most."""

    compute_s: float
    communication_s: float  # communication that no computation overlaps
    idle_s: float  # time that a rank waits for others of its pipeline

    @property
    def step_s(self) -> float:
        return self.compute_s + self.communication_s + self.idle_s


def step_time(
    model: PlannedModel,
    traffic: Sequence[Traffic],
    network: Network,
    flops_per_s: float,
    tokens: float,
    pairs: float,
    cells: float,
    micro_batches: float,
) -> StepTime:
    """Return the duration of a step of padded `cells`, `tokens` and (query, key) `pairs` on each rank, with the
    `traffic` of the rank that sends the most, where computation reaches `flops_per_s`.
    """
    block_flops = 0.0  # of a block that is recomputed
    if model.parallel.activation_checkpointing is not None:
        flops = model.size.flops
        block_flops = flops.block * tokens + flops.pair * pairs + flops.block_by_cell * cells
    again = 1 - BACKWARD_FRAC
    compute_s = max(
        sum(s.flops(tokens, pairs, cells) + again * s.blocks * block_flops for s in model.stages(rank)) / flops_per_s
        for rank in range(model.layout.pp)
    )
    communication_s = sum(network.seconds(part) for part in traffic if part.axis in ("tp", "pp"))
    data = [part for part in traffic if part.axis not in ("tp", "pp")]
    gathered, reduced = (
        sum(network.seconds(part) for part in data if (part.kind == "all-gather") == gathers)
        for gathers in (True, False)
    )
    if model.layout.pp > 1:
        communication_s = communication_s + gathered + reduced
    else:
        # nothing overlaps the first weights and the last gradients; gradients are sent in the last backward pass only
        first_and_last = (gathered / micro_batches + reduced) / (model.size.blocks + 1)
        last_backward = BACKWARD_FRAC * compute_s / micro_batches
        communication_s += max(first_and_last, gathered + reduced - compute_s, reduced - last_backward)
    idle = idle_frac(model.parallel, max(1, round(micro_batches)))
    return StepTime(compute_s, communication_s, (compute_s + communication_s) * idle / (1 - idle))


@dataclass(frozen=True)
class Cost:
    """Estimates of a run; the optional ones are None if the device's speed is unknown."""

    model: PlannedModel
    whole: ModelSize  # sizes of the whole model, without tensor parallelism
    work: Work
    memory: Memory
    flops_per_step: float  # FLOPs of the model over all processes; recomputation is not counted
    traffic: list[Traffic]  # traffic of the rank that sends the most
    time: StepTime | None = None
    mfu: float | None = None
    hours: float | None = None  # hours including validation
    validation_frac: float | None = None  # fraction of the hours spent in validation
    gpu_hours: float | None = None


def cost(options: PlanOptions, cells: Cells, hardware: Hardware, device: Device, memory: Memory) -> Cost:
    model = PlannedModel.of(options, cells.n_genes, hardware.world, hardware.nproc_per_node, cells.levels)
    work = measure_work(options, cells, model.layout)
    whole = measure(ModelSpec.of(options, cells.n_genes, cells.levels), finetune=options.finetune)
    flops_per_step = whole.flops.of(cells.tokens_per_cell, cells.pairs_per_cell, 1) * work.cells_per_step
    own_cells = work.cells_per_step / model.layout.dp
    tokens, pairs = own_cells * cells.tokens_per_cell, own_cells * cells.pairs_per_cell
    more = work.padding * tokens  # computed by a pipeline like any other token, in cells of PAD_CELL
    tokens, pairs, computed = tokens + more, pairs + PAD_CELL * more, own_cells + more / PAD_CELL
    micro_batches = work.micro_batches_per_step
    traffic = peak_traffic(model, tokens, micro_batches)
    peak = device.flops(options.parallel)
    inside, between = options.plan.intra_node_gbs, options.plan.inter_node_gbs
    inside = device.intra_node_gbs if inside is None else inside
    between = device.inter_node_gbs if between is None else between
    if peak is None or inside is None or between is None:
        return Cost(model, whole, work, memory, flops_per_step, traffic)
    network = Network(inside, between)
    time = step_time(model, traffic, network, peak * options.plan.mfu_frac, tokens, pairs, computed, micro_batches)
    steps_s = time.step_s * work.cells_seen / work.cells_per_step
    # validation is a forward pass alone, a third of a step
    validations_s = time.step_s / 3 * work.validations * work.val_cells / work.cells_per_step
    hours = (steps_s + validations_s) / 3600
    mfu = flops_per_step / (time.step_s * peak * hardware.world)
    estimates = (time, mfu, hours, validations_s / 3600 / hours, hours * hardware.world)
    return Cost(model, whole, work, memory, flops_per_step, traffic, *estimates)
