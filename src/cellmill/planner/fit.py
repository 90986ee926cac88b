"""Check whether a run fits its devices, and find the first change that makes it fit."""

import math
import os
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

from cellmill.config.machine import Machine
from cellmill.config.options import PlanOptions
from cellmill.config.parallel import Parallel, divisors
from cellmill.errors import ConfigError
from cellmill.planner.cost import GB, Hardware, amount
from cellmill.planner.devices import device_named
from cellmill.planner.memory import Memory, peak_memory
from cellmill.planner.planned_model import PlannedModel
from cellmill.planner.work import Cells, measure_work

FREE_HALVINGS = 2  # of a micro-batch, which cost less than recomputing a forward pass
MAX_TOKENS = 1 << 24

Change = tuple[list[str], PlanOptions, "Hardware"]  # instructions for the user, and the options and hardware after them


def hardware_of(options: PlanOptions, machine: Machine, device: str) -> Hardware:
    """Return the processes that `machine` gives a run; the fewest of a range of nodes, which need the most memory.

    The memory of a process is as configured, that of its device, or its share of this machine. Raises ConfigError for
    an unknown device.
    """
    known = device_named(device)
    memory_gb = options.plan.memory_gb if options.plan.memory_gb is not None else known.memory_gb
    if memory_gb is None:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // machine.nproc_per_node
    else:
        whole = round(memory_gb * GB)
    usable = int(whole * options.plan.memory_frac)
    return Hardware(machine.node_counts[0], machine.nproc_per_node, device, whole, usable)


def memory_needed(options: PlanOptions, cells: Cells, hardware: Hardware, micro_tokens: int | None = None) -> Memory:
    """Return the memory of the rank that needs the most, optionally with micro-batches of `micro_tokens` tokens."""
    if hardware.device == "cpu":  # there is no other memory to offload to
        options = _with(options, cpu_offload=None)
    model = PlannedModel.of(options, cells.n_genes, hardware.world, hardware.nproc_per_node, cells.levels)
    work = measure_work(options, cells, model.layout)
    return peak_memory(model, work.micro_tokens if micro_tokens is None else micro_tokens, work.most_micro_batches)


def check_memory(options: PlanOptions, cells: Cells, hardware: Hardware) -> Memory:
    """Return the memory of a run. Raises ConfigError with the first change that makes it fit if it does not."""
    memory = memory_needed(options, cells, hardware)
    if memory.total <= hardware.usable_bytes:
        return memory
    part, n_bytes = max(asdict(memory).items(), key=lambda item: item[1])
    raise ConfigError(
        f"needs {amount(memory.total)} per process, {amount(n_bytes)} of it {part}, but {hardware.device} has "
        f"{amount(hardware.usable_bytes)} usable ({options.plan.memory_frac:.0%} of {amount(hardware.device_bytes)}): "
        f"{remedy(options, cells, hardware)}"
    )


def largest_micro_batch(options: PlanOptions, cells: Cells, hardware: Hardware) -> int:
    """Return the most tokens of a micro-batch that fit, with the same number of micro-batches; 0 if none fits."""

    def is_too_large(tokens: int) -> bool:
        return memory_needed(options, cells, hardware, tokens).total > hardware.usable_bytes

    return bisect_left(range(1, MAX_TOKENS + 1), True, key=is_too_large)


def remedy(options: PlanOptions, cells: Cells, hardware: Hardware) -> str:
    """Return the first change, or combination of changes, that makes the run fit."""
    for words, changed, processes in _changes(options, hardware):
        if memory_needed(changed, cells, processes).total <= processes.usable_bytes:
            return " and ".join(words)
    return "use a device with more memory (the profile) or a smaller model"


def _changes(options: PlanOptions, hardware: Hardware) -> Iterator[Change]:
    """Changes in the order of what they cost in speed; some stay while later ones are tried."""
    kept: list[str] = []
    yield from islice(_smaller_budgets(options, hardware, kept), FREE_HALVINGS)
    if options.parallel.activation_checkpointing is None:
        options = _with(options, activation_checkpointing="full")
        kept = ["set parallel.activation_checkpointing to full"]
        yield kept, options, hardware
    yield from _smaller_budgets(options, hardware, kept)
    if options.parallel.shards_gradients and not options.parallel.reduces_each_micro_batch:
        words = "set parallel.gradient_reduction to micro_batch"
        changed = _with(options, gradient_reduction="micro_batch")
        yield [*kept, words], changed, hardware
        yield from _smaller_budgets(changed, hardware, [*kept, words])
    sharded = _with(options, strategy="fsdp", sharding_strategy="FULL_SHARD", shard_size=None)
    if hardware.layout(sharded.parallel) != hardware.layout(options.parallel):
        kept = [*kept, "use fsdp with parallel.sharding_strategy FULL_SHARD"]
        yield kept, sharded, hardware
    options = sharded
    for tp in _tensor_parallel(options, hardware):
        words = f"set parallel.tp to {tp} with parallel.sequence_parallel"
        yield [*kept, words], _with(options, tp=tp, sequence_parallel=True), hardware
    for pp in _pipelines(options, hardware):
        yield [*kept, f"set parallel.pp to {pp}"], _with(options, pp=pp), hardware
    for offload in _offloads(options, hardware):
        yield [*kept, f"set parallel.cpu_offload to {offload}"], _with(options, cpu_offload=offload), hardware
    for nodes in (hardware.nodes * 2**k for k in range(1, 8)):
        yield [*kept, f"use {nodes} nodes (the profile)"], options, replace(hardware, nodes=nodes)


def _smaller_budgets(options: PlanOptions, hardware: Hardware, kept: list[str]) -> Iterator[Change]:
    """Powers of two below the token budget that still hold the largest cell."""
    budget = 1 << (options.train.token_budget - 1).bit_length() - 1
    while budget >= max(1, options.tokens.max_tokens):
        changed = options.model_copy(update={"train": options.train.model_copy(update={"token_budget": budget})})
        yield [*kept, f"lower train.token_budget to {budget}"], changed, hardware
        budget //= 2


def _tensor_parallel(options: PlanOptions, hardware: Hardware) -> list[int]:
    """Larger tp that divides the model and the node."""
    sizes = options.model.tp_sizes().values()
    common = math.gcd(hardware.nproc_per_node, hardware.world // options.parallel.pp, *sizes) if sizes else 1
    return [tp for tp in divisors(common) if tp > options.parallel.tp]


def _pipelines(options: PlanOptions, hardware: Hardware) -> list[int]:
    """Larger pp with at least one block per stage."""
    parallel, blocks = options.parallel, min(options.model.pp_sizes().values(), default=1)
    largest = blocks // (parallel.stages // parallel.pp)
    return [pp for pp in divisors(hardware.world // parallel.tp) if parallel.pp < pp <= largest]


def _offloads(options: PlanOptions, hardware: Hardware) -> list[str]:
    """Values of cpu_offload that move more to host memory, if the device has memory of its own."""
    if hardware.device == "cpu" or options.parallel.cpu_offload == "full":
        return []
    optimizer = ["optimizer"] if options.parallel.cpu_offload is None else []
    return optimizer + (["full"] if hardware.layout(options.parallel).dp > 1 else [])


def _with(options: PlanOptions, **changes: Any) -> PlanOptions:
    parallel = Parallel.model_validate(options.parallel.model_dump() | changes)
    return options.model_copy(update={"parallel": parallel})
