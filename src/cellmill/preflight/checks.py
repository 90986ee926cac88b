"""Checks of a profile against SLURM: the training's request and every stage's.

Each is one line of a preflight's result: ok, no, or ? for a doubt that does not stop the run.
`sbatch --test-only` decides, and queues nothing. The checks here are for requests that it accepts
and SLURM then never starts: a partition that is not up, a time above its limit, more nodes than
are up, and GPUs that no node has.
"""

import os
import re
import shutil
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Self

from snakemake.cli import parse_set_threads

from cellmill.config.machine import Machine
from cellmill.errors import ConfigError, UserError
from cellmill.launch.submit import NEEDED
from cellmill.preflight import site
from cellmill.preflight.profile import (
    Profile,
    check_machine,
    evaluate,
    list_entries,
    parse_assignment,
)
from cellmill.preflight.site import Node, Partition, Refused, SlurmFacts
from cellmill.runs.slurm import CommandError

TRAIN = "set-resources: train:"  # section of the profile with the keys that remedies name
GPU_STAGES = (
    "embed",
    "embed_external",
    "predict",
    "map",
    "knock_out",
    "evaluate",
    "predict_changes",
)
DECLARED: dict[str, dict[str, tuple[int, int | None]]] = {
    "preprocess": {"mem_mb": (8000, 5), "runtime": (120, 200)},
    "vocabulary": {"mem_mb": (4000, 12), "runtime": (60, 300)},
    **{
        stage: {"mem_mb": (16000, 12), "runtime": (240, 120)}
        for stage in ("divide", "shard_part", "shard")
    },
    "import": {"mem_mb": (8000, None), "runtime": (60, None)},
    "teach": {"mem_mb": (8000, 1), "runtime": (60, 300)},
    "consolidate": {"mem_mb": (8000, None), "runtime": (60, None)},
    **{stage: {"mem_mb": (32000, 3), "runtime": (240, 25)} for stage in GPU_STAGES},
    "evaluate": {"mem_mb": (32000, None), "runtime": (240, None)},
    "atlas": {"mem_mb": (8000, 1), "runtime": (60, 10)},
    "unpack": {"mem_mb": (2000, 1), "runtime": (30, 10)},
    "zoo": {"mem_mb": (32000, 3), "runtime": (240, 25)},
}
"""Stages that are jobs, and the resources that their rules declare: a number for the smallest input,
and how many MB of input add 1 to it. Both are multiplied by the attempt. Declared values override
default-resources; set-resources override declared values.
"""
THREADS = dict.fromkeys((*GPU_STAGES, "zoo"), 4)  # CPU cores of rules that declare more than one
_KEYS = {"slurm_partition", "slurm_account", "qos", "constraint", "gres", "mem_mb", "runtime"}


@dataclass(frozen=True)
class Check:
    """One check, and for a `no` the key to change."""

    verdict: Literal["ok", "no", "?"]
    what: str
    found: str
    remedy: str = ""
    nodes: tuple[str, ...] = ()  # nodes that a `no` is about

    def __str__(self) -> str:
        line = f"{self.verdict:<3} {self.what}: {self.found}"
        return f"{line}; {self.remedy}" if self.remedy else line

    def renamed(self, what: str, machine: str) -> Self:
        """The check for a named machine: its remedy names the keys of that machine."""
        entry = r"(set-resources: (?:train|plan(?=: device)))\b"
        remedy = re.sub(entry, rf"\1.{machine}", self.remedy)
        return replace(self, what=f"{what}, {self.what}", remedy=remedy)


ok = partial(Check, "ok")
no = partial(Check, "no")
doubt = partial(Check, "?")


def judge(fits: bool, what: str, text: str, remedy: str) -> Check:
    """ok if it fits, else no with the remedy."""
    return ok(what, text) if fits else no(what, text, remedy)


def check_launcher(machine: Machine) -> Check:
    """Check that the launcher finds what it needs on this machine."""
    if machine.launcher == "local":
        cores = len(os.sched_getaffinity(0))
        processes = machine.node_counts[-1] * machine.nproc_per_node
        return ok("launcher", f"local: {processes} processes on this machine's {cores} cores")
    if machine.launcher == "slurm":
        missing = [name for name in NEEDED if shutil.which(name) is None]
        if missing:
            are = "is" if len(missing) == 1 else "are"
            remedy = (
                f"run this on a login node of the cluster, or {TRAIN} launcher: local or allocation"
            )
            return no("commands", f"{', '.join(missing)} {are} not on PATH", remedy)
        return ok("commands", ", ".join(NEEDED))
    job_id = os.environ.get("SLURM_JOB_ID")
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES") or 1)
    if job_id is None:
        remedy = f"use salloc or sbatch, or {TRAIN} launcher: slurm"
        return no("launcher", "allocation: not inside a SLURM job", remedy)
    if shutil.which("srun") is None:
        return no("launcher", "allocation: srun is not on PATH", f"{TRAIN} launcher: local")
    result = f"allocation: job {job_id} has {nodes} nodes, requested: {machine.nodes}"
    remedy = f"{TRAIN} nodes: {nodes}, or a larger job"
    return judge(nodes >= machine.node_counts[0], "launcher", result, remedy)


def check_slurm(
    ask: Callable[[], SlurmFacts], check: Callable[[SlurmFacts], Iterator[Check]]
) -> Iterator[Check]:
    """The checks that need SLURM's answers; one doubt without them."""
    try:
        facts = ask()
    except UserError as error:
        yield doubt("SLURM", f"unknown: {error}")
        return
    yield from check(facts)


def check_training(machine: Machine, facts: SlurmFacts) -> Iterator[Check]:
    """Checks of a training's job."""
    if facts.no_accounting:
        yield doubt(
            "accounting",
            f"none ({facts.no_accounting}): the cost of a run is computed from its own files",
        )
    else:
        yield ok("accounting", "sacct answers")
    yield from check_request(machine, facts)


def check_request(machine: Machine, facts: SlurmFacts) -> Iterator[Check]:
    """Checks of the first requested partition that fits, then the answer of sbatch.

    If none fits, only the checks of the first partition.
    """
    partitions = facts.partitions
    requested = machine.slurm_partition.split(",")
    if not machine.slurm_partition:
        requested = [name for name, partition in partitions.items() if partition.default]
    unknown = [name for name in requested if name not in partitions]
    if unknown or not requested:
        problem = f"there is no {unknown[0]!r}" if unknown else "there is no default partition"
        remedy = f"{TRAIN} slurm_partition: one of {', '.join(sorted(partitions))}"
        yield no("partition", problem, remedy)
        return
    shown = list[Check]()
    fitting = None
    for name in requested:
        checks = list(_check_partition(machine, partitions[name], facts))
        if all(check.verdict != "no" for check in checks):
            shown = checks
            fitting = partitions[name]
            break
        shown = shown or checks
    yield from shown
    if fitting is None:
        return
    try:
        yield ok("start", f"SLURM expects {site.estimate_start(machine)}")
    except CommandError as error:
        yield doubt("start", f"no estimate: {error}")
    except Refused as error:
        result = f"sbatch refuses {describe_request(machine)}: {error}"
        yield no("start", result, _find_keys(str(error), machine, fitting, facts))


def _check_partition(machine: Machine, partition: Partition, facts: SlurmFacts) -> Iterator[Check]:
    name = partition.name
    fewest = machine.node_counts[0]
    up = partition.up
    if partition.state != "up":
        yield no("partition", f"{name} is {partition.state}", f"{TRAIN} slurm_partition: another")
        return
    yield ok("partition", f"{name} is up")
    limit_min, source = facts.limit(partition, machine.slurm_account, machine.qos)
    allowed = "any time" if limit_min is None else f"{limit_min} min"
    fits = limit_min is None or machine.runtime <= limit_min
    text = f"{source} allows {allowed}, requested: {machine.runtime}"
    yield judge(fits, "time limit", text, f"{TRAIN} runtime: {limit_min}")
    text = f"{len(up)} of the {len(partition.nodes)} nodes of {name} are up, requested: {machine.nodes}"
    remedy = f"{TRAIN} nodes: {len(up) or 1}, or another slurm_partition"
    yield judge(len(up) >= fewest, "nodes", text, remedy)
    if len(up) < fewest:
        return
    kinds = sorted({describe_gpus(node.gpus) for node in up if node.gpus})
    have = f"nodes of {name} have {' and '.join(kinds)}" if kinds else f"{name} has none"
    if machine.gpus:
        enough = len(_with_gpus(machine, partition))
        requested = describe_gpus(machine.gpus_by_type)
        text = f"{have}, requested: {requested} on each of {machine.nodes}: {enough} have enough"
        key = "gpus_per_node" if machine.gpus_per_node else "gres"
        remedy = f"{TRAIN} {key}, or another slurm_partition"
        if not kinds:
            remedy += ", or no GPUs and device: cpu"
        yield judge(enough >= fewest, "GPUs", text, remedy)
    elif kinds:
        first = next(node.gpus for node in up if node.gpus)
        kind, number = min(first.items())
        gpus = f"{kind}:{number}" if kind else number
        remedy = f"{TRAIN} gpus_per_node: {gpus}, if the runs are to use them"
        yield doubt("GPUs", f"{have}, but none is requested", remedy)


def _with_gpus(machine: Machine, partition: Partition) -> list[Node]:
    """Nodes that are up and have the GPUs that the machine requests."""
    nodes = partition.up
    for kind, number in machine.gpus_by_type.items():
        nodes = [node for node in nodes if node.count_gpus(kind) >= number]
    return nodes


def _find_keys(refusal: str, machine: Machine, partition: Partition, facts: SlurmFacts) -> str:
    """Remedy for SLURM's refusal: the keys that it is about, and values that SLURM accepts."""
    nodes = _with_gpus(machine, partition)
    features = sorted(frozenset().union(*(node.features for node in nodes)))
    for word, key, values in (
        ("invalid account", "slurm_account", sorted(facts.accounts)),
        ("invalid qos", "qos", sorted(facts.list_qos(machine.slurm_account))),
        ("feature", "constraint", features),
        ("reservation", "reservation", []),
    ):
        if word in refusal.lower():
            one_of = f": one of {', '.join(values)}" if values else ""
            return f"{TRAIN} {key}{one_of}"
    if re.search("--mem|mem[-_ ]?per", refusal, re.IGNORECASE):
        return f"{TRAIN} mem_mb_per_cpu or mem_mb_per_gpu instead of {machine.memory_key}"
    if not re.search("node configuration|memory|cpu", refusal, re.IGNORECASE):
        return f"change {TRAIN[:-1]}"
    # the most that is met by as many nodes as are requested
    fewest = machine.node_counts[0]
    memory_mb = sorted(node.usable_mb for node in nodes)[-fewest]
    cpus = sorted(node.cpus for node in nodes)[-fewest]
    remedy = f"{TRAIN} mem_mb: {memory_mb} at most, cpus_per_task: {cpus} at most"
    if machine.constraint and features:
        remedy += f", constraint: of {', '.join(features)}"
    return remedy


def describe_gpus(gpus: dict[str, int]) -> str:
    """GPUs of a node: 4 x a100, 1 x h100."""
    texts = [f"{number} x {kind}" if kind else str(number) for kind, number in sorted(gpus.items())]
    return ", ".join(texts)


def describe_request(machine: Machine) -> str:
    """The request of a job in words."""
    gpus = machine.gpus_per_node or machine.gres
    parts = [
        machine.slurm_partition or "the default partition",
        f"{machine.nodes} nodes" if machine.nodes != "1" else "",
        f"{machine.runtime} min",
        f"{machine.mem_mb} MB" if machine.mem_mb else "",
        f"{machine.cpus} {'CPU' if machine.cpus == 1 else 'CPUs'}",
        f"GPUs {gpus}" if gpus else "",
        machine.constraint,
    ]
    return ", ".join(filter(None, parts))


class NoInput(list[str]):
    """Input files of a job that are unknown: resources that grow with them are the smallest job's."""

    size_mb = 0


def check_stages(profile: Profile, unused: Container[str], facts: SlurmFacts) -> Iterator[Check]:
    """A line for each used stage: its job fits in every attempt, or why it does not."""
    attempts = range(1, 2 + int(profile.options.get("retries") or 0))
    for stage in DECLARED:
        if stage in unused:
            continue
        what = f"stage {stage}"
        try:
            machines = [make_stage_machine(profile, stage, attempt) for attempt in attempts]
        except ConfigError as error:
            yield no(what, str(error))
            continue
        # a request grows with the attempt: if the last attempt fits, all do
        if _problem(machines[-1], facts) is None:
            yield ok(what, f"fits {describe_request(machines[0])}")
            continue
        problem = None
        attempt = 0
        while problem is None:
            problem = _problem(machines[attempt], facts)
            attempt += 1
        keys = problem.remedy.replace("set-resources: train", f"set-resources: {stage}")
        keys = keys.replace("gpus_per_node", "gpu")
        if attempt == 1:
            yield replace(problem, what=f"{what}, {problem.what}", remedy=keys)
        else:
            yield doubt(f"{what}, attempt {attempt}, {problem.what}", problem.found, keys)


def _problem(machine: Machine, facts: SlurmFacts) -> Check | None:
    """The first reason why a stage's job may never start."""
    for check in check_request(machine, facts):
        if check.verdict == "no" or (check.what == "start" and check.verdict == "?"):
            return check
    return None


def make_stage_machine(profile: Profile, stage: str, attempt: int) -> Machine:
    """The request of a stage's job, as the executor plugin makes it.

    Resources that depend on the input files are unknown here and left out. Raise ConfigError naming
    a value that is wrong.
    """
    options = profile.options
    path = profile.path
    threads = parse_set_threads(list_entries(options, "set-threads", path)).get(stage)
    known = {
        "attempt": attempt,
        "threads": THREADS.get(stage, 1) if threads is None else threads.value,
    }
    resources = _evaluated(list_entries(options, "default-resources", path), known)
    resources |= {key: base * attempt for key, (base, _) in DECLARED[stage].items()}
    entries = list_entries(options, "set-resources", path, stage)
    resources |= _evaluated([entry.removeprefix(f"{stage}:") for entry in entries], known)
    machine = {key: value for key, value in resources.items() if key in _KEYS and value is not None}
    gpus = resources.get("gpu")
    if gpus:
        model = resources.get("gpu_model")
        machine["gpus_per_node"] = f"{model}:{gpus}" if model else str(gpus)
    if options.get("slurm-qos"):
        machine["qos"] = options["slurm-qos"]
    machine |= {
        "launcher": "slurm",
        "save_within_s": 1,
        "nodes": resources.get("nodes") or 1,
        "cpus_per_task": max(1, int(resources.get("cpus_per_task") or known["threads"] or 1)),
        "reservation": options.get("slurm-reservation") or "",
    }
    return check_machine(machine, str(path), stage)


def _evaluated(assignments: list[str], known: dict[str, int]) -> dict[str, Any]:
    """Resources as Snakemake evaluates them; None for those that depend on the input."""
    values: dict[str, Any] = {}
    for assignment in assignments:
        try:
            values |= evaluate(parse_assignment(assignment), input=NoInput(), **known)
        except Exception:  # whatever the expression raises
            values[assignment.partition("=")[0]] = None
    return values
