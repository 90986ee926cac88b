"""The content of plan.json, and the same as lines of text."""

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, TypedDict

from cellmill.config.run import AUTO_EPOCHS, Train
from cellmill.planner.cost import Cost
from cellmill.planner.devices import GB, describe_assumption, find_device
from cellmill.planner.hardware import Hardware
from cellmill.planner.memory import format_bytes, host_bytes, idle_frac
from cellmill.planner.traffic import link_bytes
from cellmill.planner.work import CorpusSize

LARGE_FRAC = 0.2  # validation above this fraction of the hours gets a hint
UNKNOWN = "unknown: no speed is known for this device"
DEFAULT_BATCH = float(Train.model_fields["global_batch"].default)
DEFAULT_LR = float(Train.model_fields["lr"].default)

Line = tuple[str, str]
"""Name and text of a line."""
LayoutOptions = dict[str, Any]
"""Options of section `parallel` and sizes of the mesh axes (`config.parallel.Layout`), by name."""


class PlannedMemory(TypedDict):
    """Memory of the process that needs most."""

    parts_bytes: dict[str, int]  # by field of `planner.memory.Memory`
    total_bytes: int
    limit_bytes: int  # usable memory of the device
    device_bytes: int
    host_bytes: int  # pinned host memory for parallel.cpu_offload
    staging_bytes: int  # pinned host memory for a copy of the checkpoint


class Communication(TypedDict):
    """Bytes that the process that sends the most sends in a step."""

    link_bytes: dict[str, float]  # by kind of link: intra_node, inter_node
    collectives: list[
        dict[str, Any]
    ]  # fields of `planner.traffic.Traffic`, and bytes by kind of link


class Step(TypedDict):
    """Seconds of a step, as in `planner.step_time.StepTime`."""

    compute_s: float
    communication_s: float
    idle_s: float
    step_s: float


class RunPlan(TypedDict):
    """The content of plan.json. None stands for what an unknown device leaves unknown."""

    parameters: int  # of the whole model
    memory: PlannedMemory
    communication: Communication
    flops_per_step: float  # over all processes, without recomputation
    tokens_per_step: float
    tokens_per_cell: float
    tokens: float  # of the whole run
    cells: int  # training cells
    n_genes: int  # genes of the vocabulary
    steps: int
    steps_per_epoch: int
    cells_seen: int  # cells over all steps
    micro_batches_per_step: float  # mean over the steps
    validations: int
    val_cells: int  # cells per validation
    auto_steps: bool  # True if train.steps is auto
    micro_batch_tokens: int  # tokens of the largest micro-batch
    step: Step | None
    pipeline_idle_frac: float
    mfu: float | None  # fraction of the device's peak that a step reaches
    hours: float | None  # with validation
    validation_frac: float | None  # fraction of the hours
    gpu_hours: float | None
    nodes: int
    nproc_per_node: int
    world_size: int
    device: str
    layout: LayoutOptions
    mfu_frac: float  # plan.mfu_frac: fraction of the peak that computation is assumed to reach
    warmup_steps: int
    global_batch: int  # cells
    scaled_lr: list[float] | None  # by square root and linearly; None if nothing is to be scaled
    warnings: list[str]
    largest_micro_batch: int  # most tokens of a micro-batch that fit in memory
    genes_per_cell: float  # mean of detected genes
    cut_cells_frac: float  # fraction of cells with more genes than tokens.max_tokens
    fingerprint: str | None  # of the corpus; None for an assumed one


def describe_plan(
    cost: Cost,
    corpus: CorpusSize,
    hardware: Hardware,
    *,
    largest_micro_batch: int,
    genes_per_cell: float,
    cut_cells_frac: float,
    fingerprint: str | None,
) -> RunPlan:
    """Return the content of plan.json; the last four arguments are fields of `RunPlan`."""
    options = cost.options
    work = cost.work
    time = cost.time
    train = options.train
    collectives = []
    for part in cost.traffic:
        links = {
            "intra_node_bytes": part.intra_node_bytes,
            "inter_node_bytes": part.inter_node_bytes,
        }
        collectives.append(asdict(part) | links)
    step: Step | None = None
    if time is not None:
        step = Step(
            compute_s=time.compute_s,
            communication_s=time.communication_s,
            idle_s=time.idle_s,
            step_s=time.step_s,
        )
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
        "tokens_per_step": corpus.tokens_per_cell * work.cells_per_step,
        "tokens_per_cell": corpus.tokens_per_cell,
        "tokens": corpus.tokens_per_cell * work.cells_seen,
        "cells": corpus.n_cells,
        "n_genes": corpus.n_genes,
        "steps": work.steps,
        "steps_per_epoch": work.steps_per_epoch,
        "cells_seen": work.cells_seen,
        "micro_batches_per_step": work.micro_batches_per_step,
        "validations": work.validations,
        "val_cells": work.val_cells,
        "auto_steps": train.steps == "auto",
        "micro_batch_tokens": work.micro_tokens,
        "step": step,
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
        "scaled_lr": _scale_lr(train),
        "warnings": options.objective.warnings(),
        "largest_micro_batch": largest_micro_batch,
        "genes_per_cell": genes_per_cell,
        "cut_cells_frac": cut_cells_frac,
        "fingerprint": fingerprint,
    }


def _scale_lr(train: Train) -> list[float] | None:
    """Return the default learning rate scaled to another batch.

    It is scaled by the square root of their ratio (Adam; Malladi et al. 2022) and linearly (SGD;
    Goyal et al. 2017). None if batch or rate leave nothing to scale.
    """
    ratio = train.global_batch / DEFAULT_BATCH
    if train.lr != DEFAULT_LR or ratio == 1:
        return None
    return [train.lr * math.sqrt(ratio), train.lr * ratio]


def describe_layout(layout: LayoutOptions) -> str:
    """Return a layout in words."""
    kind = "ddp" if layout["strategy"] == "ddp" else layout["sharding_strategy"]
    sizes = f"{layout['dp_replicate']} replicas of {layout['dp_shard']} shards"
    if layout["tp"] > 1:
        sizes += f" x tp {layout['tp']}"
    if layout["pp"] > 1:
        sizes += f" x pp {layout['pp']} {layout['schedule']}"
    return f"{kind} ({sizes})"


def format_plan(plan: RunPlan) -> str:
    """Return the content of plan.json as lines of text."""
    lines = [
        *_format_work(plan),
        *_format_memory(plan),
        *_format_time(plan),
        *_format_hints(plan),
    ]
    return "\n".join(f"{name:<12}{text}" for name, text in lines)


def _format_work(plan: RunPlan) -> Iterator[Line]:
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
    steps = f"{plan['steps']:,} ({per_epoch:,} per epoch{auto})"
    yield "steps", f"{steps}, {plan['tokens']:,.0f} tokens in total"
    flops = f"{plan['flops_per_step']:.3g} FLOPs"
    micro_batches = f"{plan['micro_batches_per_step']:.1f} micro-batches per process"
    yield "step", f"{plan['tokens_per_step']:,.0f} tokens in {micro_batches}, {flops}"


def _format_memory(plan: RunPlan) -> Iterator[Line]:
    processes = f"{plan['world_size']} x {plan['device']}"
    layout = plan["layout"]
    yield "processes", f"{processes}, {describe_layout(layout)}, {layout['precision']}"
    memory = plan["memory"]
    parts = ", ".join(f"{name} {format_bytes(n)}" for name, n in memory["parts_bytes"].items() if n)
    if memory["host_bytes"]:
        parts += f"; {format_bytes(memory['host_bytes'])} of host memory"
    if memory["staging_bytes"]:
        parts += f"; {format_bytes(memory['staging_bytes'])} of pinned host memory for checkpoints"
    total = format_bytes(memory["total_bytes"])
    yield "memory", f"{total} of {format_bytes(memory['limit_bytes'])} per process: {parts}"
    memory_gb = find_device(plan["device"]).memory_gb
    # the memory is that of the named device, not plan.memory_gb
    is_named = memory_gb is not None and memory["device_bytes"] == round(memory_gb * GB)
    assumption = describe_assumption(plan["device"])
    if is_named and assumption:
        yield "assumed", assumption
    largest = f"{plan['largest_micro_batch']:,} would fit (train.token_budget)"
    yield "micro-batch", f"at most {plan['micro_batch_tokens']:,} tokens; {largest}"


def _format_time(plan: RunPlan) -> Iterator[Line]:
    link = plan["communication"]["link_bytes"]
    inside = format_bytes(link["intra_node"])
    between = format_bytes(link["inter_node"])
    yield "traffic", f"{inside} inside the node and {between} to other nodes, per process and step"
    step = plan["step"]
    if step is None:
        yield "step time", UNKNOWN
        yield "hours", UNKNOWN
        return
    exposed = f"exposed communication {step['communication_s']:.3g}, idle in the pipeline {step['idle_s']:.3g}"
    yield "step time", f"{step['step_s']:.3g} s: compute {step['compute_s']:.3g}, {exposed}"
    peak = f"{plan['mfu']:.0%} of the peak (compute alone at {plan['mfu_frac']:.0%})"
    yield "hours", f"{plan['hours']:,.3g}, {plan['gpu_hours']:,.3g} GPU hours at {peak}"
    if plan["layout"]["cpu_offload"] is not None:
        text = "copies between host and device of cpu_offload, and AdamW on the host"
        yield "not counted", text


def _format_hints(plan: RunPlan) -> Iterator[Line]:
    if plan["validations"]:
        text = f"{plan['validations']:,} times {plan['val_cells']:,} cells"
        validation_frac = plan["validation_frac"]
        if validation_frac is not None:
            text += f", {validation_frac:.0%} of the hours"
        if validation_frac is not None and validation_frac > LARGE_FRAC:
            text += ": lower train.val_cells or raise train.val_every_steps"
        yield "validation", text
    for warning in plan["warnings"]:
        yield "warning", warning
    if plan["scaled_lr"] is not None:
        root, linear = plan["scaled_lr"]
        scaled = f"{root:.2g} (square root, usual for AdamW) or {linear:.2g} (linear)"
        suits = f"train.lr {DEFAULT_LR:g} suits train.global_batch {DEFAULT_BATCH:g}"
        yield "hint", f"{suits}; scaled to {plan['global_batch']:,} it is {scaled}"
    if plan["warmup_steps"] >= plan["steps"]:
        text = f"train.warmup_steps {plan['warmup_steps']} leaves no step at the peak learning rate"
        yield "warning", text
