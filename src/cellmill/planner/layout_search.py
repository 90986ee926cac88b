"""plan --suggest: layouts that a model and a machine allow, the fastest first. Torch-free.

Tried are ddp and the sharding strategies, tp inside a node with sequence parallel, pipelines, and recomputation; the
rest of the configuration stays, with precision, compile and cpu_offload. `stream.lanes` is raised where more processes
share the cells than it has lanes.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from cellmill.config.machine import Machine
from cellmill.config.options import PlanOptions
from cellmill.config.parallel import Parallel
from cellmill.errors import ConfigError
from cellmill.planner.checks import check_run
from cellmill.planner.cost import Cost, cost, links
from cellmill.planner.devices import check_precision, device_named
from cellmill.planner.fit import Hardware, amount, need, place_of
from cellmill.planner.table import layout_words
from cellmill.planner.work import Cells

BEST = 10
LONGEST_PIPELINE = 16
ALIKE = 0.02


@dataclass(frozen=True)
class Suggestion:
    """A layout that fits."""

    options: PlanOptions
    cost: Cost

    @property
    def rank(self) -> tuple[float, ...]:
        """Smaller is better: hours, or what is sent where no speed is known. What is as fast within ALIKE, which is
        finer than a plan is true, goes by what it sends to other nodes, then by axes and memory."""
        parallel, sent, hours = self.options.parallel, links(self.cost.traffic), self.cost.hours
        speed = 0.0 if hours is None else round(math.log(hours) / ALIKE)
        return (speed, sent["inter_node"], sent["intra_node"], parallel.tp * parallel.pp, self.cost.memory.total)


@dataclass(frozen=True)
class Suggestions:
    """What was found among the layouts that were tried."""

    fitting: list[Suggestion]
    """The best first."""
    too_large: int
    smallest_bytes: int | None
    """What the smallest of those needs that do not fit."""
    refused: Counter[str]
    """How many, by why; of similar reasons the first."""


def suggest(options: PlanOptions, cells: Cells, machine: Machine, device: str) -> Suggestions:
    """Ranks layouts for as many processes as `machine` has, of a range of nodes the fewest."""
    known, place = device_named(device), place_of(options, machine, device)
    fitting, too_large = [], []
    refused: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for parallel in layouts(options, place):
        try:
            changed = _enough_lanes(options.model_copy(update={"parallel": parallel}), place)
            check_precision(parallel, device, known)
            check_run(changed, place.nodes, place.nproc_per_node, cells.n)
        except ConfigError as error:
            kind = re.sub(r"\d+", "", str(error))
            refused[examples.setdefault(kind, str(error))] += 1
            continue
        memory = need(changed, cells, place)
        if memory.total > place.limit.usable:
            too_large.append(memory.total)
        else:
            fitting.append(Suggestion(changed, cost(changed, cells, place, known, memory)))
    fitting.sort(key=lambda suggestion: suggestion.rank)
    return Suggestions(fitting, len(too_large), min(too_large, default=None), refused)


def layouts(options: PlanOptions, place: Hardware) -> Iterator[Parallel]:
    """Those worth trying; of several that come to the same, one."""
    seen = set()
    for changes in _changes(options, place):
        kept = {name: getattr(options.parallel, name) for name in ("precision", "compile", "cpu_offload")}
        parallel = Parallel.model_validate(kept | changes)
        try:
            sizes = place.layout(parallel)
        except ConfigError:
            yield parallel  # to be refused with its reason
            continue
        # stages of a pipeline keep their weights together whatever the strategy
        whole = parallel.sharding_strategy == "SHARD_GRAD_OP" and sizes.pp == 1
        sharding = (parallel.strategy, whole)
        key = (sizes, sharding if sizes.dp > 1 else None, parallel.schedule, parallel.activation_checkpointing)
        if key not in seen:
            seen.add(key)
            yield parallel


def _changes(options: PlanOptions, place: Hardware) -> Iterator[dict[str, Any]]:
    tensors = _divisors(place.nproc_per_node) if options.model.cut_by_tp() else [1]
    blocks = min(options.model.cut_by_pp().values(), default=1)
    strategies: list[dict[str, Any]] = [{"strategy": "ddp"}]
    strategies += [{"sharding_strategy": name} for name in ("FULL_SHARD", "HYBRID_SHARD", "SHARD_GRAD_OP")]
    for tp in tensors:
        for pp in _divisors(place.world // tp):
            if pp > min(blocks, LONGEST_PIPELINE):
                break
            for schedule in ("1F1B", "Interleaved1F1B") if pp > 1 else ("1F1B",):
                for how in (None, "full") if options.parallel.compile else (None, "selective", "full"):
                    for strategy in strategies:
                        axes = {"tp": tp, "sequence_parallel": tp > 1, "pp": pp, "schedule": schedule}
                        yield {**strategy, **axes, "activation_checkpointing": how}


def _enough_lanes(options: PlanOptions, place: Hardware) -> PlanOptions:
    """With lanes that all processes can share, if the batch can be dealt to so many."""
    lanes, dp = options.stream.lanes, place.layout(options.parallel).dp
    for more in (lanes, math.lcm(lanes, dp), dp):
        if more % dp == 0 and options.train.global_batch % more == 0:
            return options.model_copy(update={"stream": options.stream.model_copy(update={"lanes": more})})
    return options


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def table(found: Suggestions, options: PlanOptions, machine: Machine, device: str) -> str:
    """The best as lines to read, why others are not there, and the sections of the first for config.yaml."""
    nodes, nproc = machine.node_counts[0], machine.nproc_per_node
    lines = [f"{nodes:,} nodes x {nproc} {device}; of each process its memory, and what it sends in a step", ""]
    head = f"{'memory':>10}  {'hours':>9}  {'MFU':>4}  {'in node':>10}  {'to others':>10}  layout"
    lines.append(head if found.fitting else "no layout fits")
    for suggestion in found.fitting[:BEST]:
        taken, parallel = suggestion.cost, suggestion.options.parallel
        sent = links(taken.traffic)
        hours = "unknown" if taken.hours is None else f"{taken.hours:,.3g}"
        mfu = "?" if taken.mfu is None else f"{taken.mfu:.0%}"
        words = layout_words(parallel.model_dump() | vars(taken.sizes))
        how = parallel.activation_checkpointing
        again = (", sequence_parallel" if parallel.sequence_parallel else "") + (f", recompute {how}" if how else "")
        lines.append(
            f"{amount(taken.memory.total):>10}  {hours:>9}  {mfu:>4}  {amount(sent['intra_node']):>10}  "
            f"{amount(sent['inter_node']):>10}  {words}{again}"
        )
    lines += ["", f"{len(found.fitting)} layouts fit"]
    if found.smallest_bytes is not None:
        lines[-1] += f", {found.too_large} do not: the smallest of them needs {amount(found.smallest_bytes)}"
    lines += [f"{number} refused: {reason}" for reason, number in found.refused.most_common()]
    if found.fitting:
        lines += ["", "# the first, for config.yaml", sections(found.fitting[0].options, options).rstrip()]
    return "\n".join(lines)


def sections(suggested: PlanOptions, options: PlanOptions) -> str:
    """YAML of what a suggestion sets."""
    parallel = suggested.parallel.model_dump(mode="json")
    plain = Parallel.model_validate({}).model_dump(mode="json")
    named = {"strategy", "sharding_strategy"} if suggested.parallel.strategy == "fsdp" else {"strategy"}
    kept = {name: value for name, value in parallel.items() if name in named or value != plain[name]}
    tree: dict[str, Any] = {"parallel": kept}
    if suggested.stream.lanes != options.stream.lanes:
        tree["stream"] = {"lanes": suggested.stream.lanes}
    return yaml.safe_dump(tree, sort_keys=False)
