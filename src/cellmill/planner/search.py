"""Search for layouts that fit: check a run, find the first change that makes it fit, and rank
layouts by speed.

A plan that does not fit and a process that ran out of memory get the first change that helps, of
one list (`_changes`). `plan --suggest` tries ddp and the sharding strategies, tp inside a node with
sequence parallelism, pipelines, and recomputation; the rest of the configuration stays.
`stream.lanes` is raised where more ranks read cells than there are.
"""

import errno
import math
import os
import re
import subprocess
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
import yaml

from cellmill.config.checks import check_nodes
from cellmill.config.load import stored_options
from cellmill.config.machine import Machine
from cellmill.config.options import PlanOptions
from cellmill.config.parallel import Parallel, divisors
from cellmill.data.shards.manifest import Manifest
from cellmill.data.stream.tokenizers import token_numbers
from cellmill.errors import ConfigError
from cellmill.files import read_json
from cellmill.planner.cost import GB, Cost, Hardware, amount, cost, layout_words
from cellmill.planner.devices import check_precision, device_named
from cellmill.planner.memory import Memory, PlannedModel, link_bytes, peak_memory
from cellmill.planner.work import Cells, detected_genes, measure_work

FREE_HALVINGS = 2  # of a micro-batch, which cost less than recomputing a forward pass
MAX_TOKENS = 1 << 24

# instructions for the user, and the options and hardware after them
Change = tuple[list[str], PlanOptions, "Hardware"]
SHOWN = 10
MAX_PIPELINE = 16
SCHEDULES = ("1F1B", "Interleaved1F1B")  # of a pipeline
ROW = "{:>10}  {:>9}  {:>4}  {:>10}  {:>10}  {}"
SIMILAR = 0.02  # relative difference of hours that is ignored; plans are less exact
TIMEOUT_S = 120
LESS_FRAC = 0.8  # of the planned memory; a remedy must need less than this
ALLOCATORS = re.compile(  # of torch on a CPU; of pinned host memory, a second context, cuBLAS and cuDNN; of NCCL
    r"can't allocate memory|not enough memory|Cannot allocate memory|CUDA error: out of memory|"
    r"CU(BLAS|DNN)_STATUS_ALLOC_FAILED|Cuda failure (\d+ )?'?out of memory",
    re.IGNORECASE,
)


def hardware_of(options: PlanOptions, machine: Machine, device: str) -> Hardware:
    """Return the processes that `machine` gives a run; of a range of nodes the fewest, which need
    most memory.
    """
    memory_gb = options.plan.memory_gb or device_named(device).memory_gb
    if memory_gb:
        whole = round(memory_gb * GB)
    else:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // machine.nproc_per_node
    usable = int(whole * options.plan.memory_frac)
    return Hardware(machine.node_counts[0], machine.nproc_per_node, device, whole, usable)


def memory_needed(
    options: PlanOptions, cells: Cells, hardware: Hardware, micro_tokens: int | None = None
) -> Memory:
    """Return the memory of the rank that needs the most, optionally with micro-batches of
    `micro_tokens` tokens.
    """
    if hardware.device == "cpu":  # there is no other memory to offload to
        options = _with(options, cpu_offload=None)
    model = PlannedModel.of(
        options, cells.n_genes, hardware.world, hardware.nproc_per_node, cells.levels
    )
    work = measure_work(options, cells, model.layout)
    return peak_memory(
        model, work.micro_tokens if micro_tokens is None else micro_tokens, work.most_micro_batches
    )


def check_memory(options: PlanOptions, cells: Cells, hardware: Hardware) -> Memory:
    """Return the memory of a run. Raises ConfigError with the first change that makes it fit if it
    does not.
    """
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
    """Return the most tokens of a micro-batch that fit, with the same number of micro-batches; 0 if
    none fits.
    """
    sizes = range(1, MAX_TOKENS + 1)
    limit = hardware.usable_bytes
    return bisect_right(
        sizes, limit, key=lambda tokens: memory_needed(options, cells, hardware, tokens).total
    )


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
    parallel = options.parallel
    sizes = options.model.tp_sizes().values()
    common = (
        math.gcd(hardware.nproc_per_node, hardware.world // parallel.pp, *sizes) if sizes else 1
    )
    for tp in (tp for tp in divisors(common) if tp > parallel.tp):
        words = f"set parallel.tp to {tp} with parallel.sequence_parallel"
        yield [*kept, words], _with(options, tp=tp, sequence_parallel=True), hardware
    # a block per stage
    most = min(options.model.pp_sizes().values(), default=1) // (parallel.stages // parallel.pp)
    for pp in (pp for pp in divisors(hardware.world // parallel.tp) if parallel.pp < pp <= most):
        yield [*kept, f"set parallel.pp to {pp}"], _with(options, pp=pp), hardware
    if (
        hardware.device != "cpu"
        and options.train.optimizer.offloaded
        and parallel.cpu_offload != "full"
    ):
        offloads = [] if parallel.cpu_offload else ["optimizer"]
        for offload in [*offloads, "full"] if hardware.layout(parallel).dp > 1 else offloads:
            yield (
                [*kept, f"set parallel.cpu_offload to {offload}"],
                _with(options, cpu_offload=offload),
                hardware,
            )
    for nodes in (hardware.nodes * 2**k for k in range(1, 8)):
        yield [*kept, f"use {nodes} nodes (the profile)"], options, replace(hardware, nodes=nodes)


def _smaller_budgets(options: PlanOptions, hardware: Hardware, kept: list[str]) -> Iterator[Change]:
    """Powers of two below the token budget that still hold the largest cell."""
    budget = 1 << (options.train.token_budget - 1).bit_length() - 1
    while budget >= max(1, options.tokens.max_tokens):
        changed = options.model_copy(
            update={"train": options.train.model_copy(update={"token_budget": budget})}
        )
        yield [*kept, f"lower train.token_budget to {budget}"], changed, hardware
        budget //= 2


def _with(options: PlanOptions, **changes: Any) -> PlanOptions:
    parallel = Parallel.model_validate(options.parallel.model_dump() | changes)
    return options.model_copy(update={"parallel": parallel})


@dataclass(frozen=True)
class Suggestions:
    fitting: list[Cost]  # the best first
    too_large: list[int]  # bytes of the layouts that do not fit
    # number of refused layouts by reason; similar reasons count as the first of them
    refused: Counter[str]


def suggest(options: PlanOptions, cells: Cells, machine: Machine, device: str) -> Suggestions:
    """Rank the layouts for all processes of `machine`, with the fewest of a range of nodes."""
    known = device_named(device)
    hardware = hardware_of(options, machine, device)
    fitting = []
    too_large = []
    refused: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for parallel in layouts(options, hardware):
        try:
            stream = options.stream.model_copy(
                update={"lanes": _lanes(options, hardware.layout(parallel).dp)}
            )
            changed = options.model_copy(update={"parallel": parallel, "stream": stream})
            check_precision(parallel, device, known)
            check_nodes(
                changed, range(hardware.nodes, hardware.nodes + 1), hardware.nproc_per_node, cells.n
            )
        except ConfigError as error:
            kind = re.sub(r"\d+", "", str(error))
            refused[examples.setdefault(kind, str(error))] += 1
            continue
        memory = memory_needed(changed, cells, hardware)
        if memory.total > hardware.usable_bytes:
            too_large.append(memory.total)
        else:
            fitting.append(cost(changed, cells, hardware, known, memory))
    return Suggestions(sorted(fitting, key=_rank), too_large, refused)


def _lanes(options: PlanOptions, dp: int) -> int:
    """Lanes that `dp` ranks can share, if the batch can be divided by their number; otherwise those
    of the options.
    """
    lanes = options.stream.lanes
    for number in (lanes, math.lcm(lanes, dp), dp):
        if number % dp == 0 and options.train.global_batch % number == 0:
            return number
    return lanes


def _rank(found: Cost) -> tuple[float, ...]:
    """Sort key, smaller is better: hours within SIMILAR, bytes to other nodes and inside the node,
    axes, memory.
    """
    parallel = found.options.parallel
    sent = link_bytes(found.traffic)
    hours = found.hours
    speed = 0.0 if hours is None else round(math.log(hours) / SIMILAR)
    return (
        speed,
        sent["inter_node"],
        sent["intra_node"],
        parallel.tp * parallel.pp,
        found.memory.total,
    )


def layouts(options: PlanOptions, hardware: Hardware) -> Iterator[Parallel]:
    """Layouts worth trying, without duplicates that come to the same."""
    kept = options.parallel.model_dump(include={"precision", "compile", "cpu_offload"})
    seen = set()
    largest = (
        min(MAX_PIPELINE, *options.model.pp_sizes().values()) if options.model.pp_sizes() else 1
    )
    strategies = [{"strategy": "ddp"}]
    strategies += [
        {"sharding_strategy": name} for name in ("FULL_SHARD", "HYBRID_SHARD", "SHARD_GRAD_OP")
    ]
    recomputed = (None, "full") if options.parallel.compile else (None, "selective", "full")
    tensor = divisors(hardware.nproc_per_node) if options.model.tp_sizes() else [1]
    sizes_of = [(tp, pp) for tp in tensor for pp in divisors(hardware.world // tp) if pp <= largest]
    for (tp, pp), schedule, recompute, strategy in product(
        sizes_of, SCHEDULES, recomputed, strategies
    ):
        if pp == 1 and schedule != SCHEDULES[0]:
            continue
        axes = {"tp": tp, "sequence_parallel": tp > 1, "pp": pp, "schedule": schedule}
        parallel = Parallel.model_validate(
            kept | strategy | axes | {"activation_checkpointing": recompute}
        )
        try:
            sizes = hardware.layout(parallel)
        except ConfigError:
            yield parallel  # `suggest` counts it with its reason
            continue
        # pipeline stages keep their weights gathered under every strategy
        keeps_gathered = parallel.sharding_strategy == "SHARD_GRAD_OP" and sizes.pp == 1
        sharding = (parallel.strategy, keeps_gathered)
        key = (
            sizes,
            sharding if sizes.dp > 1 else None,
            parallel.schedule,
            parallel.activation_checkpointing,
        )
        if key not in seen:
            seen.add(key)
            yield parallel


def table(suggestions: Suggestions, options: PlanOptions, machine: Machine, device: str) -> str:
    """Return the best layouts as lines of text, why others are missing, and the YAML of the best
    one.
    """
    nodes = machine.node_counts[0]
    nproc = machine.nproc_per_node
    lines = [
        f"{nodes:,} nodes x {nproc} {device}; memory per process, bytes sent per process and step",
        "",
    ]
    head = ROW.format("memory", "hours", "MFU", "intra-node", "inter-node", "layout")
    lines += [head if suggestions.fitting else "no layout fits"]
    for found in suggestions.fitting[:SHOWN]:
        parallel = found.options.parallel
        sent = link_bytes(found.traffic)
        hours = "unknown" if found.hours is None else f"{found.hours:,.3g}"
        mfu = "?" if found.mfu is None else f"{found.mfu:.0%}"
        words = layout_words(parallel.model_dump() | vars(found.model.layout))
        words += ", sequence_parallel" if parallel.sequence_parallel else ""
        if parallel.activation_checkpointing:
            words += f", recompute {parallel.activation_checkpointing}"
        intra = amount(sent["intra_node"])
        inter = amount(sent["inter_node"])
        lines.append(ROW.format(amount(found.memory.total), hours, mfu, intra, inter, words))
    lines += ["", f"{len(suggestions.fitting)} layouts fit"]
    too_large = suggestions.too_large
    if too_large:
        lines[-1] += f", {len(too_large)} do not: the smallest needs {amount(min(too_large))}"
    lines += [f"{number} refused: {reason}" for reason, number in suggestions.refused.most_common()]
    if suggestions.fitting:
        lines += [
            "",
            "# the best layout, for config.yaml",
            sections(suggestions.fitting[0].options, options).rstrip(),
        ]
    return "\n".join(lines)


def sections(suggested: PlanOptions, options: PlanOptions) -> str:
    defaults = Parallel.model_validate({}).model_dump(mode="json")
    named = (
        {"strategy", "sharding_strategy"} if suggested.parallel.strategy == "fsdp" else {"strategy"}
    )
    chosen = suggested.parallel.model_dump(mode="json").items()
    tree: dict[str, Any] = {
        "parallel": {name: v for name, v in chosen if name in named or v != defaults[name]}
    }
    if suggested.stream.lanes != options.stream.lanes:
        tree["stream"] = {"lanes": suggested.stream.lanes}
    return yaml.safe_dump(tree, sort_keys=False)


def is_out_of_memory(error: BaseException) -> bool:
    """True for out-of-memory errors of Python, of a device and its libraries, and of torch's CPU
    allocator.
    """
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and ALLOCATORS.search(str(error)) is not None


def ask(run_json: Path, world: int, nproc_per_node: int, device: str) -> str | None:
    """Return `advice` from a new process, since sizes are measured without a process group; None if
    that fails.
    """
    words = [
        "-m",
        "cellmill.planner.search",
        str(run_json),
        str(world),
        str(nproc_per_node),
        device,
    ]
    try:
        done = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def advice(run_json: Path, world: int, nproc_per_node: int, device: str = "cpu") -> str:
    """Return the planned memory of a process, and the first change after which it needs a fifth
    less.
    """
    record = read_json(run_json)
    options = PlanOptions.model_validate(
        {**dict(stored_options(record["options"], "run.json")), "plan": {}}
    )
    manifest = Manifest.read(Path(record["manifest"]))
    kept, zeros = token_numbers(options.tokens, detected_genes(manifest), manifest.n_genes)
    cells = Cells(kept + zeros, manifest.n_genes, levels=manifest.levels(options.obs_columns()))
    hardware = Hardware(world // nproc_per_node, nproc_per_node, device, 0, 0)
    memory = memory_needed(options, cells, hardware)
    parts = sorted(asdict(memory).items(), key=lambda part: -part[1])
    listed = ", ".join(f"{name} {amount(n)}" for name, n in parts if n)
    less = replace(hardware, usable_bytes=int(LESS_FRAC * memory.total))
    return (
        f"the plan was {amount(memory.total)} per process, most of it {parts[0][0]} ({listed}): "
        f"{remedy(options, cells, less)}"
    )


if __name__ == "__main__":
    print(advice(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
