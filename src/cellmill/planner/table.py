"""A plan as the content of plan.json and as a printed table."""

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from cellmill.config.options import PlanOptions
from cellmill.config.run import AUTO_EPOCHS, Train
from cellmill.planner.cost import GB, Cost, Hardware, amount, layout_words
from cellmill.planner.devices import assumption, device_named
from cellmill.planner.memory import host_bytes, idle_frac, link_bytes, staging_bytes
from cellmill.planner.work import Cells

OF_WORK = ("steps", "steps_per_epoch", "cells_seen", "micro_batches_per_step", "validations", "val_cells")
LARGE_FRAC = 0.2  # validation above this fraction of the hours gets a hint
UNKNOWN = "unknown: no speed is known for this device"
DEFAULT_BATCH, DEFAULT_LR = (float(Train.model_fields[name].default) for name in ("global_batch", "lr"))


def describe(options: PlanOptions, cells: Cells, hardware: Hardware, cost: Cost) -> dict[str, Any]:
    work, time = cost.work, cost.time
    collectives = [
        {**asdict(part), "intra_node_bytes": part.intra_node_bytes, "inter_node_bytes": part.inter_node_bytes}
        for part in cost.traffic
    ]
    return {
        "parameters": cost.whole.parameters,
        "memory": {
            "parts_bytes": asdict(cost.memory),
            "total_bytes": cost.memory.total,
            "limit_bytes": hardware.usable_bytes,
            "device_bytes": hardware.device_bytes,
            "host_bytes": 0 if hardware.device == "cpu" else host_bytes(cost.model),
            "staging_bytes": 0 if hardware.device == "cpu" else staging_bytes(cost.model),
        },
        "communication": {"link_bytes": link_bytes(cost.traffic), "collectives": collectives},
        "flops_per_step": cost.flops_per_step,
        "tokens_per_step": cells.tokens_per_cell * work.cells_per_step,
        "tokens_per_cell": cells.tokens_per_cell,
        "tokens": cells.tokens_per_cell * work.cells_seen,
        "cells": cells.n,
        "n_genes": cells.n_genes,
        **{name: getattr(work, name) for name in OF_WORK},
        "auto_steps": options.train.steps == "auto",
        "micro_batch_tokens": work.micro_tokens,
        "step": None if time is None else {**asdict(time), "step_s": time.step_s},
        "pipeline_idle_frac": idle_frac(options.parallel, work.most_micro_batches),
        **{name: getattr(cost, name) for name in ("mfu", "hours", "validation_frac", "gpu_hours")},
        "nodes": hardware.nodes,
        "nproc_per_node": hardware.nproc_per_node,
        "world_size": hardware.world,
        "device": hardware.device,
        "layout": options.parallel.model_dump(mode="json") | asdict(cost.model.layout),
        "mfu_frac": options.plan.mfu_frac,
        "warmup_steps": options.train.warmup_steps,
        "global_batch": options.train.global_batch,
        "scaled_lr": scaled_lr(options.train),
        "warnings": options.objective.warnings(),
    }


def scaled_lr(train: Train) -> list[float] | None:
    """Scale the default `lr` to the batch: by its square root (Adam; Malladi et al. 2022) and linearly (SGD; Goyal et
    al. 2017). None with the default batch or another `lr`.
    """
    ratio = train.global_batch / DEFAULT_BATCH
    return None if train.lr != DEFAULT_LR or ratio == 1 else [train.lr * math.sqrt(ratio), train.lr * ratio]


def table(plan: dict[str, Any]) -> str:
    """Return a plan, the content of plan.json, as lines of text."""
    return "\n".join(f"{name:<12}{text}" for name, text in _rows(plan) if text)


def _rows(plan: dict[str, Any]) -> Iterator[tuple[str, str]]:
    memory, sizes, link, step = plan["memory"], plan["layout"], plan["communication"]["link_bytes"], plan["step"]
    yield "parameters", f"{plan['parameters']:,} over {plan['n_genes']:,} genes"
    cut = ""
    if plan["cut_cells_frac"]:
        cut = f" of {plan['genes_per_cell']:,.0f} genes: tokens.max_tokens cuts {plan['cut_cells_frac']:.0%} of cells"
    yield "cells", f"{plan['cells']:,} for training, {plan['tokens_per_cell']:,.0f} tokens each{cut}"
    per_epoch, auto = plan["steps_per_epoch"], ""
    if plan["auto_steps"]:
        enough = AUTO_EPOCHS * per_epoch
        auto = f"; auto: {AUTO_EPOCHS} epochs"
        auto += f" are {enough:,}, raised to the minimum" if enough < plan["steps"] else ""
    yield "steps", f"{plan['steps']:,} ({per_epoch:,} per epoch{auto}), {plan['tokens']:,.0f} tokens in total"
    micro_batches = (
        f"{plan['micro_batches_per_step']:.1f} micro-batches per process, {plan['flops_per_step']:.3g} FLOPs"
    )
    yield "step", f"{plan['tokens_per_step']:,.0f} tokens in {micro_batches}"
    yield "processes", f"{plan['world_size']} x {plan['device']}, {layout_words(sizes)}, {sizes['precision']}"
    parts = ", ".join(f"{name} {amount(n)}" for name, n in memory["parts_bytes"].items() if n)
    parts += f"; {amount(memory['host_bytes'])} of host memory" if memory["host_bytes"] else ""
    if memory["staging_bytes"]:
        parts += f"; {amount(memory['staging_bytes'])} of pinned host memory for checkpoints"
    yield "memory", f"{amount(memory['total_bytes'])} of {amount(memory['limit_bytes'])} per process: {parts}"
    memory_gb = device_named(plan["device"]).memory_gb
    if memory_gb is not None and memory["device_bytes"] == round(memory_gb * GB):  # not the plan's own
        yield "assumed", assumption(plan["device"])
    largest = f"{plan['largest_micro_batch']:,} would fit (train.token_budget)"
    yield "micro-batch", f"at most {plan['micro_batch_tokens']:,} tokens; {largest}"
    inside, between = amount(link["intra_node"]), amount(link["inter_node"])
    yield "traffic", f"{inside} inside the node and {between} to other nodes, per process and step"
    if step is None:
        yield from (("step time", UNKNOWN), ("hours", UNKNOWN))
    else:
        exposed = f"exposed communication {step['communication_s']:.3g}, idle in the pipeline {step['idle_s']:.3g}"
        yield "step time", f"{step['step_s']:.3g} s: compute {step['compute_s']:.3g}, {exposed}"
        peak = f"{plan['mfu']:.0%} of the peak (compute alone at {plan['mfu_frac']:.0%})"
        yield "hours", f"{plan['hours']:,.3g}, {plan['gpu_hours']:,.3g} GPU hours at {peak}"
        if sizes["cpu_offload"] is not None:
            yield "not counted", "copies between host and device of cpu_offload, and AdamW on the host"
    if plan["validations"]:
        share, hint = plan["validation_frac"], ""
        if share is not None:
            hint = f", {share:.0%} of the hours"
            hint += ": lower train.val_cells or raise train.val_every_steps" if share > LARGE_FRAC else ""
        yield "validation", f"{plan['validations']:,} times {plan['val_cells']:,} cells{hint}"
    yield from (("warning", line) for line in plan["warnings"])
    if plan["scaled_lr"] is not None:
        root, linear = plan["scaled_lr"]
        yield (
            "hint",
            f"train.lr {DEFAULT_LR:g} suits train.global_batch {DEFAULT_BATCH:g}; scaled to "
            f"{plan['global_batch']:,} it is {root:.2g} (square root, usual for AdamW) or {linear:.2g} (linear)",
        )
    if plan["warmup_steps"] >= plan["steps"]:
        yield "warning", f"train.warmup_steps {plan['warmup_steps']} leaves no step at the peak learning rate"
