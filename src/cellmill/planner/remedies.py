"""Changes that make a run fit in memory, tried in order until one helps.

`check_memory` advises the first change that helps a run whose plan does not fit. `planner.out_of_memory`
does so for a process that ran out of memory.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from cellmill.config.checks import check_nodes
from cellmill.config.options import PlanOptions
from cellmill.config.parallel import Parallel, divisors
from cellmill.errors import ConfigError
from cellmill.planner.hardware import Hardware
from cellmill.planner.memory import estimate_memory, exceeds_host_memory, find_overflow
from cellmill.planner.output.format import format_bytes
from cellmill.planner.planned_model import PlannedModel
from cellmill.planner.step_counts import CorpusSize, count_steps

# At most this many smaller token budgets are tried before recomputation. They cost less than recomputing a
# forward pass.
BUDGETS_BEFORE_RECOMPUTING = 2
MAX_TRIED_BUDGET = 1 << 24  # tokens: no larger token budget is tried
MAX_DOUBLINGS = 7  # the number of nodes is doubled at most this many times
REQUEST_MORE = "request more memory per node (mem_mb, mem_mb_per_cpu or mem_mb_per_gpu)"


def check_memory(options: PlanOptions, corpus: CorpusSize, hardware: Hardware) -> None:
    """Raise ConfigError if a run does not fit in the memory of its devices.

    The error names the first change that helps.
    """
    memory = estimate_memory(options, corpus, hardware)
    if memory.total <= hardware.usable_bytes:
        return
    largest_part, part_bytes = memory.list_by_size()[0]

    requested_text = ""
    if (
        hardware.device_name == "cpu"
        and hardware.requested_host_bytes
        and not options.plan.memory_gb
    ):
        requested_text = f"; {hardware.requested_host_bytes >> 20:,} MiB are requested per node"
    raise ConfigError(
        f"needs {format_bytes(memory.total)} per process, {format_bytes(part_bytes)} of it {largest_part}, but "
        f"{hardware.device_name} has {format_bytes(hardware.usable_bytes)} usable ({options.plan.memory_frac:.0%} of "
        f"{format_bytes(hardware.device_bytes)}{requested_text}): {find_remedy(options, corpus, hardware)}"
    )


def find_max_fitting_token_budget(
    options: PlanOptions, corpus: CorpusSize, hardware: Hardware
) -> int:
    """Find the largest token budget, up to MAX_TRIED_BUDGET, with which a run that fits still fits.

    The search assumes that a larger budget needs more memory. A larger budget may need less, for example if
    it leaves fewer micro-batches per step. Then the found budget may not be the largest that fits, but one
    token more does not fit.
    """

    def count_bytes(token_budget: int) -> int:
        return estimate_memory(_set_budget(options, token_budget), corpus, hardware).total

    token_budget = options.train.token_budget
    larger = range(token_budget + 1, MAX_TRIED_BUDGET + 1)
    return token_budget + bisect_right(larger, hardware.usable_bytes, key=count_bytes)


def find_remedy(options: PlanOptions, corpus: CorpusSize, hardware: Hardware) -> str:
    """Describe the first change, or combination of changes, that makes the run fit.

    If the run needs more host memory than its job requests, the text also says to request more. A change
    may then need more host memory than the job requests, too.
    """
    host_instructions = []
    if exceeds_host_memory(PlannedModel.measure(options, corpus, hardware), hardware):
        host_instructions = [REQUEST_MORE]
        hardware = replace(hardware, requested_host_bytes=0)
    for change in list_changes(options, corpus, hardware):
        if find_overflow(change.options, corpus, change.hardware) is None:
            return " and ".join(change.instructions + host_instructions)
    if options.plan.memory_gb:
        last_resort = "raise plan.memory_gb if the device has more, or use a smaller model"
    elif hardware.device_name == "cpu":
        last_resort = f"{REQUEST_MORE}, or use a machine with more, or a smaller model"
    else:
        last_resort = "use a device with more memory, or a smaller model"
    return ", and ".join([last_resort, *host_instructions])


@dataclass(frozen=True)
class Change:
    """Instructions for the user, and the options and hardware of a run that follows them."""

    instructions: list[str]
    options: PlanOptions
    hardware: Hardware

    def with_instruction(self, instruction: str, **changed: Any) -> "Change":
        """Add an instruction. `changed` has the `options` or the `hardware` that follow from it."""
        return replace(self, instructions=[*self.instructions, instruction], **changed)

    def with_parallel(self, **values: Any) -> "Change":
        """Set options of section `parallel`, and add an instruction for the options that change."""
        options = set_parallel(self.options, **values)
        settings = [
            f"parallel.{name} to {json.dumps(value)}".replace('"', "")
            for name, value in values.items()
            if value != getattr(self.options.parallel, name)
        ]
        return self.with_instruction(f"set {' and '.join(settings)}", options=options)


def list_changes(options: PlanOptions, corpus: CorpusSize, hardware: Hardware) -> Iterator[Change]:
    """Yield changes. Changes that cost the least speed come first.

    A user who follows the instructions of a change gets exactly its options. These pass the checks of the
    configuration.
    """
    for candidate in _list_candidates(options, corpus, hardware):
        node_counts = candidate.hardware.node_counts
        try:
            change = _add_required_changes(candidate)
            check_nodes(change.options, node_counts, hardware.nproc_per_node, corpus.n_cells)
        except ConfigError:  # another option excludes the change, such as train.replay_every_steps
            continue
        yield change


def _add_required_changes(change: Change) -> Change:
    """Add changes of other options that the layout of `change` requires.

    Raise ConfigError if the layout does not divide the processes.
    """
    parallel = change.options.parallel
    if parallel.reduces_each_micro_batch and not parallel.shards_gradients:
        change = change.with_parallel(gradient_reduction="step")
    adapted = change.hardware.adapt_lanes(change.options)
    lanes = adapted.stream.lanes
    if lanes != change.options.stream.lanes:
        instruction = (
            f"set stream.lanes to {lanes} (checkpoints of the run cannot continue with it: start a "
            "new run)"
        )
        change = change.with_instruction(instruction, options=adapted)
    return change


def _list_candidates(
    options: PlanOptions, corpus: CorpusSize, hardware: Hardware
) -> Iterator[Change]:
    """Yield changes that nothing has checked yet. Changes that cost the least speed come first.

    1. Up to BUDGETS_BEFORE_RECOMPUTING smaller token budgets.
    2. Full recomputation.
    3. Smaller token budgets.
    4. A reduction of gradients in each micro-batch, alone and with smaller token budgets.
    5. Full sharding, alone and with items 3 and 4.
    6. More tensor-parallel ranks, more pipeline ranks, or offload.
    7. More nodes.

    All items after item 2 keep the recomputation, and all after item 5 keep full sharding. They keep no
    change of another item.
    """
    change = Change([], options, hardware)
    yield from islice(_list_smaller_budgets(change, corpus), BUDGETS_BEFORE_RECOMPUTING)
    if options.parallel.activation_checkpointing != "full":
        change = change.with_parallel(activation_checkpointing="full")
        yield change
    yield from _list_budgets_and_reductions(change, corpus)
    sharded = _add_full_sharding(change)
    if sharded is not change:
        yield sharded
        yield from _list_budgets_and_reductions(sharded, corpus)
    yield from _list_layouts_and_offload(sharded)
    yield from map(_add_full_sharding, _list_more_nodes(sharded))


def _list_budgets_and_reductions(change: Change, corpus: CorpusSize) -> Iterator[Change]:
    """Yield smaller token budgets.

    Then yield a reduction of gradients in each micro-batch, alone and with smaller token budgets.
    """
    yield from _list_smaller_budgets(change, corpus)
    parallel = change.options.parallel
    if parallel.shards_gradients and not parallel.reduces_each_micro_batch:
        reduced = change.with_parallel(gradient_reduction="micro_batch")
        yield reduced
        yield from _list_smaller_budgets(reduced, corpus)


def _add_full_sharding(change: Change) -> Change:
    """Add FULL_SHARD to `change`. Return `change` itself if a process would hold as much as before.

    Option `shard_size` is reset, since it may not divide the processes of later changes.
    """
    before = change.options.parallel
    sharded = change.with_parallel(strategy="fsdp", sharding_strategy="FULL_SHARD", shard_size=None)
    after = sharded.options.parallel
    try:
        layout = change.hardware.divide(before)
    except ConfigError:  # on more nodes, groups of HYBRID_SHARD may not divide the processes
        return sharded
    # a process holds as much as before if it has equal shards, and gathers equally many weights at once
    keeps_layout = change.hardware.divide(after) == layout
    keeps_gathered = before.reshards_after_forward == after.reshards_after_forward
    if before.shard_size is None and keeps_layout and (keeps_gathered or layout.dp == 1):
        return change
    return sharded


def _list_layouts_and_offload(change: Change) -> Iterator[Change]:
    """Yield more tensor-parallel ranks in a node, then more pipeline ranks, then offload.

    Offload `optimizer` comes before offload `full`.
    """
    hardware = change.hardware
    model = change.options.model
    parallel = change.options.parallel

    # tensor-parallel ranks: a common divisor of the sizes of the model
    tp_sizes = model.tp_sizes().values()
    max_tp = 1
    if tp_sizes:
        max_tp = math.gcd(hardware.nproc_per_node, hardware.world_size // parallel.pp, *tp_sizes)
    for tp in divisors(max_tp):
        if tp > parallel.tp:
            yield change.with_parallel(tp=tp, sequence_parallel=model.sequence_parallel)

    # pipeline ranks: every stage has at least one block
    max_pp = min(model.pp_sizes().values(), default=1) // (parallel.n_stages // parallel.pp)
    for pp in divisors(hardware.world_size // parallel.tp):
        if parallel.pp < pp <= max_pp:
            yield change.with_parallel(pp=pp)

    if hardware.device_name == "cpu" or not change.options.train.optimizer.offloaded:
        return
    if parallel.cpu_offload is None:
        yield change.with_parallel(cpu_offload="optimizer")
    if parallel.cpu_offload != "full" and hardware.divide(parallel).dp > 1:
        yield change.with_parallel(cpu_offload="full")


def _list_more_nodes(change: Change) -> Iterator[Change]:
    """Yield changes to 2, 4, 8, … times as many nodes."""
    for power in range(1, MAX_DOUBLINGS + 1):
        nodes = change.hardware.nodes * 2**power
        larger = replace(change.hardware, nodes=nodes, max_nodes=nodes)
        yield change.with_instruction(f"set nodes to {nodes} in the profile", hardware=larger)


def _list_smaller_budgets(change: Change, corpus: CorpusSize) -> Iterator[Change]:
    """Yield smaller token budgets: powers of two that still hold the largest cell.

    A budget that changes no micro-batch is left out. This happens if a rank has fewer tokens in a step.
    """
    options = change.options
    layout = change.hardware.divide(options.parallel)
    counts = count_steps(options, corpus, layout)
    # the largest power of two below token_budget; 0 if token_budget is 1
    budget = (1 << (options.train.token_budget - 1).bit_length()) >> 1
    while budget >= max(1, options.tokens.max_tokens):
        smaller = _set_budget(options, budget)
        if count_steps(smaller, corpus, layout) != counts:
            yield change.with_instruction(f"lower train.token_budget to {budget}", options=smaller)
        budget //= 2


def _set_budget(options: PlanOptions, token_budget: int) -> PlanOptions:
    """Copy the options with another token budget."""
    train = options.train.model_copy(update={"token_budget": token_budget})
    return options.model_copy(update={"train": train})


def set_parallel(options: PlanOptions, **changes: Any) -> PlanOptions:
    """Copy the options with changes in section `parallel`, and validate this section."""
    parallel = Parallel.model_validate(options.parallel.model_dump() | changes)
    return options.model_copy(update={"parallel": parallel})
