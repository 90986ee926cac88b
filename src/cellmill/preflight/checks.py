"""Checks of a profile against SLURM (machine and stages), each one line of a preflight's result. Queues nothing.

A line is ok, no, or ? for a doubt that does not stop the run. The machine's partition, nodes, account and estimated
start are checked, and what the profile requests for each stage must exist: SLURM accepts a job over a partition's time
limit and lets it wait for ever without a message.
"""

import os
import re
import shutil
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from snakemake.cli import parse_set_resources, parse_set_threads

from cellmill.config.machine import Machine
from cellmill.errors import ConfigError
from cellmill.preflight import site
from cellmill.preflight.profile import Profile, check_machine, entries_of
from cellmill.preflight.site import Node, Partition, Refused
from cellmill.runs.jobs import CommandError

TRAIN = "set-resources: train:"
"""Section of the profile with the keys that remedies name."""


@dataclass(frozen=True)
class Check:
    """One check: its figure, and for a `no` the key to change."""

    verdict: Literal["ok", "no", "?"]
    what: str
    figure: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.verdict:<3} {self.what}: {self.figure}{f'; {self.remedy}' if self.remedy else ''}"


def ok(what: str, figure: str) -> Check:
    return Check("ok", what, figure)


def no(what: str, figure: str, remedy: str = "") -> Check:
    return Check("no", what, figure, remedy)


def doubt(what: str, figure: str, remedy: str = "") -> Check:
    return Check("?", what, figure, remedy)


def judged(fits: bool, what: str, figure: str, remedy: str) -> Check:
    """ok if it fits, else no with the remedy."""
    return ok(what, figure) if fits else no(what, figure, remedy)


def of_named(check: Check, machine: str) -> Check:
    """The check as one of the machine that runs name `machine`: the keys to change are of its own entries."""
    remedy = re.sub(r"(set-resources: (?:train|plan(?=: device)))\b", rf"\1.{machine}", check.remedy)
    return replace(check, what=f"machine {machine}, {check.what}", remedy=remedy)


NEEDED = ("sbatch", "srun", "squeue", "scancel")


def check_launcher(machine: Machine) -> Iterator[Check]:
    """Check that the launcher finds what it needs on this machine."""
    if machine.launcher == "local":
        cores, processes = len(os.sched_getaffinity(0)), machine.node_counts[-1] * machine.nproc_per_node
        yield ok("launcher", f"local: {processes} processes on this machine's {cores} cores")
    elif machine.launcher == "allocation":
        yield _check_allocation(machine)
    elif missing := [name for name in NEEDED if shutil.which(name) is None]:
        yield no(
            "commands",
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not on PATH",
            f"run this on a login node of the cluster, or {TRAIN} launcher: local or allocation",
        )
    else:
        yield ok("commands", ", ".join(NEEDED))
        try:
            site.accounting()
            yield ok("accounting", "sacct answers")
        except CommandError as error:
            yield doubt("accounting", f"none ({error}): the cost of a run is computed from its own files")


def _check_allocation(machine: Machine) -> Check:
    job_id, nodes = os.environ.get("SLURM_JOB_ID"), int(os.environ.get("SLURM_JOB_NUM_NODES") or 1)
    if job_id is None:
        remedy = f"use salloc or sbatch, or {TRAIN} launcher: slurm"
        return no("launcher", "allocation: not inside a SLURM job", remedy)
    if shutil.which("srun") is None:
        return no("launcher", "allocation: srun is not on PATH", f"{TRAIN} launcher: local")
    figure = f"allocation: job {job_id} has {nodes} nodes, requested: {machine.nodes}"
    return judged(nodes >= machine.node_counts[0], "launcher", figure, f"{TRAIN} nodes: {nodes}, or a larger job")


def check_site(machine: Machine) -> Iterator[Check]:
    """Checks of partition, estimated start and account."""
    failed = False
    try:
        for check in check_partitions(machine, site.ask_partitions()):
            failed |= check.verdict == "no"
            yield check
    except CommandError as error:
        yield doubt("partition", f"unknown: {error}")
    refused = False
    try:
        yield ok("start", f"SLURM expects {site.estimate(machine)}")
    except CommandError as error:
        yield doubt("start", f"no estimate: {error}")
    except Refused as error:
        refused = True
        if failed:  # do not count one reason twice
            yield doubt("start", f"sbatch refuses the job too: {error}")
        else:
            yield no("start", f"sbatch refuses the job: {error}", f"change {TRAIN[:-1]}")
    if machine.slurm_account or machine.qos:
        yield from _check_account(machine, refused)


def check_partitions(machine: Machine, known: dict[str, Partition]) -> Iterator[Check]:
    """Checks of the first requested partition that fits; if none does, of the first."""
    requested = machine.slurm_partition.split(",") if machine.slurm_partition else []
    requested = requested or [name for name, partition in known.items() if partition.default]
    remedy = f"{TRAIN} slurm_partition: one of {', '.join(sorted(known))}"
    if not requested:
        yield no("partition", "there is no default partition", remedy)
    elif missing := [name for name in requested if name not in known]:
        yield no("partition", f"there is no {missing[0]!r}", remedy)
    else:
        tried = [list(_check_partition(machine, known[name])) for name in requested]
        yield from next((made for made in tried if all(check.verdict != "no" for check in made)), tried[0])


def _check_partition(machine: Machine, partition: Partition) -> Iterator[Check]:
    """Check one resource after the other on the nodes that had the earlier ones; stop when too few nodes are left."""
    name, fewest, limit = partition.name, machine.node_counts[0], partition.limit_min
    if partition.state != "up":
        yield no("partition", f"{name} is {partition.state}", f"{TRAIN} slurm_partition: another")
        return
    yield ok("partition", f"{name} is up")
    text = f"{name} allows {'any time' if limit is None else f'{limit} min'}, requested: {machine.runtime}"
    yield judged(limit is None or machine.runtime <= limit, "time limit", text, f"{TRAIN} runtime: {limit}")
    nodes = [node for node in partition.nodes if node.up]
    text = f"{len(nodes)} of the {len(partition.nodes)} nodes of {name} are up, requested: {machine.nodes}"
    yield judged(len(nodes) >= fewest, "nodes", text, f"{TRAIN} nodes: {len(nodes) or 1}, or another slurm_partition")
    if len(nodes) < fewest:
        return
    check, nodes = _check_gpus(machine, name, nodes)
    if check is not None:
        yield check
    if len(nodes) < fewest:
        return
    have = f"{_count(fewest)} of {name} {'has' if fewest == 1 else 'have'}"
    memory = sorted((node.memory_mb for node in nodes), reverse=True)[fewest - 1]
    text = f"{have} {memory} MB, requested: {machine.mem_mb or 'all of it'}"
    yield judged(memory >= machine.mem_mb, "memory", text, f"{TRAIN} mem_mb: {memory}, or 0 for all of it")
    nodes = [node for node in nodes if node.memory_mb >= machine.mem_mb]
    if len(nodes) < fewest:
        return
    cpus = sorted((node.cpus for node in nodes), reverse=True)[fewest - 1]
    text = f"{have} {cpus}, requested: {machine.cpus}"
    yield judged(cpus >= machine.cpus, "CPUs", text, f"{TRAIN} cpus_per_task: {cpus}")
    nodes = [node for node in nodes if node.cpus >= machine.cpus]
    if machine.constraint and len(nodes) >= fewest:
        yield _check_constraint(machine, partition, [node.features for node in nodes])


def _check_gpus(machine: Machine, name: str, nodes: list[Node]) -> tuple[Check | None, list[Node]]:
    """The check of GPUs, and the nodes that have those requested."""
    kind, per_node = gpu_request(machine)
    there = sorted({gpus_text(node.gpus) for node in nodes if node.gpus})
    if not per_node:
        if not there:
            return None, nodes
        of_type, number = min(next(node.gpus for node in nodes if node.gpus).items())
        remedy = f"{TRAIN} gpus_per_node: {f'{of_type}:' if of_type else ''}{number}, if the runs are to use them"
        return doubt("GPUs", f"nodes of {name} have {' and '.join(there)}, but none is requested", remedy), nodes
    fitting = [node for node in nodes if node.gpus_of(kind) >= per_node]
    request = f"requested: {per_node}{f' x {kind}' if kind else ''} on each of {machine.nodes}"
    if len(fitting) < machine.node_counts[0]:
        have = f"nodes of {name} have {' and '.join(there)}" if there else f"{name} has none"
        remedy = f"{TRAIN} {'gpus_per_node' if machine.gpus_per_node else 'gres'}, or another slurm_partition"
        return no("GPUs", f"{have}, {request}: {len(fitting)} nodes have enough", remedy), fitting
    return ok("GPUs", f"{_count(len(fitting))} of {name} have them, {request}"), fitting


def gpu_request(machine: Machine) -> tuple[str, int]:
    """Type ("" for any) and number of GPUs requested on each node."""
    text = machine.gpus_per_node or next(
        (part.removeprefix("gpu").removeprefix(":") or "1" for part in machine.gres.split(",") if part[:3] == "gpu"), ""
    )
    kind, _, number = text.partition("(")[0].rpartition(":")
    if number and not number.isdecimal():
        return number, 1
    return kind, int(number or 0)


def gpus_text(gpus: dict[str, int]) -> str:
    """GPUs of a node: 4 x a100, 1 x h100."""
    return ", ".join(f"{number} x {kind}" if kind else str(number) for kind, number in sorted(gpus.items()))


def _check_constraint(machine: Machine, partition: Partition, features: list[frozenset[str]]) -> Check:
    """Check that nodes have the features; of counts and alternatives only the names, the rest is left to sbatch."""
    known: frozenset[str] = frozenset().union(*(node.features for node in partition.nodes))
    constraint = machine.constraint
    names = [word.partition("*")[0] for word in re.split(r"[][()&|,]+", constraint) if word]
    if unknown := [name for name in names if name not in known]:
        have = f"there are {', '.join(sorted(known))}" if known else "they have no features"
        return no("constraint", f"no node of {partition.name} is {unknown[0]!r}: {have}", f"{TRAIN} constraint")
    if set("|[*(") & set(constraint):
        return ok("constraint", f"{partition.name} has nodes that are {', '.join(names)}")
    fitting = sum(set(names) <= node for node in features)
    have = f"{_count(fitting)} of {partition.name} {'is' if fitting == 1 else 'are'} {constraint}"
    text = f"{have}, requested: {machine.nodes}"
    return judged(fitting >= machine.node_counts[0], "constraint", text, f"{TRAIN} constraint or nodes")


def _check_account(machine: Machine, refused: bool) -> Iterator[Check]:
    """Check account and QOS by sacctmgr; if sbatch accepts one that sacctmgr does not list, nothing enforces it."""
    try:
        mine = site.associations()
    except CommandError as error:
        yield doubt("account", f"unknown: {error}")
        return
    wrong = no if refused else doubt
    of_account = mine[machine.slurm_account] if machine.slurm_account in mine else set().union(*mine.values())
    for what, key, asked, yours in (
        ("account", "slurm_account", machine.slurm_account, mine.keys()),
        ("qos", "qos", machine.qos, of_account),
    ):
        if asked and asked in yours:
            yield ok(what, f"{asked} is one of yours")
        elif asked:
            have = f"there are {', '.join(sorted(yours))}" if yours else "there are none"
            yield wrong(what, f"{asked} is not one of yours: {have}", f"{TRAIN} {key}")


def _count(nodes: int) -> str:
    return f"{nodes} {'node' if nodes == 1 else 'nodes'}"


DECLARED: dict[str, dict[str, int]] = {
    "preprocess": {"mem_mb": 8000, "runtime": 120},
    "vocabulary": {"mem_mb": 4000, "runtime": 60},
    "divide": {"mem_mb": 16000, "runtime": 240},
    "shard_part": {"mem_mb": 16000, "runtime": 240},
    "shard": {"mem_mb": 16000, "runtime": 240},
    "consolidate": {},
    "embed": {"mem_mb": 32000, "runtime": 240, "threads": 4},
    "embed_external": {"mem_mb": 32000, "runtime": 240, "threads": 4},
    "predict": {"mem_mb": 32000, "runtime": 240, "threads": 4},
    "evaluate": {"mem_mb": 32000, "runtime": 240, "threads": 4},
    "predict_changes": {"mem_mb": 32000, "runtime": 240, "threads": 4},
}
"""Stages that are no local rules, and what their rules declare for the smallest input: default-resources lie under it,
set-resources over."""
_KEYS = {"slurm_partition", "slurm_account", "qos", "constraint", "gres", "mem_mb", "runtime"}
_OTHER_KEYS = {
    ", or 0 for all of it": "",
    f"{TRAIN} cpus_per_task": "set-threads: {stage}",
    f"{TRAIN} gpus_per_node": "set-resources: {stage}: gpu",
    "set-resources: train": "set-resources: {stage}",
}
"""Keys in the remedies of a training, and those of a stage."""


class NoInput(list[str]):
    """Input files of a job that are not known: resources that grow with their size are those of the smallest job."""

    size_mb = 0


def check_stages(profile: Profile, unused: Container[str] = ()) -> Iterator[Check]:
    """A line for each stage but the unused: that its job fits, or the first reason why it does not."""
    if profile.options.get("executor") != "slurm":
        return
    try:
        known = site.ask_partitions()
    except CommandError as error:
        yield doubt("stages", f"unknown: {error}")
        return
    for stage in (stage for stage in DECLARED if stage not in unused):
        try:
            yield _check_stage(profile, stage, known)
        except ConfigError as error:
            yield no(f"stage {stage}", str(error))


def _check_stage(profile: Profile, stage: str, known: dict[str, Partition]) -> Check:
    what, machine = f"stage {stage}", stage_machine(profile, stage)
    if (refusal := _refusal(machine, known)) is not None:
        return no(what, f"{refusal.what}: {refusal.figure}", _remedy(refusal, stage))
    for attempt in range(2, 2 + int(profile.options.get("retries") or 0)):
        later = _refusal(stage_machine(profile, stage, attempt), known)
        if later is not None:
            return doubt(what, f"attempt {attempt}, {later.what}: {later.figure}", _remedy(later, stage))
    try:
        site.estimate(machine)
    except CommandError as error:
        return doubt(what, f"not tried by sbatch: {error}")
    except Refused as error:
        return no(what, f"sbatch refuses the job: {error}", f"change default-resources or set-resources: {stage}")
    return ok(what, f"fits {_request(machine)}")


def _refusal(machine: Machine, known: dict[str, Partition]) -> Check | None:
    return next((check for check in check_partitions(machine, known) if check.verdict == "no"), None)


def _remedy(check: Check, stage: str) -> str:
    remedy = check.remedy
    for of_train, of_stage in _OTHER_KEYS.items():
        remedy = remedy.replace(of_train, of_stage.format(stage=stage))
    return remedy


def _request(machine: Machine) -> str:
    gpus = machine.gpus_per_node or machine.gres
    parts = [
        machine.slurm_partition or "the default partition",
        f"{machine.runtime} min",
        f"{machine.mem_mb} MB" if machine.mem_mb else "default memory",
        f"{machine.cpus_per_task} {'CPU' if machine.cpus_per_task == 1 else 'CPUs'}",
        *([f"GPUs {gpus}"] if gpus else []),
    ]
    return ", ".join(parts)


def stage_machine(profile: Profile, stage: str, attempt: int = 1) -> Machine:
    """The request of a stage's job, as the executor plugin makes it. Raises ConfigError naming a value that is wrong.

    What depends on the input files is unknown here, and left out.
    """
    declared = DECLARED[stage]
    given = parse_set_threads(entries_of(profile.options, "set-threads", profile.path)).get(stage)
    threads = declared.get("threads", 1) if given is None else given.value
    own = [entry.partition(":")[2] for entry in entries_of(profile.options, "set-resources", profile.path, stage)]
    resources = _evaluated(entries_of(profile.options, "default-resources", profile.path), attempt, threads)
    resources |= {key: value for key, value in declared.items() if key != "threads"}
    resources |= _evaluated(own, attempt, threads)
    options = {key: value for key, value in resources.items() if key in _KEYS and value is not None}
    if number := resources.get("gpu"):
        options["gpus_per_node"] = ":".join(filter(None, (str(resources.get("gpu_model") or ""), str(number))))
    if qos := profile.options.get("slurm-qos"):
        options["qos"] = qos
    options |= {"launcher": "slurm", "save_within_s": 1, "nodes": resources.get("nodes") or 1}
    options["cpus_per_task"] = max(1, int(resources.get("cpus_per_task") or threads or 1))
    options["reservation"] = profile.options.get("slurm-reservation") or ""
    return check_machine(options, str(profile.path), rule=stage)


def _evaluated(assignments: list[str], attempt: int, threads: int) -> dict[str, Any]:
    """Resources as Snakemake evaluates them; None for what it can tell only with the input."""
    values: dict[str, Any] = {}
    for assignment in assignments:
        try:
            for name, resource in parse_set_resources([f"stage:{assignment}"])["stage"].items():
                values[name] = None
                known = {"wildcards": {}, "input": NoInput(), "attempt": attempt, "threads": threads, "rulename": ""}
                values[name] = resource.evaluate(**known, async_run=None).value
        except Exception:  # whatever the expression raises
            continue
    return values
