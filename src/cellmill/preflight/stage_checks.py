"""Checks of the stages that Snakemake submits to SLURM: what the profile requests for each must exist.

SLURM accepts a job over a partition's time limit and lets it wait for ever, so nobody else says it. Queues nothing.
"""

from collections.abc import Container, Iterator
from typing import Any

from snakemake.cli import parse_set_resources, parse_set_threads

from cellmill.config.machine import Machine
from cellmill.errors import ConfigError
from cellmill.preflight import slurm_site
from cellmill.preflight.check import TRAIN, Check, doubt, no, ok
from cellmill.preflight.profile import Profile, check_machine, entries_of
from cellmill.preflight.site_checks import check_partitions
from cellmill.preflight.slurm_site import Partition, Refused
from cellmill.runs.slurm_command import CommandError

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
        known = slurm_site.partitions()
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
        slurm_site.estimate(machine)
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
