"""Machines that a snakemake command describes: those of its profiles, with what the command itself sets over them.

Options of a command replace a profile's whole entry: with `--set-resources train:nodes=2` nothing is left of the
profile's `set-resources`. What the profile gave the rules train and plan becomes their default instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from snakemake.cli import get_argument_parser

from cellmill.config.machine import Machine
from cellmill.errors import ConfigError
from cellmill.preflight.profile import (
    Profile,
    Rules,
    check_machine,
    named_machines,
    read_profile,
    snakemake_finds,
    unknown_machine,
    workflow_profile,
)


@dataclass(frozen=True)
class CommandMachines:
    """Resources of the rules train and plan, and those of machines that runs name."""

    train: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    named: dict[str, Rules] = field(default_factory=dict)
    """Keys of each named machine that differ."""
    source: str = "the profile"
    """The profile's file, for messages."""
    trains: bool = True
    """False for a command that starts no training, such as --report, and needs no profile."""

    def resources(self, machine: str | None, rule: str) -> dict[str, Any]:
        """Options of a rule that the machine of a run changes; none for a run that names none, or an unknown one."""
        return self.named.get(machine or "", {}).get(rule, {})

    def keys(self, rule: str) -> set[str]:
        """Every resource of a rule that a named machine changes."""
        return {key for rules in self.named.values() for key in rules[rule]}

    def check(self, machine: str | None) -> None:
        """Raises ConfigError for a machine that there is not, or that is none."""
        if machine is None or not self.trains:
            return
        if machine not in self.named:
            raise ConfigError(f"machine: {unknown_machine(machine, self.named, self.source)}")
        check_machine(self.train | self.named[machine]["train"], self.source, machine)


def machines_of_command(arguments: Sequence[str]) -> CommandMachines:
    """Machines of a command line (without `snakemake`).

    Of several profiles the last one that sets resources counts, as in Snakemake; what the command sets for train holds
    for every machine. Raises ConfigError naming the file and what is wrong.
    """
    options, _ = get_argument_parser().parse_known_args(list(arguments))
    profile = _last_profile([name for name in options.profile or [] if name != "none"], options.workflow_profile)
    typed = {rule: _evaluated(resources) for rule, resources in dict(options.set_resources or {}).items()}
    named = dict(profile.named) if profile else {}
    for name, rules in named_machines(typed).items():
        before = named.get(name, {"train": {}, "plan": {}})
        named[name] = {rule: before[rule] | rules[rule] for rule in before}
    fixed = {rule: typed.get(rule, {}).keys() for rule in ("train", "plan")}
    return CommandMachines(
        train={name: value for name, value in profile.train.items() if name in Machine.model_fields} if profile else {},
        plan=profile.plan if profile else {},
        named={
            name: {rule: {k: v for k, v in keys.items() if k not in fixed[rule]} for rule, keys in rules.items()}
            for name, rules in named.items()
        },
        source=str(profile.path) if profile else "the profile",
        trains=options.report is None,
    )


def _last_profile(names: list[str], of_workflow: str | None) -> Profile | None:
    """The last profile that sets resources of train or plan."""
    last = of_workflow or "default"
    paths = [*map(snakemake_finds, names), None if last == "none" else workflow_profile(last)]
    profiles = [read_profile(str(path)) for path in paths if path is not None]
    return next((profile for profile in reversed(profiles) if profile.train or profile.plan or profile.named), None)


def _evaluated(resources: Any) -> dict[str, Any]:
    """Resources of a rule on the command line, as Snakemake evaluates them for one thread."""
    known: dict[str, Any] = {"wildcards": {}, "input": [], "attempt": 1, "threads": 1, "rulename": ""}
    return {name: resource.evaluate(**known, async_run=None).value for name, resource in resources.items()}
