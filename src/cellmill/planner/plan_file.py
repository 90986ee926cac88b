"""The content of plan.json, and the same as lines of text."""

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from cellmill.config.run import AUTO_EPOCHS, Train
from cellmill.planner.cost import Cost, format_hours
from cellmill.planner.devices import GB, describe_assumption, find_device
from cellmill.planner.hardware import Hardware
from cellmill.planner.memory import HostBytes, format_bytes, host_bytes
from cellmill.planner.schedules import idle_frac
from cellmill.planner.traffic import link_bytes
from cellmill.planner.work import CorpusSize

LARGE_FRAC = 0.1  # validation above this fraction of the time gets a hint
UNKNOWN = "unknown: no speed is known for this device"
DEFAULT_BATCH = float(Train.model_fields["global_batch"].default)
DEFAULT_LR = float(Train.model_fields["lr"].default)

Plan = dict[str, Any]
"""The content of plan.json; `make_plan` lists its keys."""
Line = tuple[str, str]
"""Name and text of a line."""
LayoutOptions = dict[str, Any]
"""Options of section `parallel` and sizes of the mesh axes (`config.parallel.Layout`), by name."""


def make_plan(
    cost: Cost,
    corpus: CorpusSize,
    hardware: Hardware,
    *,
    largest_micro_batch: int,
    genes_per_cell: float,
    cut_cells_frac: float,
    fingerprint: str | None,
) -> Plan:
    """Return the content of plan.json.

    The keyword arguments are stored as given. Values that need the device's speed are None if it is
    unknown.
    """
    options = cost.options
    work = cost.work
    time = cost.time
    train = options.train
    collectives = []
    for part in cost.traffic:
        links = {f"{link}_bytes": n_bytes for link, n_bytes in link_bytes([part]).items()}
        entry = asdict(part) | links
        # plan.json keeps its key
        entry["in_a_node"] = entry.pop("processes_per_node")
        collectives.append(entry)
    host = HostBytes(0, 0) if hardware.device == "cpu" else host_bytes(cost.model)
    return {
        "parameters": cost.whole.parameters,  # of the whole model
        "memory": {
            "parts_bytes": asdict(cost.memory),  # by field of `planner.memory.Memory`
            "total_bytes": cost.memory.total,
            "limit_bytes": hardware.usable_bytes,  # usable memory of the device
            "device_bytes": hardware.device_bytes,
            "host_bytes": host.offload,  # pinned host memory for parallel.cpu_offload
            "staging_bytes": host.staging,  # pinned host memory for a copy of the checkpoint
        },
        "communication": {"link_bytes": link_bytes(cost.traffic), "collectives": collectives},
        "flops_per_step": cost.flops_per_step,  # over all processes, without recomputation
        "tokens_per_step": corpus.tokens_per_cell * work.cells_per_step,
        "tokens_per_cell": corpus.tokens_per_cell,
        "tokens": corpus.tokens_per_cell * work.cells_seen,  # of the whole run
        "cells": corpus.n_cells,  # training cells
        "n_genes": corpus.n_genes,  # genes of the vocabulary
        "steps": work.steps,
        "steps_per_epoch": work.steps_per_epoch,
        "cells_seen": work.cells_seen,  # cells over all steps
        "micro_batches_per_step": work.micro_batches_per_step,  # mean over the sampled first steps
        "validations": work.validations,
        "val_cells": work.val_cells,  # cells per validation
        "auto_steps": train.steps == "auto",  # True if train.steps is auto
        "micro_batch_tokens": work.micro_tokens,  # tokens of the largest micro-batch
        "step": time and {**asdict(time.step), "step_s": time.step.step_s},
        "pipeline_idle_frac": idle_frac(options.parallel, work.max_micro_batches_per_step),
        "mfu": time and time.mfu,  # fraction of the device's peak that a step reaches
        "hours": time and time.hours,  # with validation
        "validation_frac": time and time.validation_frac,  # fraction of the hours
        "gpu_hours": time and time.gpu_hours,
        "nodes": hardware.nodes,
        "nproc_per_node": hardware.nproc_per_node,
        "world_size": hardware.world,
        "device": hardware.device,
        "layout": options.parallel.model_dump(mode="json") | asdict(cost.model.layout),
        # plan.mfu_frac: fraction of the peak that computation is assumed to reach
        "mfu_frac": options.plan.mfu_frac,
        "warmup_steps": train.warmup_steps,
        "global_batch": train.global_batch,  # cells
        # by square root and linearly; None if batch or learning rate leave nothing to scale
        "scaled_lr": _scale_lr(train),
        "choices": options.objective.choices(),  # what options take from the corpus, and why
        "warnings": options.objective.warnings(),
        # most tokens of a micro-batch that fit in memory
        "largest_micro_batch": largest_micro_batch,
        "genes_per_cell": genes_per_cell,  # mean of detected genes
        # fraction of cells with more genes than tokens.max_tokens
        "cut_cells_frac": cut_cells_frac,
        "fingerprint": fingerprint,  # of the corpus; None for an assumed one
    }


def _scale_lr(train: Train) -> list[float] | None:
    """Return the default learning rate scaled to the run's batch.

    It is scaled by the square root of the ratio of batch sizes (Adam; Malladi et al. 2022) and
    linearly (SGD; Goyal et al. 2017). None if the run keeps the default batch or sets another
    train.lr.
    """
    ratio = train.global_batch / DEFAULT_BATCH
    if train.lr != DEFAULT_LR or ratio == 1:
        return None
    return [train.lr * math.sqrt(ratio), train.lr * ratio]


def _suggest_val_cells(plan: Plan) -> int:
    """Number of validation cells that takes LARGE_FRAC of the hours, of two digits.

    Validation is a forward pass, a third of a step.
    """
    cells = 3 * plan["cells_seen"] * LARGE_FRAC / (1 - LARGE_FRAC) / plan["validations"]
    unit = 10 ** max(0, int(math.log10(max(cells, 1))) - 1)
    return max(1, int(cells) // unit * unit)


def describe_layout(layout: LayoutOptions) -> str:
    """Return a layout in words."""
    kind = "ddp" if layout["strategy"] == "ddp" else layout["sharding_strategy"]
    data = f"{layout['dp_replicate']} replicas of {layout['dp_shard']} shards"
    tensor = "" if layout["tp"] == 1 else f" x tp {layout['tp']}"
    pipeline = "" if layout["pp"] == 1 else f" x pp {layout['pp']} {layout['schedule']}"
    return f"{kind} ({data}{tensor}{pipeline})"


def format_plan(plan: Plan) -> str:
    """Return the content of plan.json as lines of text."""
    lines = [
        *_format_work(plan),
        *_format_memory(plan),
        *_format_time(plan),
        *_format_hints(plan),
    ]
    return "\n".join(format_line(*line) for line in lines)


def format_line(name: str, text: str) -> str:
    return f"{name:<12}{text}"


def _format_work(plan: Plan) -> Iterator[Line]:
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


def _format_memory(plan: Plan) -> Iterator[Line]:
    processes = f"{plan['world_size']} x {plan['device']}"
    layout = plan["layout"]
    yield "processes", f"{processes}, {describe_layout(layout)}, {layout['precision']}"
    memory = plan["memory"]
    parts = ", ".join(f"{name} {format_bytes(n)}" for name, n in memory["parts_bytes"].items() if n)
    if memory["host_bytes"]:
        pinned = format_bytes(memory["host_bytes"])
        parts += f"; {pinned} of pinned host memory for parallel.cpu_offload"
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


def _format_time(plan: Plan) -> Iterator[Line]:
    link = plan["communication"]["link_bytes"]
    inside = format_bytes(link["intra_node"])
    between = format_bytes(link["inter_node"])
    yield "traffic", f"{inside} inside the node and {between} to other nodes, per process and step"
    step = plan["step"]
    if step is None:
        yield "step time", UNKNOWN
        return
    exposed = f"exposed communication {step['communication_s']:.3g}, idle in the pipeline {step['idle_s']:.3g}"
    yield "step time", f"{step['step_s']:.3g} s: compute {step['compute_s']:.3g}, {exposed}"
    peak = f"{plan['mfu']:.0%} of the peak"
    if round(plan["mfu"], 2) < round(plan["mfu_frac"], 2):
        peak += f", which is {plan['mfu_frac']:.0%} (plan.mfu_frac) while a process computes"
    gpu_time = format_hours(plan["gpu_hours"])
    yield "time", f"{format_hours(plan['hours'])} of training, GPU time {gpu_time} at {peak}"
    if plan["layout"]["cpu_offload"] is not None:
        text = "copies between host and device of cpu_offload, and AdamW on the host"
        yield "not counted", text


def _format_hints(plan: Plan) -> Iterator[Line]:
    if plan["validations"]:
        text = f"{plan['validations']:,} times {plan['val_cells']:,} cells"
        validation_frac = plan["validation_frac"]
        if validation_frac is not None:
            text += f", {validation_frac:.0%} of the time"
        if validation_frac is not None and validation_frac > LARGE_FRAC:
            text += f"; train.val_cells: {_suggest_val_cells(plan)} takes {LARGE_FRAC:.0%}"
        yield "validation", text
    yield from plan["choices"].items()
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
