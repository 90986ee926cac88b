"""plan --suggest: layouts that a model and a machine allow, the fastest first.

Tried are ddp and the sharding strategies, tp inside a node with sequence parallelism, pipelines, and recomputation. The
rest of the configuration stays, including precision, compile and cpu_offload. `stream.lanes` is raised where more
ranks read cells than there are lanes.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from cellmill.config.checks import check_run
from cellmill.config.machine import Machine
from cellmill.config.options import PlanOptions
from cellmill.config.parallel import Parallel, divisors
from cellmill.errors import ConfigError
from cellmill.planner.communication import link_bytes
from cellmill.planner.cost import Cost, Hardware, amount, cost, layout_words
from cellmill.planner.devices import check_precision, device_named
from cellmill.planner.fit import hardware_of, memory_needed
from cellmill.planner.work import Cells

SHOWN = 10
MAX_PIPELINE = 16
ROW = "{:>10}  {:>9}  {:>4}  {:>10}  {:>10}  {}"
SIMILAR = 0.02  # relative difference of hours that is ignored; plans are less exact


@dataclass(frozen=True)
class Suggestion:
    """A layout that fits."""

    options: PlanOptions
    cost: Cost

    @property
    def rank(self) -> tuple[float, ...]:
        """Sort key, smaller is better: hours within SIMILAR, bytes to other nodes and inside the node, axes, memory."""
        parallel, sent, hours = self.options.parallel, link_bytes(self.cost.traffic), self.cost.hours
        speed = 0.0 if hours is None else round(math.log(hours) / SIMILAR)
        return (speed, sent["inter_node"], sent["intra_node"], parallel.tp * parallel.pp, self.cost.memory.total)


@dataclass(frozen=True)
class Suggestions:
    """Result of a search."""

    fitting: list[Suggestion]  # the best first
    too_large: list[int]  # bytes of the layouts that do not fit
    refused: Counter[str]  # number of refused layouts by reason; similar reasons count as the first of them


def suggest(options: PlanOptions, cells: Cells, machine: Machine, device: str) -> Suggestions:
    """Rank the layouts for all processes of `machine`, with the fewest of a range of nodes."""
    known, hardware = device_named(device), hardware_of(options, machine, device)
    fitting, too_large = [], []
    refused: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for parallel in layouts(options, hardware):
        try:
            changed = _enough_lanes(options.model_copy(update={"parallel": parallel}), hardware)
            check_precision(parallel, device, known)
            check_run(changed, hardware.nodes, hardware.nproc_per_node, cells.n)
        except ConfigError as error:
            kind = re.sub(r"\d+", "", str(error))
            refused[examples.setdefault(kind, str(error))] += 1
            continue
        memory = memory_needed(changed, cells, hardware)
        if memory.total > hardware.usable_bytes:
            too_large.append(memory.total)
        else:
            fitting.append(Suggestion(changed, cost(changed, cells, hardware, known, memory)))
    fitting.sort(key=lambda suggestion: suggestion.rank)
    return Suggestions(fitting, too_large, refused)


def layouts(options: PlanOptions, hardware: Hardware) -> Iterator[Parallel]:
    """Layouts worth trying, without duplicates that come to the same."""
    kept, seen = options.parallel.model_dump(include={"precision", "compile", "cpu_offload"}), set()
    for changes in _changes(options, hardware):
        parallel = Parallel.model_validate(kept | changes)
        try:
            sizes = hardware.layout(parallel)
        except ConfigError:
            yield parallel  # `suggest` counts it with its reason
            continue
        # pipeline stages keep their weights gathered under every strategy
        keeps_gathered = parallel.sharding_strategy == "SHARD_GRAD_OP" and sizes.pp == 1
        sharding = (parallel.strategy, keeps_gathered)
        key = (sizes, sharding if sizes.dp > 1 else None, parallel.schedule, parallel.activation_checkpointing)
        if key not in seen:
            seen.add(key)
            yield parallel


def _changes(options: PlanOptions, hardware: Hardware) -> Iterator[dict[str, Any]]:
    blocks = min(options.model.pp_sizes().values(), default=1)
    strategies: list[dict[str, Any]] = [{"strategy": "ddp"}]
    strategies += [{"sharding_strategy": name} for name in ("FULL_SHARD", "HYBRID_SHARD", "SHARD_GRAD_OP")]
    for tp in divisors(hardware.nproc_per_node) if options.model.tp_sizes() else [1]:
        for pp in divisors(hardware.world // tp):
            if pp > min(blocks, MAX_PIPELINE):
                break
            for schedule in ("1F1B", "Interleaved1F1B") if pp > 1 else ("1F1B",):
                for recompute in (None, "full") if options.parallel.compile else (None, "selective", "full"):
                    for strategy in strategies:
                        axes = {"tp": tp, "sequence_parallel": tp > 1, "pp": pp, "schedule": schedule}
                        yield {**strategy, **axes, "activation_checkpointing": recompute}


def _enough_lanes(options: PlanOptions, hardware: Hardware) -> PlanOptions:
    """Raise `stream.lanes` to a number that all ranks can share, if the batch can be divided by it."""
    lanes, dp = options.stream.lanes, hardware.layout(options.parallel).dp
    for number in (lanes, math.lcm(lanes, dp), dp):
        if number % dp == 0 and options.train.global_batch % number == 0:
            return options.model_copy(update={"stream": options.stream.model_copy(update={"lanes": number})})
    return options


def table(suggestions: Suggestions, options: PlanOptions, machine: Machine, device: str) -> str:
    """Return the best layouts as lines of text, why others are missing, and the YAML of the best one."""
    nodes, nproc = machine.node_counts[0], machine.nproc_per_node
    lines = [f"{nodes:,} nodes x {nproc} {device}; memory per process, bytes sent per process and step", ""]
    head = ROW.format("memory", "hours", "MFU", "intra-node", "inter-node", "layout")
    lines.append(head if suggestions.fitting else "no layout fits")
    for suggestion in suggestions.fitting[:SHOWN]:
        estimate, parallel = suggestion.cost, suggestion.options.parallel
        sent = link_bytes(estimate.traffic)
        hours = "unknown" if estimate.hours is None else f"{estimate.hours:,.3g}"
        mfu = "?" if estimate.mfu is None else f"{estimate.mfu:.0%}"
        words = layout_words(parallel.model_dump() | vars(estimate.model.layout))
        words += ", sequence_parallel" if parallel.sequence_parallel else ""
        if parallel.activation_checkpointing:
            words += f", recompute {parallel.activation_checkpointing}"
        intra, inter = amount(sent["intra_node"]), amount(sent["inter_node"])
        lines.append(ROW.format(amount(estimate.memory.total), hours, mfu, intra, inter, words))
    lines += ["", f"{len(suggestions.fitting)} layouts fit"]
    if too_large := suggestions.too_large:
        lines[-1] += f", {len(too_large)} do not: the smallest needs {amount(min(too_large))}"
    lines += [f"{number} refused: {reason}" for reason, number in suggestions.refused.most_common()]
    if suggestions.fitting:
        lines += ["", "# the best layout, for config.yaml", sections(suggestions.fitting[0].options, options).rstrip()]
    return "\n".join(lines)


def sections(suggested: PlanOptions, options: PlanOptions) -> str:
    """Return the YAML of what a suggestion sets."""
    parallel = suggested.parallel.model_dump(mode="json")
    defaults = Parallel.model_validate({}).model_dump(mode="json")
    named = {"strategy", "sharding_strategy"} if suggested.parallel.strategy == "fsdp" else {"strategy"}
    tree: dict[str, Any] = {
        "parallel": {name: value for name, value in parallel.items() if name in named or value != defaults[name]}
    }
    if suggested.stream.lanes != options.stream.lanes:
        tree["stream"] = {"lanes": suggested.stream.lanes}
    return yaml.safe_dump(tree, sort_keys=False)
