"""Resources of the rules train and plan, and the flags of their commands for each run.

The Snakefile reads this module, so it imports no torch, pandas or h5py.
"""

import shlex
from itertools import chain
from typing import Any

from cellmill.config.checks import check_nodes
from cellmill.config.load import check_options
from cellmill.config.machine import PLANNED, Machine
from cellmill.config.workflow import RunConfig
from cellmill.errors import ConfigError
from cellmill.preflight.profile import DEFAULTS, Profile, Values


def check_python(executable: str) -> None:
    """Raise ConfigError if jobs of Snakemake's SLURM plugin, which quotes no path, cannot start it."""
    if shlex.quote(executable) != executable:
        raise ConfigError(
            f"{executable}: a job of a stage cannot start a Python whose path has spaces or quotes; install into "
            "another path: make install VENV=PATH"
        )


def train_resources(command: Profile) -> Values:
    """List the resources of rule train: every option of `Machine`."""
    return DEFAULTS | {name: value for name, value in command.train.items() if name in DEFAULTS}


def plan_resources(command: Profile) -> Values:
    """List the resources of rule plan, which takes nodes and processes from train."""
    values = train_resources(command) | command.plan | {"device": command.device()}
    return {name: values[name] for name in ("nodes", "nproc_per_node", "device")}


def train_arguments(
    command: Profile, name: str, run: RunConfig, resources: Any, elsewhere: bool
) -> list[str]:
    """List the flags of `cellmill train` for run `name`: its machine's keys over the rule's `resources`.

    Raise ConfigError unless the run fits on these processes, or if it would train on this machine
    although an executor runs stages `elsewhere`.
    """
    if resources.launcher == "local" and elsewhere:
        raise ConfigError(
            "launcher local would train on this machine, although stages are jobs elsewhere (executor); set "
            "set-resources: train: launcher: slurm in the profile, or leave the executor out"
        )
    values = {key: getattr(resources, key) for key in DEFAULTS}
    values |= command.resources(run.machine, "train")
    machine = _check_fit(command, name, run, values)
    return [
        f"--{key.replace('_', '-')}={value}" for key, value in machine if value != DEFAULTS[key]
    ]


def plan_arguments(command: Profile, name: str, run: RunConfig, resources: Any) -> list[str]:
    """List the flags of `cellmill plan` for run `name`, as `train_arguments`."""
    train = command.resources(run.machine, "train")
    plan = command.resources(run.machine, "plan")
    device = str(plan.get("device", resources.device))  # not the training's `device`
    # memory and what it is counted by are the training's: rule plan has a mem_mb of its own
    training = train_resources(command) | train
    values = {key: training[key] for key in PLANNED}
    for key in ("nodes", "nproc_per_node"):
        inherited = train if key not in command.plan else {}
        values[key] = plan.get(key, inherited.get(key, getattr(resources, key)))
    # plan has no launcher, and takes a range of nodes
    machine = _check_fit(command, name, run, values | {"launcher": "slurm"})
    keys = ["nodes", "nproc_per_node", "mem_mb"]
    if machine.memory_key != "mem_mb":  # memory per CPU core or GPU: their numbers count too
        changed = [key for key in PLANNED if getattr(machine, key) != DEFAULTS[key]]
        keys += [key for key in changed if key not in keys]
    flags = {f"--{key.replace('_', '-')}": str(getattr(machine, key)) for key in keys}
    return [*chain.from_iterable(flags.items()), "--device", device]


def _check_fit(command: Profile, name: str, run: RunConfig, values: Values) -> Machine:
    """Make the machine with resources `values`. Raise ConfigError if the run does not fit on it."""
    try:
        if run.machine and command.trains:
            command.machine(run.machine)
        options = {key: value for key, value in values.items() if key in DEFAULTS}
        machine: Machine = check_options(Machine, options, "the profile's set-resources")
        check_nodes(run, machine.node_counts, machine.nproc_per_node)
    except ConfigError as error:
        raise ConfigError(f"run {name}: {error}") from None
    return machine
