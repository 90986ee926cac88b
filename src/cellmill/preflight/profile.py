"""Machines that a snakemake command describes, by its profiles and its own options, read with Snakemake's functions.

Snakemake lays a profile's `default-resources` under what a rule declares and `set-resources` over it. The rule train
declares every option of `Machine`, so only `set-resources: train:` changes them. Snakemake evaluates a text as Python
first and takes it for a text only if that fails: `1-2` becomes -1, and `"'1-2'"` stays as written.

`set-resources: train.NAME:` and `plan.NAME:` are the machine NAME of runs that name it: its keys over those of `train`
and `plan`. Snakemake ignores them, as rules cannot have such names.

Options of a command replace a profile's whole entry: `--set-resources train:nodes=2` discards all of the profile's
`set-resources`. The profile's values for the rules train and plan become their defaults instead.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configargparse import ConfigFileParserException
from snakemake.cli import get_argument_parser, get_profile_dir, parse_set_resources, parse_set_threads
from snakemake.common import get_appdirs
from snakemake.exceptions import WorkflowError
from snakemake.profiles import ProfileConfigFileParser

from cellmill.config.load import check_options
from cellmill.config.machine import Machine
from cellmill.errors import ConfigError, did_you_mean
from cellmill.files import require_file

Rules = dict[str, dict[str, Any]]
"""Resources of the rules train and plan."""
_OF_SNAKEMAKE = frozenset({"tmpdir", "disk_mb"})  # every rule has them; no training depends on them
_OF_A_SITE = ("slurm_partition", "slurm_account", "qos", "constraint", "reservation")
_EITHER = {"gres": "gpus_per_node", "gpus_per_node": "gres"}  # a machine that sets one does not inherit the other


@dataclass(frozen=True)
class Profile:
    """Resources that a profile gives the rules train and plan."""

    name: str
    path: Path
    """Its file."""
    train: dict[str, Any]
    plan: dict[str, Any]
    unread: list[str]
    """Keys of `default-resources` that a training needs too, but that do not reach it."""
    over: Path | None = None
    """The file of profiles/default, which Snakemake loads unasked and which wins key by key."""
    named: dict[str, Rules] = field(default_factory=dict)
    """Keys of each named machine that differ from those of train and plan."""
    options: dict[str, Any] = field(default_factory=dict)
    """Every option of Snakemake in it; mappings are lists of assignments."""

    def machine(self, name: str = "") -> Machine:
        """The machine of a training, or the one called `name`. Raises ConfigError naming the key that is wrong."""
        return check_machine(self.train | self._named(name)["train"], str(self.path), name)

    def device(self, name: str = "") -> str:
        """The plan's device."""
        return str((self.plan | self._named(name)["plan"]).get("device", "cpu"))

    def _named(self, name: str) -> Rules:
        if name and name not in self.named:
            raise ConfigError(unknown_machine(name, self.named, str(self.path)))
        return self.named.get(name, {"train": {}, "plan": {}})


def check_machine(resources: dict[str, Any], source: str, name: str = "", rule: str = "train") -> Machine:
    """The machine that resources of a rule describe. Raises ConfigError naming the key in `source` that is wrong."""
    options = {key: value for key, value in resources.items() if key not in _OF_SNAKEMAKE}
    machine: Machine = check_options(Machine, options, f"{source}: set-resources: {of_machine(rule, name)}")
    return machine


def of_machine(rule: str, name: str) -> str:
    """The entry of a rule in `set-resources` for the machine `name`; without one, the rule's own."""
    return f"{rule}.{name}" if name else rule


def unknown_machine(name: str, known: Iterable[str], source: str) -> str:
    """Error of a machine that `source` does not have."""
    known = list(known)
    hint = did_you_mean(name, known) if known else f"it has none; set-resources: {of_machine('train', name)} adds it"
    return f"no machine {name!r} in {source}; {hint}"


def find_profile(name: str) -> Path:
    """The file of a profile: in ./profiles, or where Snakemake looks. Raises ConfigError naming the places."""
    path = _file_at(Path("profiles") / name) if Path(name).name == name else None
    path = path or snakemake_finds(name)
    if path is None:
        dirs = get_appdirs()
        places = [Path("profiles"), Path.cwd(), Path(dirs.user_config_dir), Path(dirs.site_config_dir)]
        listed = ", ".join(str(place / name) for place in places)
        raise ConfigError(f"no profile {name!r}: none of {listed} is a profile or has a config.yaml")
    return path


def snakemake_finds(name: str) -> Path | None:
    """The file that `snakemake --profile NAME` reads from here; None if it finds none."""
    profile = get_profile_dir(name)  # folder and file
    return None if profile is None else profile[1]


def workflow_profile(name: str) -> Path | None:
    """The file that `snakemake --workflow-profile NAME` reads: at that path, or in ./profiles; None without one."""
    places = (Path(name), Path("profiles") / name)
    return next((snakemake_finds(str(place)) for place in places if place.exists()), None)


def read_profile(name: str) -> Profile:
    """The profile `name`, or the one at that path. Raises ConfigError naming the file and what is wrong."""
    path = find_profile(name)
    options, over = _parse(path), None
    file = workflow_profile("default")
    if file is not None and file.resolve() != path.resolve():
        options, over = options | _parse(file), file
    threads = parse_set_threads(entries_of(options, "set-threads", path)).get("train")
    entries: Rules = defaultdict(dict)
    for entry in entries_of(options, "set-resources", path):
        rule, colon, assignment = entry.partition(":")
        if not colon:
            raise ConfigError(f"{path}: set-resources: expected rule:resource=value, got {entry!r}")
        if rule.partition(".")[0] in ("train", "plan"):
            evaluated = _evaluate(assignment, 1 if threads is None else threads.value, f"{path}: set-resources: {rule}")
            if twice := entries[rule].keys() & evaluated:
                raise ConfigError(f"{path}: set-resources: {rule}: {twice.pop()} is given twice, in two units")
            entries[rule] |= evaluated
    rules = {rule: entries.pop(rule, {}) for rule in ("train", "plan")}
    defaults = {entry.partition("=")[0] for entry in entries_of(options, "default-resources", path)}
    unread = [name for name in _OF_A_SITE if name in defaults and name not in rules["train"]]
    in_folder = re.fullmatch(r"(profile|config)(\.v\d+\+)?\.yaml", path.name)
    own = re.sub(r"[^A-Za-z0-9_.-]", "", path.parent.name if in_folder else path.stem)
    return Profile(
        own or "profile", path, **rules, unread=unread, over=over, named=named_machines(entries), options=options
    )


def named_machines(entries: Rules) -> dict[str, Rules]:
    """Keys of each named machine from the entries `train.NAME` and `plan.NAME` of `set-resources`."""
    named: dict[str, Rules] = defaultdict(lambda: {"train": {}, "plan": {}})
    for entry, resources in entries.items():
        rule, dot, name = entry.partition(".")
        if dot and rule in ("train", "plan"):
            unset = {other: "" for key, other in _EITHER.items() if key in resources and other not in resources}
            named[name][rule] |= resources | unset
    return dict(named)


def _file_at(place: Path) -> Path | None:
    return snakemake_finds(str(place)) if place.exists() else None


def _parse(path: Path) -> dict[str, Any]:
    """Snakemake's options in a profile; mappings become lists of assignments."""
    require_file(path)
    try:
        with open(path, encoding="utf-8") as file:
            return dict(ProfileConfigFileParser().parse(file))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None
    except (ConfigFileParserException, WorkflowError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None


def entries_of(options: dict[str, Any], key: str, path: Path, rule: str = "") -> list[str]:
    """Assignments of an option that is a mapping; with `rule` those of that rule. Raises ConfigError if it is none."""
    entries = options.get(key) or []
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: {key}: expected a mapping, got {entries!r}")
    return [str(entry) for entry in entries if not rule or str(entry).startswith(f"{rule}:")]


def _evaluate(assignment: str, threads: int, where: str) -> dict[str, Any]:
    """The resource of an assignment `name=value`, by its name without a unit, as Snakemake gives it to a rule."""
    key, _, text = assignment.partition("=")
    known = {"wildcards": {}, "input": [], "attempt": 1, "threads": threads, "rulename": "", "async_run": None}
    try:
        resources = parse_set_resources([f"rule:{assignment}"])["rule"]
        values = {name: resource.evaluate(**known).value for name, resource in resources.items()}
    except Exception:  # whatever the expression raises
        raise ConfigError(f"{where}: {key}: {_remedy(key, text)}") from None
    for value in values.values():
        if isinstance(value, int) and value < 0:
            raise ConfigError(
                f"{where}: {key}: Snakemake reads {text!r} as {value}; write \"'{text}'\", in both quotes"
            )
    return values


def _remedy(key: str, text: str) -> str:
    """Advice on a value that Snakemake cannot take."""
    if re.fullmatch(r"-\d+", text):
        return f"{text} is negative"
    if key == "runtime":
        return f"expected a time such as 90 (minutes) or 2h, got {text!r}"
    if key in ("mem", "disk"):
        return f"expected a size such as 16000 (MB) or 16G, got {text!r}"
    if key.endswith(("_mb", "_mib")):
        quoted = text.strip("'")
        return f"expected a number without quotes, got {quoted!r}; `mem: 16G` takes a unit"
    return f"Snakemake reads {text!r} as Python; write \"'{text}'\", in both quotes, for a text"


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
