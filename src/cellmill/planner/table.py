"""A plan as plan.json and as lines to read. Torch-free."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from cellmill.config.options import PlanOptions
from cellmill.models.build import ModelSpec
from cellmill.planner.bubble import idle_frac
from cellmill.planner.cost import Cost, describe_traffic, links
from cellmill.planner.fit import Hardware, amount
from cellmill.planner.memory import host_bytes_per_rank
from cellmill.planner.size import measure, size_of

LARGE_FRAC = 0.2  # of the hours, for validations


def describe(options: PlanOptions, cost: Cost, place: Hardware) -> dict[str, Any]:
    """plan.json, but for what is said of the corpus."""
    work, time, limit = cost.work, cost.time, place.limit
    tokens_per_step = work.tokens_per_cell * work.cells_per_step
    return {
        "parameters": measure(ModelSpec.of(options, work.n_genes), finetune=options.finetune).parameters,
        "memory": {
            "parts_bytes": asdict(cost.memory),
            "total_bytes": cost.memory.total,
            "limit_bytes": limit.usable,
            "device_bytes": limit.whole,
            "host_bytes": _host_bytes(options, cost, place),
        },
        "communication": {"link_bytes": links(cost.traffic), "collectives": describe_traffic(cost.traffic)},
        "flops_per_step": cost.flops_per_step,
        "tokens_per_step": tokens_per_step,
        "tokens_per_cell": work.tokens_per_cell,
        "tokens": work.tokens_per_cell * work.cells_seen,
        "cells": work.cells,
        "cells_seen": work.cells_seen,
        "n_genes": work.n_genes,
        "steps": work.steps,
        "steps_per_epoch": work.steps_per_epoch,
        "micro_batches_per_step": work.micro_batches_per_step,
        "micro_batch_tokens": work.micro_tokens,
        "step": None if time is None else {**asdict(time), "step_s": time.step_s},
        "pipeline_idle_frac": idle_frac(options.parallel, work.most_micro_batches),
        "mfu": cost.mfu,
        "hours": cost.hours,
        "validation_frac": cost.validation_frac,
        "validations": work.validations,
        "val_cells": work.val_cells,
        "gpu_hours": cost.gpu_hours,
        "nodes": place.nodes,
        "nproc_per_node": place.nproc_per_node,
        "world_size": place.world,
        "device": place.device,
        "layout": options.parallel.model_dump(mode="json") | asdict(cost.sizes),
        "mfu_frac": options.plan.mfu_frac,
        "warmup_steps": options.train.warmup_steps,
    }


def table(plan: dict[str, Any]) -> str:
    """A plan as lines to read."""
    memory, sizes, link = plan["memory"], plan["layout"], plan["communication"]["link_bytes"]
    parts = ", ".join(f"{name} {amount(n)}" for name, n in memory["parts_bytes"].items() if n)
    cut = ""
    if plan["cut_cells_frac"]:
        cut = f" of {plan['genes_per_cell']:,.0f} genes: tokens.max_tokens cuts {plan['cut_cells_frac']:.0%} of them"
    rows = {
        "parameters": f"{plan['parameters']:,} over {plan['n_genes']:,} genes",
        "cells": f"{plan['cells']:,} for training, {plan['tokens_per_cell']:,.0f} tokens each{cut}",
        "steps": f"{plan['steps']:,} ({plan['steps_per_epoch']:,} an epoch), {plan['tokens']:,.0f} tokens in all",
        "a step": f"{plan['tokens_per_step']:,.0f} tokens in {plan['micro_batches_per_step']:.1f} micro-batches a "
        f"process, {plan['flops_per_step']:.3g} FLOPs",
        "processes": f"{plan['world_size']} x {plan['device']}, {layout_words(sizes)}, {sizes['precision']}",
        "memory": f"{amount(memory['total_bytes'])} of {amount(memory['limit_bytes'])} on each: {parts}",
        "micro-batch": f"{plan['micro_batch_tokens']:,} tokens at most; {plan['largest_micro_batch']:,} would fit "
        "(train.token_budget)",
        "sent": f"{amount(link['intra_node'])} inside the node and {amount(link['inter_node'])} to others, by each in "
        "a step",
        "step time": _seconds(plan["step"]),
        "hours": _hours(plan),
    }
    if memory["host_bytes"]:
        rows["memory"] += f"; {amount(memory['host_bytes'])} of the host's for each"
    if sizes["cpu_offload"] is not None and plan["hours"] is not None:
        rows["not counted"] = "what cpu_offload copies between host and device, and the host's AdamW"
    if plan["validations"]:
        rows["validation"] = f"{plan['validations']:,} times {plan['val_cells']:,} cells"
        if plan["validation_frac"] is not None:
            rows["validation"] += f", {plan['validation_frac']:.0%} of the hours"
            if plan["validation_frac"] > LARGE_FRAC:
                rows["validation"] += ": lower train.val_cells or raise train.val_every_steps"
    if plan["warmup_steps"] >= plan["steps"]:
        rows["warning"] = f"train.warmup_steps {plan['warmup_steps']} leaves no step at the peak learning rate"
    return "\n".join(f"{name:<12}{value}" for name, value in rows.items())


def layout_words(sizes: dict[str, Any]) -> str:
    """A layout in a few words."""
    kind = "ddp" if sizes["strategy"] == "ddp" else sizes["sharding_strategy"]
    tensor = "" if sizes["tp"] == 1 else f" x tp {sizes['tp']}"
    pipeline = "" if sizes["pp"] == 1 else f" x pp {sizes['pp']} {sizes['schedule']}"
    return f"{kind} ({sizes['dp_replicate']} replicas of {sizes['dp_shard']} shards{tensor}{pipeline})"


def _host_bytes(options: PlanOptions, cost: Cost, place: Hardware) -> int:
    own = size_of(options, cost.work.n_genes)
    return 0 if place.device == "cpu" else host_bytes_per_rank(own, options.parallel, cost.sizes)


def _seconds(step: dict[str, float] | None) -> str:
    if step is None:
        return "unknown: no speed is known of this device"
    return (
        f"{step['step_s']:.3g} s: computing {step['compute_s']:.3g}, communication beside it "
        f"{step['communication_s']:.3g}, idle in the pipeline {step['idle_s']:.3g}"
    )


def _hours(plan: dict[str, Any]) -> str:
    if plan["hours"] is None:
        return "unknown: no peak is known for this device"
    return (
        f"{plan['hours']:,.3g}, {plan['gpu_hours']:,.3g} GPU hours at {plan['mfu']:.0%} of the peak "
        f"(computing at {plan['mfu_frac']:.0%})"
    )
