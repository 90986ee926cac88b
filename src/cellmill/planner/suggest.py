"""Layouts that fit a run, ranked by speed, and their table.

`plan --suggest` tries ddp and the sharding strategies, tp inside a node with sequence parallelism,
pipelines, and recomputation. The rest of the configuration stays, except for these options:

- `parallel.shard_size` is reset, so that groups of HYBRID_SHARD are nodes.
- `parallel.gradient_reduction` and `parallel.microbatches` are reset in layouts where they have no
  effect.
- `stream.lanes` is changed if the ranks that read cells cannot share the lanes evenly.
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
from cellmill.config.parallel import Parallel, divisors
from cellmill.errors import ConfigError
from cellmill.planner.cost import RunCost, estimate_cost
from cellmill.planner.devices import check_precision, find_device
from cellmill.planner.hardware import Hardware, find_hardware
from cellmill.planner.measure.cpu_speed import measure_cpu
from cellmill.planner.memory import estimate_memory, find_overflow
from cellmill.planner.output.format import describe_layout, format_bytes, format_hours
from cellmill.planner.step_counts import CorpusSize
from cellmill.planner.traffic import sum_link_bytes

MAX_SHOWN = 10  # layouts in the table
MAX_PP = 16  # most pipeline ranks that are tried
SCHEDULES = ("1F1B", "Interleaved1F1B")  # tried besides the schedule of the run
ROW = "{:>10}  {:>9}  {:>4}  {:>10}  {:>10}  {}"
# hours in the same bin of this relative width count as equal, since plans are less exact
HOURS_BIN_FRAC = 0.02
# reason of refusal
TOO_MUCH_HOST_MEMORY = (
    "processes need more host memory for checkpoints and cpu_offload than "
    "the profile requests for a node"
)


@dataclass(frozen=True)
class Suggestions:
    """Layouts that were tried, by outcome."""

    fitting: list[RunCost]  # the best first
    bytes_of_too_large: list[int]  # memory needed by each layout that does not fit
    # number of layouts by reason of refusal; reasons that differ only in their numbers are counted
    # together, under the first one seen
    refused: Counter[str]


def suggest_layouts(
    options: PlanOptions, corpus: CorpusSize, machine: Machine, device_name: str
) -> Suggestions:
    """Rank the layouts for all processes of `machine` by their speed.

    Of a range of nodes, speed and memory are those of the fewest, and a layout that another number
    excludes is refused. The speed of CPU cores is measured on this machine.
    """
    hardware = find_hardware(options, machine, device_name)
    device = find_device(device_name)
    if device_name == "cpu":
        device = measure_cpu(device, hardware.nproc_per_node, options.parallel.precision)
    fitting = []
    bytes_of_too_large = []
    refused: Counter[str] = Counter()
    first_reasons: dict[str, str] = {}  # keys are reasons without their numbers
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
            bytes_of_too_large.append(estimate_memory(adapted, corpus, hardware).total)
        else:
            refused[TOO_MUCH_HOST_MEMORY] += 1
    return Suggestions(sorted(fitting, key=_make_sort_key), bytes_of_too_large, refused)


def _make_sort_key(suggestion: RunCost) -> tuple[float, ...]:
    """Make a key that sorts the best layout first.

    It compares hours, in bins, then bytes to other nodes, bytes inside the node, the number of ranks
    that share the same cells, recomputation, and memory.
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
    """Yield the layouts worth trying, each once."""
    replaced = {"strategy", "sharding_strategy", "shard_size"}
    unchanged = options.parallel.model_dump(exclude=replaced)
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
            # the schedule of the run may be one of SCHEDULES
            schedules = {*SCHEDULES, options.parallel.schedule} if pp > 1 else SCHEDULES[:1]
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
                if key is None:  # `suggest_layouts` counts the reason
                    yield parallel
                elif key not in tried:
                    tried.add(key)
                    yield parallel


def _make_effect_key(parallel: Parallel, hardware: Hardware) -> tuple[Any, ...] | None:
    """Make a key that is equal for layouts with the same effect.

    None if the processes cannot be divided into this layout.
    """
    try:
        layout = hardware.divide(parallel)
    except ConfigError:
        return None
    sharding = None
    if layout.dp > 1:
        # pipeline stages keep their weights gathered under every strategy
        keeps_gathered = parallel.sharding_strategy == "SHARD_GRAD_OP" and layout.pp == 1
        sharding = (parallel.strategy, keeps_gathered)
    return layout, sharding, parallel.schedule, parallel.activation_checkpointing


def format_suggestions(
    suggestions: Suggestions, options: PlanOptions, machine: Machine, device_name: str
) -> str:
    """Format the best layouts, the reasons against others, and the YAML of the best."""
    fitting = suggestions.fitting
    bytes_of_too_large = suggestions.bytes_of_too_large
    n_nodes = machine.node_counts[0]
    processes = f"{n_nodes:,} {'node' if n_nodes == 1 else 'nodes'} x {machine.nproc_per_node} {device_name}"
    lines = [f"{processes}; memory per process, bytes sent per process and step", ""]
    if fitting:
        lines.append(ROW.format("memory", "time", "MFU", "intra-node", "inter-node", "layout"))
        lines += [_format_row(suggestion) for suggestion in fitting[:MAX_SHOWN]]
        lines.append("")
    lines.append(f"layouts that fit: {len(fitting):,}")
    if bytes_of_too_large:
        lines.append(
            f"too large: {len(bytes_of_too_large):,}; the smallest needs {format_bytes(min(bytes_of_too_large))}"
        )
    lines += [f"{number} refused: {reason}" for reason, number in suggestions.refused.most_common()]
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

    Section `parallel` may replace that of `options` or be merged into it; `stream` is to be merged.
    """
    before = options.parallel.model_dump(mode="json")
    chosen = suggested.parallel.model_dump(mode="json")
    defaults = Parallel.model_validate({}).model_dump(mode="json")
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
