"""Checks of the requests of the workflow's stages, whose jobs Snakemake's SLURM plugin submits."""

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from typing import Any

from snakemake.cli import parse_set_threads

from cellmill.config.machine import Machine
from cellmill.errors import ConfigError
from cellmill.preflight.check import Check, doubt, no, ok
from cellmill.preflight.job_request import check_request, describe_request
from cellmill.preflight.profile import (
    Profile,
    check_machine,
    evaluate,
    list_entries,
    parse_assignment,
)
from cellmill.preflight.site import SlurmFacts

Growth = tuple[int, int | None]
"""A resource for the smallest input, and how many MB of input add 1 to it; None if it is constant."""

GPU_STAGES = (
    "embed",
    "embed_external",
    "predict",
    "map",
    "knock_out",
    "evaluate",
    "predict_changes",
)
_SHARDING: dict[str, Growth] = {"mem_mb": (16000, 12), "runtime": (240, 120)}
_INFERENCE: dict[str, Growth] = {"mem_mb": (32000, 3), "runtime": (240, 25)}
DECLARED: dict[str, dict[str, Growth]] = {
    "preprocess": {"mem_mb": (8000, 5), "runtime": (120, 200)},
    "vocabulary": {"mem_mb": (4000, 12), "runtime": (60, 300)},
    "divide": _SHARDING,
    "shard_part": _SHARDING,
    "shard": _SHARDING,
    "import": {"mem_mb": (8000, None), "runtime": (60, None)},
    "teach": {"mem_mb": (8000, 1), "runtime": (60, 300)},
    "consolidate": {"mem_mb": (8000, None), "runtime": (60, None)},
    "embed": _INFERENCE,
    "embed_external": _INFERENCE,
    "predict": _INFERENCE,
    "map": _INFERENCE,
    "knock_out": _INFERENCE,
    "evaluate": {"mem_mb": (32000, None), "runtime": (240, None)},
    "predict_changes": _INFERENCE,
    "atlas": {"mem_mb": (8000, 1), "runtime": (60, 10)},
    "unpack": {"mem_mb": (2000, 1), "runtime": (30, 10)},
    "zoo": _INFERENCE,
}
"""Resources that the rules of stages declare, by stage. They are multiplied by the attempt. Declared
values override default-resources; set-resources override declared values.
"""
DECLARED_THREADS = dict.fromkeys((*GPU_STAGES, "consolidate", "zoo"), 4)
"""CPU cores of rules that declare more than one."""
_MACHINE_KEYS = {
    "slurm_partition",
    "slurm_account",
    "qos",
    "constraint",
    "gres",
    "mem_mb",
    "mem_mb_per_cpu",
    "runtime",
}
"""Resources of a stage that are options of `Machine` of the same name."""


class NoInput(list[str]):
    """Unknown input files of a job: resources that grow with the input are those of the smallest."""

    size_mb = 0


def check_stages(profile: Profile, unused: Container[str], facts: SlurmFacts) -> Iterator[Check]:
    """Check that the job of each stage fits in every attempt; leave out the stages in `unused`."""
    attempts = range(1, 2 + int(profile.options.get("retries") or 0))
    for stage in DECLARED:
        if stage in unused:
            continue
        try:
            machines = [make_stage_machine(profile, stage, attempt) for attempt in attempts]
        except ConfigError as error:
            yield no(f"stage {stage}", str(error))
            continue
        yield _check_stage(stage, machines, facts)


def _check_stage(stage: str, machines: Sequence[Machine], facts: SlurmFacts) -> Check:
    """Check that the job of a stage fits. `machines` are its requests, by attempt."""
    what = f"stage {stage}"
    # a request grows with the attempt: if the last attempt fits, all do
    attempt = len(machines)
    problem = _find_problem(machines[-1], facts)
    if problem is None:
        return ok(what, f"fits {describe_request(machines[0])}")
    for number, machine in enumerate(machines[:-1], start=1):
        earlier_problem = _find_problem(machine, facts)
        if earlier_problem is not None:
            attempt = number
            problem = earlier_problem
            break
    remedy = problem.remedy.replace("set-resources: train", f"set-resources: {stage}")
    # the plugin's keys
    remedy = remedy.replace("gpus_per_node", "gpu").replace(" or mem_mb_per_gpu", "")
    if attempt == 1:
        return replace(problem, what=f"{what}, {problem.what}", remedy=remedy)
    return doubt(f"{what}, attempt {attempt}, {problem.what}", problem.found, remedy)


def _find_problem(machine: Machine, facts: SlurmFacts) -> Check | None:
    """Find the first reason why a stage's job may never start; None if there is none."""
    for check in check_request(machine, facts):
        if check.verdict == "no" or (check.what == "start" and check.verdict == "?"):
            return check
    return None


def make_stage_machine(profile: Profile, stage: str, attempt: int) -> Machine:
    """Make the request of a stage's job, as the executor plugin does.

    Resources that grow with the input are those of the smallest; an expression that cannot be
    evaluated is left out. Raise ConfigError naming a value that is wrong.
    """
    options = profile.options
    path = profile.path
    set_threads = parse_set_threads(list_entries(options, "set-threads", path)).get(stage)
    threads = DECLARED_THREADS.get(stage, 1) if set_threads is None else set_threads.value
    scope = {"attempt": attempt, "threads": threads}
    resources = _evaluate_assignments(list_entries(options, "default-resources", path), scope)
    resources |= {key: smallest * attempt for key, (smallest, _) in DECLARED[stage].items()}
    entries = list_entries(options, "set-resources", path, stage)
    assignments = [entry.removeprefix(f"{stage}:") for entry in entries]
    resources |= _evaluate_assignments(assignments, scope)
    machine = {
        key: value for key, value in resources.items() if key in _MACHINE_KEYS and value is not None
    }
    if machine.get("mem_mb_per_cpu"):
        machine.pop("mem_mb", None)  # the plugin requests only one
    gpus = resources.get("gpu")
    if gpus:
        model = resources.get("gpu_model")
        if isinstance(model, int | float):
            raise ConfigError(
                f"{path}: set-resources: {stage}: gpu_model: expected a text, got the number {model}, for which "
                f"Snakemake's plugin submits no job; write gpu_model: \"'{model}'\""
            )
        machine["gpus_per_node"] = f"{model}:{gpus}" if model else str(gpus)
    if options.get("slurm-qos"):
        machine["qos"] = options["slurm-qos"]
    machine |= {
        "launcher": "slurm",
        "save_within_s": 1,
        "nodes": resources.get("nodes") or 1,
        "cpus_per_task": max(1, int(resources.get("cpus_per_task") or threads or 1)),
        "reservation": options.get("slurm-reservation") or "",
    }
    return check_machine(machine, str(path), stage)


def _evaluate_assignments(assignments: list[str], scope: dict[str, int]) -> dict[str, Any]:
    """Evaluate resources as Snakemake does, for the smallest input; None for each that fails."""
    values: dict[str, Any] = {}
    for assignment in assignments:
        try:
            values |= evaluate(parse_assignment(assignment), input=NoInput(), **scope)
        except Exception:  # whatever the expression raises
            values[assignment.partition("=")[0]] = None
    return values
