"""Checks of a job's request against SLURM.

`sbatch --test-only` decides, and queues nothing. The other checks are for requests that it accepts
and SLURM then never starts: a partition that is not up, a time above its limit, more nodes than
are up, and GPUs that no node has.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator

from cellmill.config.machine import MEMORY, Machine
from cellmill.errors import UserError
from cellmill.launch.submit import NEEDED
from cellmill.preflight import site
from cellmill.preflight.check import TRAIN, Check, doubt, judge, no, ok
from cellmill.preflight.site import Node, Partition, Refused, SlurmFacts
from cellmill.runs.slurm import CommandError


def check_launcher(machine: Machine) -> Check:
    """Check that the launcher finds what it needs on this machine."""
    if machine.launcher == "local":
        cores = len(os.sched_getaffinity(0))
        processes = machine.node_counts[-1] * machine.nproc_per_node
        return ok("launcher", f"local: {processes} processes on this machine's {cores} cores")
    if machine.launcher == "slurm":
        return _check_commands()
    return _check_allocation(machine)


def _check_commands() -> Check:
    """Check that SLURM's commands are on PATH."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if not missing:
        return ok("commands", ", ".join(NEEDED))
    verb = "is" if len(missing) == 1 else "are"
    remedy = f"run this on a login node of the cluster, or {TRAIN} launcher: local or allocation"
    return no("commands", f"{', '.join(missing)} {verb} not on PATH", remedy)


def _check_allocation(machine: Machine) -> Check:
    """Check that this process is in a SLURM job with enough nodes."""
    job_id = os.environ.get("SLURM_JOB_ID")
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES") or 1)
    if job_id is None:
        remedy = f"use salloc or sbatch, or {TRAIN} launcher: slurm"
        return no("launcher", "allocation: not inside a SLURM job", remedy)
    if shutil.which("srun") is None:
        return no("launcher", "allocation: srun is not on PATH", f"{TRAIN} launcher: local")
    text = f"allocation: job {job_id} has {nodes} nodes, requested: {machine.nodes}"
    remedy = f"{TRAIN} nodes: {nodes}, or a larger job"
    return judge(nodes >= machine.node_counts[0], "launcher", text, remedy)


def check_slurm(
    ask: Callable[[], SlurmFacts], check: Callable[[SlurmFacts], Iterator[Check]]
) -> Iterator[Check]:
    """Yield the checks of SLURM's answers, or a single doubt if SLURM gives none."""
    try:
        facts = ask()
    except UserError as error:
        yield doubt("SLURM", f"unknown: {error}")
        return
    yield from check(facts)


def check_training(machine: Machine, facts: SlurmFacts) -> Iterator[Check]:
    """Check the accounting and the request of a training's job."""
    if facts.no_accounting:
        yield doubt(
            "accounting",
            f"none ({facts.no_accounting}): the cost of a run is computed from its own files",
        )
    else:
        yield ok("accounting", "sacct answers")
    yield from check_request(machine, facts)


def check_request(machine: Machine, facts: SlurmFacts) -> Iterator[Check]:
    """Check the first requested partition that fits, then ask sbatch.

    If none fits, check only the first partition.
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
    checks = {name: list(_check_partition(machine, partitions[name], facts)) for name in requested}
    for name in requested:
        verdicts = {check.verdict for check in checks[name]}
        if "no" not in verdicts:
            yield from checks[name]
            yield _check_start(machine, partitions[name], facts)
            return
    yield from checks[requested[0]]


def _check_partition(machine: Machine, partition: Partition, facts: SlurmFacts) -> Iterator[Check]:
    """Check that a partition is up and has the time, nodes and GPUs that the machine requests."""
    name = partition.name
    if partition.state != "up":
        yield no("partition", f"{name} is {partition.state}", f"{TRAIN} slurm_partition: another")
        return
    yield ok("partition", f"{name} is up")
    limit_min, source = facts.limit(partition, machine.slurm_account, machine.qos)
    allowed = "any time" if limit_min is None else f"{limit_min} min"
    fits = limit_min is None or machine.runtime <= limit_min
    text = f"{source} allows {allowed}, requested: {machine.runtime}"
    yield judge(fits, "time limit", text, f"{TRAIN} runtime: {limit_min}")
    n_up = len(partition.up)
    text = (
        f"{n_up} of the {len(partition.nodes)} nodes of {name} are up, requested: {machine.nodes}"
    )
    remedy = f"{TRAIN} nodes: {n_up or 1}, or another slurm_partition"
    has_nodes = n_up >= machine.node_counts[0]
    yield judge(has_nodes, "nodes", text, remedy)
    if has_nodes:
        yield from _check_gpus(machine, partition)


def _check_gpus(machine: Machine, partition: Partition) -> Iterator[Check]:
    """Check that enough nodes have the requested GPUs, or that none lie idle without a request."""
    name = partition.name
    up = partition.up
    kinds = sorted({describe_gpus(node.gpus) for node in up if node.gpus})
    have = f"nodes of {name} have {' and '.join(kinds)}" if kinds else f"{name} has none"
    if machine.gpus:
        n_enough = len(_list_nodes_with_gpus(machine, partition))
        requested = describe_gpus(machine.gpus_by_type)
        text = f"{have}, requested: {requested} on each of {machine.nodes}: {n_enough} have enough"
        key = "gpus_per_node" if machine.gpus_per_node else "gres"
        remedy = f"{TRAIN} {key}, or another slurm_partition"
        if not kinds:
            remedy += ", or no GPUs and device: cpu"
        yield judge(n_enough >= machine.node_counts[0], "GPUs", text, remedy)
    elif kinds:
        gpus_of_first_node = next(node.gpus for node in up if node.gpus)
        kind, number = min(gpus_of_first_node.items())
        gpus = f"{kind}:{number}" if kind else number
        remedy = f"{TRAIN} gpus_per_node: {gpus}, if the runs are to use them"
        yield doubt("GPUs", f"{have}, but none is requested", remedy)


def _list_nodes_with_gpus(machine: Machine, partition: Partition) -> list[Node]:
    """List the nodes that are up and have the GPUs that the machine requests."""
    nodes = partition.up
    for kind, number in machine.gpus_by_type.items():
        nodes = [node for node in nodes if node.count_gpus(kind) >= number]
    return nodes


def _check_start(machine: Machine, partition: Partition, facts: SlurmFacts) -> Check:
    """Ask sbatch whether it accepts the request, and when the job would start."""
    try:
        return ok("start", f"SLURM expects {site.estimate_start(machine)}")
    except CommandError as error:
        return doubt("start", f"no estimate: {error}")
    except Refused as error:
        text = f"sbatch refuses {describe_request(machine)}: {error}"
        return no("start", text, _find_remedy(str(error), machine, partition, facts))


def _find_remedy(refusal: str, machine: Machine, partition: Partition, facts: SlurmFacts) -> str:
    """Name the keys that sbatch's refusal is about, with values that SLURM accepts."""
    nodes = _list_nodes_with_gpus(machine, partition)
    features = sorted(frozenset().union(*(node.features for node in nodes)))
    for phrase, key, values in (
        ("invalid account", "slurm_account", sorted(facts.accounts)),
        ("invalid qos", "qos", sorted(facts.list_qos(machine.slurm_account))),
        ("feature", "constraint", features),
        ("reservation", "reservation", []),
    ):
        if phrase in refusal.lower():
            choices = f": one of {', '.join(values)}" if values else ""
            return f"{TRAIN} {key}{choices}"
    if re.search("--mem|mem[-_ ]?per", refusal, re.IGNORECASE):
        others = " or ".join(key for key in MEMORY if key != machine.memory_key)
        return f"{TRAIN} {others} instead of {machine.memory_key}"
    if not re.search("node configuration|memory|cpu", refusal, re.IGNORECASE):
        return f"change {TRAIN[:-1]}"
    # the largest request that as many nodes as requested can meet
    fewest = machine.node_counts[0]
    memory_mb = sorted(node.usable_mb for node in nodes)[-fewest] // machine.memory_units
    cpus = sorted(node.cpus for node in nodes)[-fewest]
    remedy = f"{TRAIN} {machine.memory_key}: {memory_mb} at most, cpus_per_task: {cpus} at most"
    if machine.constraint and features:
        remedy += f", constraint: of {', '.join(features)}"
    return remedy


def describe_gpus(gpus: dict[str, int]) -> str:
    """Describe the GPUs of a node by type, such as `4 x a100, 1 x h100`."""
    texts = [f"{number} x {kind}" if kind else str(number) for kind, number in sorted(gpus.items())]
    return ", ".join(texts)


def describe_request(machine: Machine) -> str:
    """Describe the request of a job."""
    gpus = machine.gpus_per_node or machine.gres
    parts = [
        machine.slurm_partition or "the default partition",
        f"{machine.nodes} nodes" if machine.nodes != "1" else "",
        f"{machine.runtime} min",
        machine.memory_text,
        f"{machine.cpus} {'CPU' if machine.cpus == 1 else 'CPUs'}",
        f"GPUs {gpus}" if gpus else "",
        machine.constraint,
    ]
    return ", ".join(filter(None, parts))
