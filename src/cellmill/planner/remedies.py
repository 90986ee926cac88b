"""Check that a run fits in memory, or find the first change that makes it fit.

A plan that does not fit, and a process that ran out of memory (`planner.out_of_memory`), get the
first change that helps from the same list (`_list_changes`).
"""

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from cellmill.config.options import PlanOptions
from cellmill.config.parallel import Parallel, divisors
from cellmill.errors import ConfigError
from cellmill.planner.hardware import Hardware
from cellmill.planner.memory import Memory, PlannedModel, format_bytes, peak_memory
from cellmill.planner.work import CorpusSize, measure_work

FREE_HALVINGS = 2  # halvings of a micro-batch that cost less than recomputing a forward pass
MAX_TOKENS = 1 << 24  # largest micro-batch that is tried
MAX_DOUBLINGS = 7  # doublings of the number of nodes that are tried


def plan_memory(
    options: PlanOptions, corpus: CorpusSize, hardware: Hardware, micro_tokens: int | None = None
) -> Memory:
    """Memory of the rank that needs most, optionally with micro-batches of `micro_tokens` tokens."""
    if hardware.device == "cpu":  # there is no other memory to offload to
        options = with_parallel(options, cpu_offload=None)
    model = PlannedModel.measure(
        options, corpus.n_genes, hardware.world, hardware.nproc_per_node, corpus.levels
    )
    work = measure_work(options, corpus, model.layout)
    if micro_tokens is None:
        micro_tokens = work.micro_tokens
    return peak_memory(model, micro_tokens, work.most_micro_batches)


def check_memory(options: PlanOptions, corpus: CorpusSize, hardware: Hardware) -> Memory:
    """Memory of a run. Raise ConfigError with the first change that helps if it does not fit."""
    memory = plan_memory(options, corpus, hardware)
    if memory.total <= hardware.usable_bytes:
        return memory
    part, n_bytes = max(asdict(memory).items(), key=lambda item: item[1])
    raise ConfigError(
        f"needs {format_bytes(memory.total)} per process, {format_bytes(n_bytes)} of it {part}, but "
        f"{hardware.device} has {format_bytes(hardware.usable_bytes)} usable ({options.plan.memory_frac:.0%} of "
        f"{format_bytes(hardware.device_bytes)}): {find_remedy(options, corpus, hardware)}"
    )


def find_largest_micro_batch(options: PlanOptions, corpus: CorpusSize, hardware: Hardware) -> int:
    """Most tokens of a micro-batch that fit, with the same number of micro-batches; 0 if none."""

    def needed(tokens: int) -> int:
        return plan_memory(options, corpus, hardware, tokens).total

    return bisect_right(range(1, MAX_TOKENS + 1), hardware.usable_bytes, key=needed)


def find_remedy(options: PlanOptions, corpus: CorpusSize, hardware: Hardware) -> str:
    """The first change, or combination of changes, that makes the run fit, in words."""
    for change in _list_changes(options, hardware):
        needed = plan_memory(change.options, corpus, change.hardware)
        if needed.total <= change.hardware.usable_bytes:
            return " and ".join(change.instructions)
    return "use a device with more memory (the profile) or a smaller model"


@dataclass(frozen=True)
class Change:
    """Instructions for the user, and the options and hardware that follow from them."""

    instructions: list[str]
    options: PlanOptions
    hardware: Hardware

    def then(self, instruction: str, **parallel: Any) -> "Change":
        """This change followed by one of section `parallel`."""
        options = with_parallel(self.options, **parallel)
        return Change([*self.instructions, instruction], options, self.hardware)


def _list_changes(options: PlanOptions, hardware: Hardware) -> Iterator[Change]:
    """Changes, the least costly in speed first; some stay while later changes are tried."""
    change = Change([], options, hardware)
    yield from islice(_smaller_budgets(change), FREE_HALVINGS)
    if options.parallel.activation_checkpointing is None:
        instruction = "set parallel.activation_checkpointing to full"
        change = change.then(instruction, activation_checkpointing="full")
        yield change
    yield from _smaller_budgets(change)
    if options.parallel.shards_gradients and not options.parallel.reduces_each_micro_batch:
        instruction = "set parallel.gradient_reduction to micro_batch"
        reduced = change.then(instruction, gradient_reduction="micro_batch")
        yield reduced
        yield from _smaller_budgets(reduced)
    instruction = "use fsdp with parallel.sharding_strategy FULL_SHARD"
    sharded = change.then(
        instruction, strategy="fsdp", sharding_strategy="FULL_SHARD", shard_size=None
    )
    if hardware.layout(sharded.options.parallel) == hardware.layout(options.parallel):
        # sharding alone divides nothing further on the same mesh, so it is no suggestion; later
        # changes enlarge the mesh and are tried with it
        change = replace(change, options=sharded.options)
    else:
        change = sharded
        yield change
    yield from _larger_layouts(change)
    for power in range(1, MAX_DOUBLINGS + 1):
        nodes = hardware.nodes * 2**power
        larger = replace(hardware, nodes=nodes)
        yield replace(change.then(f"use {nodes} nodes (the profile)"), hardware=larger)


def _larger_layouts(change: Change) -> Iterator[Change]:
    """Tensor parallelism of more ranks in a node, pipelines of more stages, then offload of the
    optimizer's state, and of all that can be offloaded.
    """
    hardware = change.hardware
    model = change.options.model
    parallel = change.options.parallel
    tp_sizes = model.tp_sizes().values()
    most_tp = 1
    if tp_sizes:
        most_tp = math.gcd(hardware.nproc_per_node, hardware.world // parallel.pp, *tp_sizes)
    for tp in divisors(most_tp):
        if tp > parallel.tp:
            instruction = f"set parallel.tp to {tp} with parallel.sequence_parallel"
            yield change.then(instruction, tp=tp, sequence_parallel=True)
    # at least one block per stage
    most_pp = min(model.pp_sizes().values(), default=1) // (parallel.stages // parallel.pp)
    for pp in divisors(hardware.world // parallel.tp):
        if parallel.pp < pp <= most_pp:
            yield change.then(f"set parallel.pp to {pp}", pp=pp)
    if change.hardware.device == "cpu" or not change.options.train.optimizer.offloaded:
        return
    if parallel.cpu_offload is None:
        yield change.then("set parallel.cpu_offload to optimizer", cpu_offload="optimizer")
    if parallel.cpu_offload != "full" and change.hardware.layout(parallel).dp > 1:
        yield change.then("set parallel.cpu_offload to full", cpu_offload="full")


def _smaller_budgets(change: Change) -> Iterator[Change]:
    """Powers of two below the token budget that still hold the largest cell."""
    train = change.options.train
    largest_power = (train.token_budget - 1).bit_length() - 1
    budget = 1 << largest_power
    while budget >= max(1, change.options.tokens.max_tokens):
        smaller = train.model_copy(update={"token_budget": budget})
        options = change.options.model_copy(update={"train": smaller})
        instruction = f"lower train.token_budget to {budget}"
        yield Change([*change.instructions, instruction], options, change.hardware)
        budget //= 2


def with_parallel(options: PlanOptions, **changes: Any) -> PlanOptions:
    """The options with changes in section `parallel`."""
    parallel = Parallel.model_validate(options.parallel.model_dump() | changes)
    return options.model_copy(update={"parallel": parallel})
