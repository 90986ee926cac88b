"""Whether a run fits its devices, and the first thing to change where it does not. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from cellmill.config.machine import Machine
from cellmill.config.options import PlanOptions
from cellmill.config.parallel import Layout, Parallel, layout
from cellmill.errors import ConfigError
from cellmill.planner.devices import Device, device_named
from cellmill.planner.memory import Memory, memory_per_rank
from cellmill.planner.size import size_of
from cellmill.planner.work import Cells, measure_work

GB = 1e9
FREE = 2  # halvings of a micro-batch, which cost less than a forward pass done again
MOST_TOKENS = 1 << 24


@dataclass(frozen=True)
class Limit:
    """Memory of one process, in bytes."""

    whole: int
    usable: int


@dataclass(frozen=True)
class Hardware:
    """Processes that a run gets."""

    nodes: int
    nproc_per_node: int
    device: str
    limit: Limit

    @property
    def world(self) -> int:
        return self.nodes * self.nproc_per_node

    def layout(self, parallel: Parallel) -> Layout:
        """Raises ConfigError when the processes cannot be laid out so."""
        return layout(parallel, self.world, self.nproc_per_node)


def memory_limit(options: PlanOptions, device: Device, nproc_per_node: int) -> Limit:
    """What one process may use: as configured, of its device, or its share of this machine."""
    memory_gb = options.plan.memory_gb if options.plan.memory_gb is not None else device.memory_gb
    if memory_gb is None:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // nproc_per_node
    else:
        whole = round(memory_gb * GB)
    return Limit(whole, int(whole * options.plan.memory_frac))


def place_of(options: PlanOptions, machine: Machine, device: str) -> Hardware:
    """What `machine` gives a run; of a range of nodes the fewest: a process then holds the most.

    Raises ConfigError when no device is called so.
    """
    nproc_per_node = machine.nproc_per_node
    limit = memory_limit(options, device_named(device), nproc_per_node)
    return Hardware(machine.node_counts[0], nproc_per_node, device, limit)


def need(options: PlanOptions, cells: Cells, place: Hardware, micro_tokens: int | None = None) -> Memory:
    """Memory of the process that needs most; with micro-batches of `micro_tokens` rather than those of the cells."""
    if place.device == "cpu":  # there is no other memory to put anything in
        options = _with(options, cpu_offload=None)
    parallel = options.parallel
    sizes = place.layout(parallel)
    work = measure_work(options, cells, sizes)
    size = size_of(options, cells.n_genes)
    tokens = work.micro_tokens if micro_tokens is None else micro_tokens
    return memory_per_rank(size, parallel, sizes, tokens, work.most_micro_batches)


def check_memory(options: PlanOptions, cells: Cells, place: Hardware) -> Memory:
    """What the run needs. Raises ConfigError with the first change that would make it fit when it does not."""
    memory, limit = need(options, cells, place), place.limit
    if memory.total <= limit.usable:
        return memory
    largest = max(asdict(memory), key=lambda part: asdict(memory)[part])
    raise ConfigError(
        f"needs {amount(memory.total)} on each process, {amount(getattr(memory, largest))} of it {largest}, but "
        f"{place.device} has {amount(limit.usable)} to use ({options.plan.memory_frac:.0%} of {amount(limit.whole)}): "
        f"{remedy(options, cells, place)}"
    )


def largest_micro_batch(options: PlanOptions, cells: Cells, place: Hardware) -> int:
    """Most tokens that a process could take at once, with as many micro-batches; 0 where not even one fits."""
    low, high = 0, MOST_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        if need(options, cells, place, middle).total <= place.limit.usable:
            low = middle
        else:
            high = middle - 1
    return low


def remedy(options: PlanOptions, cells: Cells, place: Hardware) -> str:
    """The first change, or the fewest on top of each other, after which the run fits."""

    def fits(options: PlanOptions, place: Hardware = place) -> bool:
        return need(options, cells, place).total <= place.limit.usable

    for smaller in islice(_smaller_budgets(options), FREE):
        if fits(smaller):
            return f"lower train.token_budget to {smaller.train.token_budget}"
    changes: list[str] = []
    if options.parallel.activation_checkpointing is None:
        options = _with(options, activation_checkpointing="full")
        changes.append("set parallel.activation_checkpointing to full")
        if fits(options):
            return changes[0]
    for smaller in _smaller_budgets(options):
        if fits(smaller):
            return " and ".join([*changes, f"lower train.token_budget to {smaller.train.token_budget}"])
    spread = _with(options, strategy="fsdp", sharding_strategy="FULL_SHARD", shard_size=None)
    if place.layout(spread.parallel) != place.layout(options.parallel):
        changes.append("use fsdp with parallel.sharding_strategy FULL_SHARD")
        if fits(spread):
            return " and ".join(changes)
    options = spread
    for tp in _tensor_parallel(options, place):
        if fits(_with(options, tp=tp, sequence_parallel=True)):
            return " and ".join([*changes, f"set parallel.tp to {tp} with parallel.sequence_parallel"])
    for pp in _pipelines(options, place):
        if fits(_with(options, pp=pp)):
            return " and ".join([*changes, f"set parallel.pp to {pp}"])
    for offload in _offloads(options, place):
        if fits(_with(options, cpu_offload=offload)):
            return " and ".join([*changes, f"set parallel.cpu_offload to {offload}"])
    for more in (place.nodes * 2**k for k in range(1, 8)):
        if fits(options, Hardware(more, place.nproc_per_node, place.device, place.limit)):
            return " and ".join([*changes, f"use {more} nodes (the profile)"])
    return "use a device with more memory (the profile) or a smaller model"


def _smaller_budgets(options: PlanOptions) -> Iterator[PlanOptions]:
    """Powers of two below the budget that still hold the largest cell."""
    budget = 1 << (options.train.token_budget - 1).bit_length() - 1
    while budget >= max(1, options.tokens.max_tokens):
        yield options.model_copy(update={"train": options.train.model_copy(update={"token_budget": budget})})
        budget //= 2


def _tensor_parallel(options: PlanOptions, place: Hardware) -> Iterator[int]:
    """Larger tp that the model and the node can be cut by."""
    cut = options.model.cut_by_tp().values()
    whole = [place.nproc_per_node, place.world // options.parallel.pp, *cut]
    for tp in range(options.parallel.tp + 1, place.nproc_per_node + 1 if cut else 0):
        if not any(size % tp for size in whole):
            yield tp


def _pipelines(options: PlanOptions, place: Hardware) -> Iterator[int]:
    """Longer pipelines that there are blocks for."""
    blocks = min(options.model.cut_by_pp().values(), default=1)
    each = options.parallel.stages // options.parallel.pp
    for pp in range(options.parallel.pp + 1, blocks // each + 1):
        if not place.world % (pp * options.parallel.tp):
            yield pp


def _offloads(options: PlanOptions, place: Hardware) -> Iterator[str]:
    """Ways to keep more in the host's memory, where that is another one."""
    if place.device == "cpu":
        return
    if options.parallel.cpu_offload is None:
        yield "optimizer"
    if options.parallel.cpu_offload != "full" and place.layout(options.parallel).dp > 1:
        yield "full"


def _with(options: PlanOptions, **changes: Any) -> PlanOptions:
    parallel = Parallel.model_validate(options.parallel.model_dump() | changes)
    return options.model_copy(update={"parallel": parallel})


def amount(n_bytes: float) -> str:
    """Bytes in the largest unit they fill."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= factor:
            return f"{n_bytes / factor:.3g} {unit}"
    return f"{n_bytes:.0f} bytes"
