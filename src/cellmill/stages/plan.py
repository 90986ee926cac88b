"""plan: what a run will take, by arithmetic alone, before a device is asked for.

Imports no torch and reads no cell, only where rows begin. A run that cannot work is refused here in one line, which
names what is needed, what there is and the first thing to change.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cellmill.config.layout import Layout, layout
from cellmill.config.machine import Machine
from cellmill.config.options import PlanOptions, TrainOptions
from cellmill.config.run import Parallel
from cellmill.data.epoch import Layout as EpochLayout
from cellmill.data.epoch import cut_batch
from cellmill.data.manifest import Manifest
from cellmill.data.shards import open_shards
from cellmill.errors import ConfigError
from cellmill.files import write_json
from cellmill.parallel.devices import Device, device_named
from cellmill.parallel.memory import Memory, host_bytes_per_rank, memory_per_rank
from cellmill.stages.checks import check_run
from cellmill.train.schedule import total_steps

GB = 1e9
SAMPLED_STEPS = 64  # over which micro-batches are counted: shards are preshuffled, so any stretch is like another


def run(*, options: PlanOptions, manifest: Path, out: Path, machine: Machine, device: str) -> None:
    """Writes plan.json to `out` and prints it as a table. Raises ConfigError when the run cannot work."""
    known = device_named(device)
    opened, nproc_per_node = Manifest.read(manifest), machine.nproc_per_node
    for nodes in machine.node_counts:
        check_run(_train_options(options), nodes, nproc_per_node, opened.splits["train"].n_obs)
    nodes = machine.node_counts[0]  # of a range the fewest: a process then holds the most
    world = nodes * nproc_per_node
    sizes = layout(options.parallel, world, nproc_per_node)
    detected = detected_genes(opened)
    lengths = np.minimum(detected, options.tokens.max_tokens)
    work = measure_work(options, lengths, sizes.dp, int(opened.vocabulary["n_genes"]))
    limit = memory_limit(options, known, nproc_per_node)
    memory = check_memory(options, work, limit, nodes, nproc_per_node, device)
    plan = describe(options, work, memory, nodes, nproc_per_node)
    plan["device"] = device
    plan["genes_per_cell"] = float(detected.mean())
    plan["cut_cells_frac"] = float((detected > lengths).mean())
    plan["warmup_steps"] = options.train.warmup_steps
    plan["memory"] |= {"limit_bytes": limit.usable, "device_bytes": limit.whole}
    plan |= hours(options, known, work, world)
    plan["fingerprint"] = opened.fingerprint
    write_json(out, plan)
    print(table(plan), flush=True)


@dataclass(frozen=True)
class Work:
    """What an epoch and a step of it consist of."""

    n_genes: int
    cells: int
    """Of an epoch."""
    tokens_per_cell: float
    pairs_per_cell: float
    """(query, key) pairs of attention."""
    longest: int
    """Tokens of the largest cell."""
    steps: int
    steps_per_epoch: int
    cells_per_step: int
    cells_seen: int
    """Over all steps."""
    micro_batches_per_step: float
    """On average; the same on every rank."""
    most_micro_batches: int


@dataclass(frozen=True)
class Limit:
    """Memory of one process, in bytes."""

    whole: int
    usable: int


def detected_genes(manifest: Manifest) -> np.ndarray:
    """(cells,) int64: genes of the vocabulary detected in each training cell, in the order of the shards."""
    lengths = []
    for shard in open_shards(manifest, "train"):
        lengths.append(np.diff(shard.indptr).astype(np.int64))
        shard.close()
    return np.concatenate(lengths)


def measure_work(options: PlanOptions, lengths: np.ndarray, world: int, n_genes: int) -> Work:
    """Steps, tokens and micro-batches, from the lengths of the training cells, of which `world` take each a share."""
    train, stream, cells = options.train, options.stream, len(lengths)
    epoch = EpochLayout(
        (cells,), stream.lanes, stream.block_cells, stream.window_blocks, train.global_batch, train.seed, True
    )
    steps = total_steps(train, epoch.steps_per_epoch)
    epochs, rest = divmod(steps, epoch.steps_per_epoch)
    micro_batches = count_micro_batches(lengths, train.global_batch, train.token_budget, world)
    return Work(
        n_genes=n_genes,
        cells=cells,
        tokens_per_cell=float(lengths.mean()),
        pairs_per_cell=float(np.square(lengths.astype(np.float64)).mean()),
        longest=int(lengths.max()),
        steps=steps,
        steps_per_epoch=epoch.steps_per_epoch,
        cells_per_step=min(train.global_batch, cells),
        cells_seen=epochs * cells + min(rest * train.global_batch, cells),
        micro_batches_per_step=float(np.mean(micro_batches)),
        most_micro_batches=max(micro_batches),
    )


def count_micro_batches(lengths: np.ndarray, global_batch: int, token_budget: int, world: int) -> list[int]:
    """Micro-batches of each of the first steps, were cells taken as they lie: the most that any rank needs."""
    share = -(-min(global_batch, len(lengths)) // world)
    counts = []
    for first in range(0, len(lengths), global_batch)[:SAMPLED_STEPS]:
        batch = lengths[first : first + global_batch]
        ranks = [batch[at : at + share] for at in range(0, len(batch), share)]
        counts.append(max(len(cut_batch(rank, token_budget)) - 1 for rank in ranks))
    return counts


def memory_limit(options: PlanOptions, device: Device, nproc_per_node: int) -> Limit:
    """What one process may use: as configured, of its device, or its share of this machine."""
    memory_gb = options.plan.memory_gb if options.plan.memory_gb is not None else device.memory_gb
    if memory_gb is None:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // nproc_per_node
    else:
        whole = round(memory_gb * GB)
    return Limit(whole, int(whole * options.plan.memory_frac))


def need(options: PlanOptions, work: Work, nodes: int, nproc_per_node: int) -> Memory:
    """Memory of each process of a run with these options."""
    parallel = options.parallel
    sizes = layout(parallel, nodes * nproc_per_node, nproc_per_node)
    share = -(-work.cells_per_step // sizes.dp)
    return memory_per_rank(
        options.model.size(work.n_genes, options.tokens, parallel.tp, parallel.sequence_parallel),
        parallel,
        sizes,
        min(options.train.token_budget, share * work.longest),
        work.most_micro_batches,
    )


def check_memory(
    options: PlanOptions, work: Work, limit: Limit, nodes: int, nproc_per_node: int, device: str
) -> Memory:
    """What the run needs. Raises ConfigError with the first change that would make it fit when it does not."""
    if device == "cpu":  # there is no other memory to put anything in
        options = options.model_copy(update={"parallel": options.parallel.model_copy(update={"cpu_offload": None})})
    memory = need(options, work, nodes, nproc_per_node)
    if memory.total <= limit.usable:
        return memory
    largest = max(asdict(memory), key=lambda part: asdict(memory)[part])
    raise ConfigError(
        f"needs {_gb(memory.total)} on each process, {_gb(getattr(memory, largest))} of it {largest}, but {device} has "
        f"{_gb(limit.usable)} to use ({options.plan.memory_frac:.0%} of {_gb(limit.whole)}): "
        f"{remedy(options, work, limit, nodes, nproc_per_node)}"
    )


def remedy(options: PlanOptions, work: Work, limit: Limit, nodes: int, nproc_per_node: int) -> str:
    """The first change, or the fewest on top of each other, after which the run fits."""
    changes: list[str] = []
    parallel = options.parallel
    if parallel.activation_checkpointing is None:
        parallel = parallel.model_copy(update={"activation_checkpointing": "full"})
        options = options.model_copy(update={"parallel": parallel})
        changes.append("set parallel.activation_checkpointing to full")
        if need(options, work, nodes, nproc_per_node).total <= limit.usable:
            return changes[0]
    smaller = _smaller_budget(options, work, limit, nodes, nproc_per_node)
    if smaller is not None:
        return " and ".join([*changes, f"lower train.token_budget to {smaller}"])
    everything = Parallel.model_validate(
        parallel.model_dump() | {"strategy": "fsdp", "sharding_strategy": "FULL_SHARD", "shard_size": None}
    )
    if layout(everything, nodes * nproc_per_node, nproc_per_node) != layout(
        parallel, nodes * nproc_per_node, nproc_per_node
    ):
        options = options.model_copy(update={"parallel": everything})
        changes.append("use fsdp with parallel.sharding_strategy FULL_SHARD")
        if need(options, work, nodes, nproc_per_node).total <= limit.usable:
            return " and ".join(changes)
    options = options.model_copy(update={"parallel": everything})
    cut = options.model.cut_by_tp().values()
    for tp in range(everything.tp + 1, nproc_per_node + 1 if cut else 0):
        if nproc_per_node % tp or any(size % tp for size in cut):
            continue
        spread = everything.model_copy(update={"tp": tp, "sequence_parallel": True})
        if need(options.model_copy(update={"parallel": spread}), work, nodes, nproc_per_node).total <= limit.usable:
            return " and ".join([*changes, f"set parallel.tp to {tp} with parallel.sequence_parallel"])
    for more in (nodes * 2**k for k in range(1, 8)):
        if need(options, work, more, nproc_per_node).total <= limit.usable:
            return " and ".join([*changes, f"use {more} nodes (the profile)"])
    return "use a device with more memory (the profile) or a smaller model"


def _smaller_budget(options: PlanOptions, work: Work, limit: Limit, nodes: int, nproc_per_node: int) -> int | None:
    """The largest power of two below the budget that fits and still holds the largest cell."""
    budget = 1 << (options.train.token_budget - 1).bit_length() - 1
    while budget >= max(1, options.tokens.max_tokens):
        train = options.train.model_copy(update={"token_budget": budget})
        # a smaller budget means several micro-batches, whose gradients are kept whole until they are reduced
        several = Work(**{**asdict(work), "most_micro_batches": max(2, work.most_micro_batches)})
        changed = options.model_copy(update={"train": train})
        if need(changed, several, nodes, nproc_per_node).total <= limit.usable:
            return budget
        budget //= 2
    return None


def flops(options: PlanOptions, work: Work) -> float:
    """FLOPs of one cell on average, forward and backward."""
    size = options.model.size(work.n_genes, options.tokens)
    return size.flops_per_token * work.tokens_per_cell + size.flops_per_token_pair * work.pairs_per_cell


def hours(options: PlanOptions, device: Device, work: Work, world: int) -> dict[str, float | None]:
    """Expected `hours` and `gpu_hours` at the assumed utilisation; null where the device's peak is not known."""
    peak = device.bf16_flops if options.parallel.low else device.fp32_flops
    if peak is None:
        return {"hours": None, "gpu_hours": None}
    gpu_hours = flops(options, work) * work.cells_seen / (peak * options.plan.mfu_frac) / 3600
    return {"hours": gpu_hours / world, "gpu_hours": gpu_hours}


def describe(options: PlanOptions, work: Work, memory: Memory, nodes: int, nproc_per_node: int) -> dict[str, Any]:
    """plan.json, but for what depends on the device."""
    parallel = options.parallel
    sizes = layout(parallel, nodes * nproc_per_node, nproc_per_node)
    own = options.model.size(work.n_genes, options.tokens, parallel.tp, parallel.sequence_parallel)
    host = host_bytes_per_rank(own, parallel, sizes)
    return {
        "parameters": options.model.size(work.n_genes, options.tokens).parameters,
        "memory": {"parts_bytes": asdict(memory), "total_bytes": memory.total, "host_bytes": host},
        "flops_per_step": flops(options, work) * work.cells_per_step,
        "tokens_per_step": work.tokens_per_cell * work.cells_per_step,
        "tokens_per_cell": work.tokens_per_cell,
        "tokens": work.tokens_per_cell * work.cells_seen,
        "cells": work.cells,
        "cells_seen": work.cells_seen,
        "n_genes": work.n_genes,
        "steps": work.steps,
        "steps_per_epoch": work.steps_per_epoch,
        "micro_batches_per_step": work.micro_batches_per_step,
        "nodes": nodes,
        "nproc_per_node": nproc_per_node,
        "world_size": nodes * nproc_per_node,
        "layout": options.parallel.model_dump(mode="json") | asdict(sizes),
        "mfu_frac": options.plan.mfu_frac,
    }


def table(plan: dict[str, Any]) -> str:
    """A plan as lines to read."""
    memory, sizes = plan["memory"], plan["layout"]
    kind = "ddp" if sizes["strategy"] == "ddp" else sizes["sharding_strategy"]
    parts = ", ".join(f"{name} {_gb(n)}" for name, n in memory["parts_bytes"].items() if n)
    time = "unknown: no peak is known for this device"
    if plan["hours"] is not None:
        time = f"{plan['hours']:,.3g}, {plan['gpu_hours']:,.3g} GPU hours at {plan['mfu_frac']:.0%} of the peak"
    shared = Layout(sizes["dp_replicate"], sizes["dp_shard"], sizes["tp"], sizes["pp"]).shared
    cut = ""
    if plan["cut_cells_frac"]:
        cut = f" of {plan['genes_per_cell']:,.0f} genes: tokens.max_tokens cuts {plan['cut_cells_frac']:.0%} of them"
    rows = {
        "parameters": f"{plan['parameters']:,} over {plan['n_genes']:,} genes",
        "cells": f"{plan['cells']:,} for training, {plan['tokens_per_cell']:,.0f} tokens each{cut}",
        "steps": f"{plan['steps']:,} ({plan['steps_per_epoch']:,} an epoch), {plan['tokens']:,.0f} tokens in all",
        "a step": f"{plan['tokens_per_step']:,.0f} tokens in {plan['micro_batches_per_step']:.1f} micro-batches a "
        f"process, {plan['flops_per_step']:.3g} FLOPs",
        "processes": f"{plan['world_size']} x {plan['device']}, {kind} "
        f"({sizes['dp_replicate']} replicas of {sizes['dp_shard']} shards{shared}), {sizes['precision']}",
        "memory": f"{_gb(memory['total_bytes'])} of {_gb(memory['limit_bytes'])} on each: {parts}",
        "hours": time,
    }
    if memory["host_bytes"] and plan["device"] != "cpu":
        rows["memory"] += f"; {_gb(memory['host_bytes'])} of the host's for each"
    if plan["warmup_steps"] >= plan["steps"]:
        rows["warning"] = f"train.warmup_steps {plan['warmup_steps']} leaves no step at the peak learning rate"
    return "\n".join(f"{name:<12}{value}" for name, value in rows.items())


def _gb(n_bytes: int) -> str:
    return f"{n_bytes / GB:,.2f} GB"


def _train_options(options: PlanOptions) -> TrainOptions:
    return TrainOptions(**{name: getattr(options, name) for name in TrainOptions.model_fields})
