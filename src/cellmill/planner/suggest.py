"""Layouts that fit a run, ranked by speed, and their table.

`plan --suggest` tries ddp, the strategies of fsdp that shard, tp inside a node (with sequence
parallelism if the family has it), pipelines, and recomputation. The rest of the configuration stays,
except for these options:

- `parallel.shard_size` is reset, so that groups of HYBRID_SHARD are nodes.
- `parallel.gradient_reduction` and `parallel.microbatches` are reset in layouts where they have no
  effect.
- `stream.lanes` is changed if the data-parallel ranks cannot share the lanes evenly.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import yaml

from cellmill.config.checks import check_nodes
from cellmill.config.machine import Machine
from cellmill.config.options import PlanOptions
from cellmill.config.parallel import Layout, Parallel, divisors
from cellmill.errors import ConfigError
from cellmill.planner.cost import RunCost, estimate_cost
from cellmill.planner.devices import check_precision, find_device
from cellmill.planner.hardware import Hardware, find_hardware
from cellmill.planner.measure.cpu_speed import measure_cpu
from cellmill.planner.memory import estimate_memory, find_overflow
from cellmill.planner.output.format import describe_layout, format_bytes, format_hours
from cellmill.planner.step_counts import CorpusSize
from cellmill.planner.traffic import sum_link_bytes

MAX_SHOWN = 10  # the table has at most this many layouts
MAX_PP = 16  # at most this many pipeline ranks are tried
SCHEDULES = ("1F1B", "Interleaved1F1B")  # tried in pipelines, besides the schedule of the run
ROW = "{:>10}  {:>9}  {:>4}  {:>10}  {:>10}  {}"
# Hours are compared in bins of this relative width: plans are not more exact.
HOURS_BIN_FRAC = 0.02
# reason of a refused layout
TOO_MUCH_HOST_MEMORY = (
    "processes need more host memory for checkpoints and cpu_offload than "
    "the profile requests for a node"
)


@dataclass(frozen=True)
class Suggestions:
    """Layouts that were tried: those that fit, those that are too large, and those that are refused."""

    fitting: list[RunCost]  # the best first
    needed_bytes_of_too_large: list[int]  # of a process, in each layout that does not fit
    # Number of refused layouts by reason. Reasons that differ only in their numbers are counted together,
    # under the first of them.
    refused: Counter[str]


def suggest_layouts(
    options: PlanOptions, corpus: CorpusSize, machine: Machine, device_name: str
) -> Suggestions:
    """Find the layouts of a run on all processes of `machine`, and rank those that fit by speed.

    If `machine` has a range of nodes, speed and memory are planned for the fewest nodes. A layout that is
    impossible on another number of nodes is refused. The speed of CPU cores is measured on this machine.
    """
    hardware = find_hardware(options, machine, device_name)
    device = find_device(device_name)
    if device_name == "cpu":
        device = measure_cpu(device, hardware.nproc_per_node, options.parallel.precision)
    fitting = []
    needed_bytes_of_too_large = []
    refused: Counter[str] = Counter()
    # the first reason of refusal, by the reason without its numbers
    first_reasons: dict[str, str] = {}
    for parallel in list_parallel_options(options, hardware):
        try:
            adapted = hardware.adapt_lanes(options.model_copy(update={"parallel": parallel}))
            check_precision(parallel, device_name, device)
            check_nodes(adapted, hardware.node_counts, hardware.nproc_per_node, corpus.n_cells)
        except ConfigError as error:
            without_numbers = re.sub(r"\d+", "", str(error))
            reason = first_reasons.setdefault(without_numbers, str(error))
            refused[reason] += 1
            continue
        overflow = find_overflow(adapted, corpus, hardware)
        if overflow is None:
            fitting.append(estimate_cost(adapted, corpus, hardware, device))
        elif overflow == "device":
            needed_bytes_of_too_large.append(estimate_memory(adapted, corpus, hardware).total)
        else:
            refused[TOO_MUCH_HOST_MEMORY] += 1
    return Suggestions(sorted(fitting, key=_make_sort_key), needed_bytes_of_too_large, refused)


def _make_sort_key(suggestion: RunCost) -> tuple[float, ...]:
    """Make a key that sorts the best layout first.

    A better layout takes fewer hours. Of layouts in one bin of hours, the better one sends fewer bytes to
    other nodes. Further ties are decided by fewer bytes inside the node, fewer ranks that read the same
    cells, no recomputation, and less memory.
    """
    parallel = suggestion.options.parallel
    sent = sum_link_bytes(suggestion.traffic)
    assert suggestion.time is not None, "the speed of every device is known or measured"
    ranks_with_same_cells = parallel.tp * parallel.pp
    return (
        round(math.log(suggestion.time.hours) / HOURS_BIN_FRAC),
        sent.inter_node,
        sent.intra_node,
        ranks_with_same_cells,
        parallel.activation_checkpointing is not None,
        suggestion.memory.total,
    )


def list_parallel_options(options: PlanOptions, hardware: Hardware) -> Iterator[Parallel]:
    """Yield section `parallel` of each layout to try. Of layouts with one effect, yield only the first."""
    replaced = {"strategy", "sharding_strategy", "shard_size"}
    unchanged = options.parallel.model_dump(exclude=replaced)

    # the values that are tried
    strategies = [{"strategy": "ddp"}]
    for name in ("FULL_SHARD", "HYBRID_SHARD", "SHARD_GRAD_OP"):
        strategies.append({"strategy": "fsdp", "sharding_strategy": name})
    is_compiled = options.parallel.compile
    checkpointing_modes = (None, "full") if is_compiled else (None, "selective", "full")
    tp_sizes = divisors(hardware.nproc_per_node) if options.model.tp_sizes() else [1]
    max_pp = min(MAX_PP, min(options.model.pp_sizes().values(), default=1))

    tried = set()
    for tp in tp_sizes:
        for pp in divisors(hardware.world_size // tp):
            if pp > max_pp:
                continue
            # without a pipeline the schedule has no effect, so it is the default
            schedules = {*SCHEDULES, options.parallel.schedule} if pp > 1 else {"1F1B"}
            for schedule, checkpointing, strategy in product(
                sorted(schedules), checkpointing_modes, strategies
            ):
                changes = {
                    "tp": tp,
                    "sequence_parallel": tp > 1 and options.model.sequence_parallel,
                    "pp": pp,
                    "schedule": schedule,
                    "activation_checkpointing": checkpointing,
                }
                parallel = Parallel.model_validate(unchanged | strategy | changes)
                parallel = parallel.reset_without_effect()
                key = _make_effect_key(parallel, hardware)
                if key not in tried:
                    tried.add(key)
                    yield parallel


def _make_effect_key(parallel: Parallel, hardware: Hardware) -> tuple[Any, ...]:
    """Make a key that is equal for layouts with the same effect.

    Layouts that do not divide the processes are all refused. They have the same effect if they are refused
    for the same reason and differ only in their strategy.
    """
    layout: Layout | tuple[str, int, int]
    sharding = None
    try:
        layout = hardware.divide(parallel)
    except ConfigError as error:
        layout = (str(error), parallel.tp, parallel.pp)
    else:
        if layout.dp > 1:
            # pipeline stages keep their weights gathered under every strategy
            keeps_gathered = parallel.sharding_strategy == "SHARD_GRAD_OP" and layout.pp == 1
            sharding = (parallel.strategy, keeps_gathered)
    return layout, sharding, parallel.schedule, parallel.activation_checkpointing


def format_suggestions(
    suggestions: Suggestions, options: PlanOptions, machine: Machine, device_name: str
) -> str:
    """Format the table of the best layouts, the reasons against others, and the YAML of the best one."""
    fitting = suggestions.fitting
    needed_bytes = suggestions.needed_bytes_of_too_large
    n_nodes = machine.node_counts[0]
    processes = f"{n_nodes:,} {'node' if n_nodes == 1 else 'nodes'} x {machine.nproc_per_node} {device_name}"
    lines = [f"{processes}; memory per process, bytes sent per process and step", ""]
    if fitting:
        lines.append(ROW.format("memory", "time", "MFU", "intra-node", "inter-node", "layout"))
        lines += [_format_row(suggestion) for suggestion in fitting[:MAX_SHOWN]]
        lines.append("")
    lines.append(f"layouts that fit: {len(fitting):,}")
    if needed_bytes:
        usable = format_bytes(find_hardware(options, machine, device_name).usable_bytes)
        lines.append(
            f"too large: {len(needed_bytes):,}; the smallest needs {format_bytes(min(needed_bytes))} of {usable} usable"
        )
    for reason, number in suggestions.refused.most_common():
        lines.append(f"refused: {number:,}; {reason}")
    if fitting:
        lines += ["", "# the best layout, for config.yaml"]
        best = fitting[0].options
        lines.append(format_sections(best, options).rstrip())
        if best.stream.lanes != options.stream.lanes:
            lines.append(
                "# other stream.lanes: checkpoints of the run cannot continue, start a new run"
            )
    return "\n".join(lines)


def _format_row(suggestion: RunCost) -> str:
    """Format one layout as a row of the table."""
    parallel = suggestion.options.parallel
    words = describe_layout(parallel, suggestion.model.layout)
    if parallel.sequence_parallel:
        words += ", sequence_parallel"
    if parallel.activation_checkpointing:
        words += f", recompute {parallel.activation_checkpointing}"
    sent = sum_link_bytes(suggestion.traffic)
    time = suggestion.time
    assert time is not None, "the speed of every device is known or measured"
    return ROW.format(
        format_bytes(suggestion.memory.total),
        format_hours(time.hours),
        f"{time.mfu:.0%}",
        format_bytes(sent.intra_node),
        format_bytes(sent.inter_node),
        words,
    )


def format_sections(suggested: PlanOptions, options: PlanOptions) -> str:
    """Write the YAML that changes `options` to `suggested`.

    The user may replace section `parallel` of a configuration by this one, or merge the two. Section
    `stream` has to be merged.
    """
    before = options.parallel.model_dump(mode="json")
    chosen = suggested.parallel.model_dump(mode="json")
    defaults = Parallel.model_validate({}).model_dump(mode="json")
    # show the strategy, and each option that differs from its default or from the user's value
    shown = {"strategy"}
    if chosen["strategy"] == "fsdp":
        shown.add("sharding_strategy")
    for name, value in chosen.items():
        if value != defaults[name] or value != before[name]:
            shown.add(name)
    tree: dict[str, Any] = {"parallel": {name: chosen[name] for name in chosen if name in shown}}
    if suggested.stream.lanes != options.stream.lanes:
        tree["stream"] = {"lanes": suggested.stream.lanes}
    return yaml.safe_dump(tree, sort_keys=False)
