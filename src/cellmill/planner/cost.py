"""Time of an optimizer step on a device and network, cost of a whole run, and the printed plan.

Assumptions: computation reaches `plan.mfu_frac` of the device's peak (`planner.devices`); links
reach NETWORK_FRAC of their nominal rate. Weights and gradients are sent while blocks compute, as
far as there is computation to overlap with. Tensor-parallel reductions, activations sent between
pipeline stages, and gradients of a pipeline (sent at its end) overlap with nothing.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cellmill.config.options import PlanOptions
from cellmill.config.parallel import Layout, Parallel, layout
from cellmill.config.run import AUTO_EPOCHS, Train
from cellmill.models.batch import PAD_CELL
from cellmill.models.build import ModelSpec
from cellmill.planner.devices import Device, assumption, device_named
from cellmill.planner.memory import Memory, PlannedModel, host_bytes, idle_frac
from cellmill.planner.size import ModelSize, measure
from cellmill.planner.traffic import Traffic, link_bytes, traffic_of
from cellmill.planner.work import Cells, Work, measure_work

GB = 1e9
# NCCL's own tests reach some 360 of 450 GB/s on eight H100, 230 of 300 on eight A100
NETWORK_FRAC = 0.8
CALL_S = 14e-6
# seconds per hop inside a node, and between nodes
RING_S = (1.9e-6, 4.0e-6)
TREE_S = (1.25e-6, 8.5e-6)
BACKWARD_FRAC = 2 / 3  # share of the backward pass in a step's computation
LARGE_FRAC = 0.2  # validation above this fraction of the hours gets a hint
UNKNOWN = "unknown: no speed is known for this device"
DEFAULT_BATCH = float(Train.model_fields["global_batch"].default)
DEFAULT_LR = float(Train.model_fields["lr"].default)


@dataclass(frozen=True)
class Hardware:
    nodes: int
    nproc_per_node: int
    device: str
    device_bytes: int  # memory of one process
    usable_bytes: int  # `plan.memory_frac` of it

    @property
    def world(self) -> int:
        return self.nodes * self.nproc_per_node

    def layout(self, parallel: Parallel) -> Layout:
        """The mesh sizes. Raise ConfigError if the processes do not fit the layout."""
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
    return (
        f"{kind} ({sizes['dp_replicate']} replicas of {sizes['dp_shard']} shards{tensor}{pipeline})"
    )


@dataclass(frozen=True)
class Network:
    """Maximum rate at which one process sends, in one direction, in GB/s."""

    intra_node_gbs: float
    inter_node_gbs: float

    def seconds(self, traffic: Traffic) -> float:
        """Time of all calls: the time of the slower kind of link, plus latency."""
        inside = traffic.intra_node_bytes / self.intra_node_gbs
        between = traffic.inter_node_bytes / self.inter_node_gbs
        return max(inside, between) / (NETWORK_FRAC * 1e9) + traffic.calls * latency(traffic)


def latency(traffic: Traffic) -> float:
    """Seconds of one collective without payload: its hops in sequence.

    All-gather and reduce-scatter travel a ring of all processes: with many nodes this latency, not
    the bytes, makes FULL_SHARD slow. An all-reduce travels the ring twice, or up and down a tree.
    Source: NCCL's own cost model (src/graph/tuning.cc of 2.20, protocol LL128).
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
    load: tuple[float, float, float],
    micro_batches: float,
) -> StepTime:
    """Duration of a step with a `load` of tokens, (query, key) pairs and padded cells on each rank.

    `traffic` is the traffic of the rank that sends the most; computation reaches `flops_per_s`.
    """
    recomputed = 0.0  # FLOPs of a block
    if model.parallel.activation_checkpointing is not None:
        recomputed = model.size.flops.of(*load, blocks=1, first=False, last=False)
    forward_frac = 1 - BACKWARD_FRAC
    compute_s = 0.0
    for rank in range(model.layout.pp):
        flops = 0.0
        for stage in model.stages(rank):
            flops += stage.flops(*load) + forward_frac * stage.blocks * recomputed
        compute_s = max(compute_s, flops / flops_per_s)
    # only traffic of data parallelism overlaps with computation
    data = [part for part in traffic if part.axis not in ("tp", "pp")]
    communication_s = sum(network.seconds(part) for part in traffic if part.axis in ("tp", "pp"))
    gathered = sum(network.seconds(part) for part in data if part.kind == "all-gather")
    reduced = sum(network.seconds(part) for part in data if part.kind != "all-gather")
    if model.layout.pp > 1:
        communication_s = communication_s + gathered + reduced
    else:
        # nothing overlaps the first weights and the last gradients; gradients are sent in the last
        # backward pass only
        first_and_last = (gathered / micro_batches + reduced) / (model.size.blocks + 1)
        last_backward = BACKWARD_FRAC * compute_s / micro_batches
        communication_s += max(
            first_and_last, gathered + reduced - compute_s, reduced - last_backward
        )
    idle = idle_frac(model.parallel, max(1, round(micro_batches)))
    return StepTime(compute_s, communication_s, (compute_s + communication_s) * idle / (1 - idle))


@dataclass(frozen=True)
class Cost:
    """Estimates of a run; the last five are None if the device's speed is unknown."""

    options: PlanOptions
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


def cost(
    options: PlanOptions, cells: Cells, hardware: Hardware, device: Device, memory: Memory
) -> Cost:
    """Estimates of a run that needs `memory`."""
    model = PlannedModel.of(
        options, cells.n_genes, hardware.world, hardware.nproc_per_node, cells.levels
    )
    work = measure_work(options, cells, model.layout)
    whole = measure(ModelSpec.of(options, cells.n_genes, cells.levels), finetune=options.finetune)
    flops_per_step = (
        whole.flops.of(cells.tokens_per_cell, cells.pairs_per_cell, 1) * work.cells_per_step
    )
    # what one rank computes in a step
    local_cells = work.cells_per_step / model.layout.dp
    tokens = local_cells * cells.tokens_per_cell
    pairs = local_cells * cells.pairs_per_cell
    # a pipeline computes its padding like any other tokens, in cells of PAD_CELL
    padding = work.padding * tokens
    load = (tokens + padding, pairs + PAD_CELL * padding, local_cells + padding / PAD_CELL)
    micro_batches = work.micro_batches_per_step
    peak = device.flops(options.parallel)
    plan = options.plan
    # the pipeline rank that sends the most
    by_rank = (traffic_of(model, rank, load[0], micro_batches) for rank in range(model.layout.pp))
    traffic = max(by_rank, key=lambda parts: sum(part.sent_bytes for part in parts))
    inside = device.intra_node_gbs if plan.intra_node_gbs is None else plan.intra_node_gbs
    between = device.inter_node_gbs if plan.inter_node_gbs is None else plan.inter_node_gbs
    if peak is None or inside is None or between is None:
        return Cost(options, model, whole, work, memory, flops_per_step, traffic)
    time = step_time(
        model, traffic, Network(inside, between), peak * plan.mfu_frac, load, micro_batches
    )
    steps_s = time.step_s * work.cells_seen / work.cells_per_step
    # validation is only a forward pass, a third of a step
    validations_s = time.step_s / 3 * work.validations * work.val_cells / work.cells_per_step
    hours = (steps_s + validations_s) / 3600
    return Cost(
        options,
        model,
        whole,
        work,
        memory,
        flops_per_step,
        traffic,
        time=time,
        mfu=flops_per_step / (time.step_s * peak * hardware.world),
        hours=hours,
        validation_frac=validations_s / 3600 / hours,
        gpu_hours=hours * hardware.world,
    )


def describe(cost: Cost, cells: Cells, hardware: Hardware) -> dict[str, Any]:
    """The content of plan.json."""
    options = cost.options
    work = cost.work
    time = cost.time
    collectives = []
    for part in cost.traffic:
        links = {
            "intra_node_bytes": part.intra_node_bytes,
            "inter_node_bytes": part.inter_node_bytes,
        }
        collectives.append(asdict(part) | links)
    train = options.train
    scaled_lr = None
    ratio = train.global_batch / DEFAULT_BATCH
    if train.lr == DEFAULT_LR and ratio != 1:
        # scaled by the square root (Adam; Malladi et al. 2022), linearly (SGD; Goyal et al. 2017)
        scaled_lr = [train.lr * math.sqrt(ratio), train.lr * ratio]
    host, staging = (0, 0) if hardware.device == "cpu" else host_bytes(cost.model)
    return {
        "parameters": cost.whole.parameters,
        "memory": {
            "parts_bytes": asdict(cost.memory),
            "total_bytes": cost.memory.total,
            "limit_bytes": hardware.usable_bytes,
            "device_bytes": hardware.device_bytes,
            "host_bytes": host,
            "staging_bytes": staging,
        },
        "communication": {"link_bytes": link_bytes(cost.traffic), "collectives": collectives},
        "flops_per_step": cost.flops_per_step,
        "tokens_per_step": cells.tokens_per_cell * work.cells_per_step,
        "tokens_per_cell": cells.tokens_per_cell,
        "tokens": cells.tokens_per_cell * work.cells_seen,
        "cells": cells.n,
        "n_genes": cells.n_genes,
        "steps": work.steps,
        "steps_per_epoch": work.steps_per_epoch,
        "cells_seen": work.cells_seen,
        "micro_batches_per_step": work.micro_batches_per_step,
        "validations": work.validations,
        "val_cells": work.val_cells,
        "auto_steps": train.steps == "auto",
        "micro_batch_tokens": work.micro_tokens,
        "step": None if time is None else {**asdict(time), "step_s": time.step_s},
        "pipeline_idle_frac": idle_frac(options.parallel, work.most_micro_batches),
        "mfu": cost.mfu,
        "hours": cost.hours,
        "validation_frac": cost.validation_frac,
        "gpu_hours": cost.gpu_hours,
        "nodes": hardware.nodes,
        "nproc_per_node": hardware.nproc_per_node,
        "world_size": hardware.world,
        "device": hardware.device,
        "layout": options.parallel.model_dump(mode="json") | asdict(cost.model.layout),
        "mfu_frac": options.plan.mfu_frac,
        "warmup_steps": train.warmup_steps,
        "global_batch": train.global_batch,
        "scaled_lr": scaled_lr,
        "warnings": options.objective.warnings(),
    }


def table(plan: dict[str, Any]) -> str:
    """The content of plan.json as lines of text."""
    return "\n".join(f"{name:<12}{text}" for name, text in _rows(plan) if text)


def _rows(plan: dict[str, Any]) -> Iterator[tuple[str, str]]:
    memory = plan["memory"]
    sizes = plan["layout"]
    link = plan["communication"]["link_bytes"]
    step = plan["step"]
    yield "parameters", f"{plan['parameters']:,} over {plan['n_genes']:,} genes"
    text = f"{plan['cells']:,} for training, {plan['tokens_per_cell']:,.0f} tokens each"
    if plan["cut_cells_frac"]:
        text += f" of {plan['genes_per_cell']:,.0f} genes: tokens.max_tokens cuts {plan['cut_cells_frac']:.0%} of cells"
    yield "cells", text
    per_epoch = plan["steps_per_epoch"]
    auto = ""
    if plan["auto_steps"]:
        auto = f"; auto: {AUTO_EPOCHS} epochs"
        if AUTO_EPOCHS * per_epoch < plan["steps"]:
            auto += f" are {AUTO_EPOCHS * per_epoch:,}, raised to the minimum"
    yield (
        "steps",
        f"{plan['steps']:,} ({per_epoch:,} per epoch{auto}), {plan['tokens']:,.0f} tokens in total",
    )
    flops = f"{plan['flops_per_step']:.3g} FLOPs"
    micro_batches = f"{plan['micro_batches_per_step']:.1f} micro-batches per process"
    yield "step", f"{plan['tokens_per_step']:,.0f} tokens in {micro_batches}, {flops}"
    yield (
        "processes",
        f"{plan['world_size']} x {plan['device']}, {layout_words(sizes)}, {sizes['precision']}",
    )
    parts = ", ".join(f"{name} {amount(n)}" for name, n in memory["parts_bytes"].items() if n)
    if memory["host_bytes"]:
        parts += f"; {amount(memory['host_bytes'])} of host memory"
    if memory["staging_bytes"]:
        parts += f"; {amount(memory['staging_bytes'])} of pinned host memory for checkpoints"
    yield (
        "memory",
        f"{amount(memory['total_bytes'])} of {amount(memory['limit_bytes'])} per process: {parts}",
    )
    memory_gb = device_named(plan["device"]).memory_gb
    # the memory is that of the named device, not plan.memory_gb
    if memory_gb is not None and memory["device_bytes"] == round(memory_gb * GB):
        yield "assumed", assumption(plan["device"])
    largest = f"{plan['largest_micro_batch']:,} would fit (train.token_budget)"
    yield "micro-batch", f"at most {plan['micro_batch_tokens']:,} tokens; {largest}"
    inside = amount(link["intra_node"])
    between = amount(link["inter_node"])
    yield "traffic", f"{inside} inside the node and {between} to other nodes, per process and step"
    if step is None:
        yield "step time", UNKNOWN
        yield "hours", UNKNOWN
    else:
        exposed = f"exposed communication {step['communication_s']:.3g}, idle in the pipeline {step['idle_s']:.3g}"
        yield "step time", f"{step['step_s']:.3g} s: compute {step['compute_s']:.3g}, {exposed}"
        peak = f"{plan['mfu']:.0%} of the peak (compute alone at {plan['mfu_frac']:.0%})"
        yield "hours", f"{plan['hours']:,.3g}, {plan['gpu_hours']:,.3g} GPU hours at {peak}"
        if sizes["cpu_offload"] is not None:
            yield (
                "not counted",
                "copies between host and device of cpu_offload, and AdamW on the host",
            )
    if plan["validations"]:
        text = f"{plan['validations']:,} times {plan['val_cells']:,} cells"
        share = plan["validation_frac"]
        if share is not None:
            text += f", {share:.0%} of the hours"
        if share is not None and share > LARGE_FRAC:
            text += ": lower train.val_cells or raise train.val_every_steps"
        yield "validation", text
    for line in plan["warnings"]:
        yield "warning", line
    if plan["scaled_lr"] is not None:
        root, linear = plan["scaled_lr"]
        scaled = f"{root:.2g} (square root, usual for AdamW) or {linear:.2g} (linear)"
        suits = f"train.lr {DEFAULT_LR:g} suits train.global_batch {DEFAULT_BATCH:g}"
        yield "hint", f"{suits}; scaled to {plan['global_batch']:,} it is {scaled}"
    if plan["warmup_steps"] >= plan["steps"]:
        yield (
            "warning",
            f"train.warmup_steps {plan['warmup_steps']} leaves no step at the peak learning rate",
        )
