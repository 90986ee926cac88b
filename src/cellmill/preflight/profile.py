"""Machines that a snakemake command describes by its profiles and options, read by Snakemake.

What a rule declares overrides a profile's `default-resources`, and its `set-resources` override the
rule. The rule train declares every option of `Machine`, so only `set-resources: train:` changes
them. Snakemake evaluates a text as Python first: `1-2` becomes -1, and `"'1-2'"` stays as written.

`set-resources: train.NAME:` and `plan.NAME:` are the machine NAME of runs that name it: its keys
override those of `train` and `plan`. Snakemake ignores them, as rules cannot have such names.

Options of a command replace a profile's whole entry: `--set-resources train:nodes=2` discards all
of the profile's `set-resources`. Its values for the rules train and plan become their defaults;
`discarded` has the others.
"""

import re
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from configargparse import ConfigFileParserException
from snakemake.cli import (
    get_argument_parser,
    get_profile_dir,
    parse_set_resources,
    parse_set_threads,
)
from snakemake.common import get_appdirs
from snakemake.exceptions import WorkflowError
from snakemake.profiles import ProfileConfigFileParser
from snakemake.resources import Resources

from cellmill.config.checks import check_nodes
from cellmill.config.load import check_options
from cellmill.config.machine import Machine
from cellmill.config.workflow import RunConfig
from cellmill.errors import ConfigError, did_you_mean
from cellmill.files import require_file

Values = dict[str, Any]
"""Resources, or options of Snakemake, by name."""
Rules = dict[str, Values]
"""Resources by the entry of set-resources: `train`, `plan`, and `train.NAME` and `plan.NAME` of
named machines.
"""
_SNAKEMAKE_KEYS = frozenset(
    {"tmpdir", "disk_mb"}
)  # every rule has them; no training depends on them
_SITE_KEYS = (
    "slurm_cluster",
    "slurm_partition",
    "slurm_account",
    "qos",
    "constraint",
    "reservation",
)
_DEFAULTS = {name: field.default for name, field in Machine.model_fields.items()}
_EITHER = {"gres": "gpus_per_node", "gpus_per_node": "gres"}


@dataclass(frozen=True)
class Profile:
    """Resources that a profile, or a command with its profiles, gives the rules train and plan."""

    name: str = "profile"
    path: Path = Path("the profile")  # its file
    rules: Rules = field(default_factory=dict)
    # the file of profiles/default, which Snakemake always loads: its keys win
    over: Path | None = None
    # all options of Snakemake in the profile; mappings are lists of assignments
    options: Values = field(default_factory=dict)
    # False for a command that starts no training, such as --report, and needs no profile
    trains: bool = True
    discarded: dict[str, Resources] = field(default_factory=dict)
    """The profile's entries for rules other than train and plan, if the command's own replace them.
    """

    @property
    def train(self) -> Values:
        return self.rules.get("train", {})

    @property
    def plan(self) -> Values:
        return self.rules.get("plan", {})

    def resources(self, machine: str | None, rule: str) -> Values:
        """Keys of a rule that the named machine changes; empty for None or an unknown machine."""
        return self.rules.get(name_entry(rule, machine), {}) if machine else {}

    def machine(self, name: str = "") -> Machine:
        """The machine of a training, or the one called `name`.

        Raise ConfigError naming the key that is wrong.
        """
        entry = name_entry("train", name)
        names = dict.fromkeys(entry.partition(".")[2] for entry in self.rules if "." in entry)
        if name and name not in names:
            hint = f"it has none; set-resources: {entry} adds it"
            if names:
                hint = did_you_mean(name, names)
            raise ConfigError(f"no machine {name!r} in {self.path}; {hint}")
        return check_machine(self.train | self.resources(name, "train"), str(self.path), entry)

    def device(self, name: str = "") -> str:
        """The plan's device, or that of the machine called `name`."""
        return str((self.plan | self.resources(name, "plan")).get("device", "cpu"))

    @property
    def unread(self) -> list[str]:
        """Keys of `default-resources` that a training needs too, but that do not reach it."""
        entries = list_entries(self.options, "default-resources", self.path)
        defaults = {entry.partition("=")[0] for entry in entries}
        return [name for name in _SITE_KEYS if name in defaults - self.train.keys()]


def check_machine(resources: Values, source: str, rule: str) -> Machine:
    """The machine that resources of a rule describe.

    Raise ConfigError naming the key in `source` that is wrong.
    """
    options = {key: value for key, value in resources.items() if key not in _SNAKEMAKE_KEYS}
    machine: Machine = check_options(Machine, options, f"{source}: set-resources: {rule}")
    return machine


def name_entry(rule: str, name: str) -> str:
    """Name of a rule's entry in `set-resources` for the machine `name`; without a name, the rule's."""
    return f"{rule}.{name}" if name else rule


def find_profile(name: str) -> Path:
    """The file of a profile: in ./profiles, or where Snakemake looks.

    Raise ConfigError naming the folders.
    """
    local = Path("profiles") / name
    path = None
    if Path(name).name == name and local.exists():
        path = find_as_snakemake(str(local))
    path = path or find_as_snakemake(name)
    if path:
        return path
    dirs = get_appdirs()
    folders = [Path("profiles"), Path.cwd(), Path(dirs.user_config_dir), Path(dirs.site_config_dir)]
    listed = ", ".join(str(folder / name) for folder in folders)
    raise ConfigError(f"no profile {name!r}: none of {listed} is a profile or has a config.yaml")


def find_as_snakemake(name: str) -> Path | None:
    """The file that `snakemake --profile NAME` reads from here; None if it finds none."""
    profile = get_profile_dir(name)  # folder and file
    return None if profile is None else profile[1]


def find_workflow_profile(name: str) -> Path | None:
    """The file that `snakemake --workflow-profile NAME` reads: at that path, or in ./profiles."""
    for path in (Path(name), Path("profiles") / name):
        if path.exists():
            return find_as_snakemake(str(path))
    return None


def read_profile(name: str) -> Profile:
    """The profile `name`, or at that path. Raise ConfigError naming the file and what is wrong."""
    path = find_profile(name)
    options = _parse(path)
    over = find_workflow_profile("default")
    if over is not None and over.resolve() == path.resolve():
        over = None
    if over is not None:
        options |= _parse(over)
    threads = parse_set_threads(list_entries(options, "set-threads", path)).get("train")
    entries: Rules = defaultdict(dict)
    for entry in list_entries(options, "set-resources", path):
        rule, colon, assignment = entry.partition(":")
        if not colon:
            raise ConfigError(f"{path}: set-resources: expected rule:resource=value, got {entry!r}")
        if _is_ours(rule):
            where = f"{path}: set-resources: {rule}"
            values = _evaluate_entry(assignment, 1 if threads is None else threads.value, where)
            twice = entries[rule].keys() & values
            if twice:
                raise ConfigError(f"{where}: {twice.pop()} is given twice, in two units")
            entries[rule] |= values
    list_entries(options, "default-resources", path)  # a mapping too
    is_in_folder = re.fullmatch(r"(profile|config)(\.v\d+\+)?\.yaml", path.name)
    stem = path.parent.name if is_in_folder else path.stem
    plain_name = re.sub(r"[^A-Za-z0-9_.-]", "", stem) or "profile"
    return Profile(plain_name, path, _drop_inherited_gpus(entries), over, options)


def _is_ours(rule: str) -> bool:
    return rule.partition(".")[0] in ("train", "plan")


def _drop_inherited_gpus(rules: Rules) -> Rules:
    """The entries, where a named machine that sets gres inherits no gpus_per_node, and vice versa."""
    for entry, resources in rules.items():
        for key, other in _EITHER.items():
            if "." in entry and key in resources:
                resources.setdefault(other, "")
    return rules


def _parse(path: Path) -> Values:
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


def list_entries(options: Values, key: str, path: Path, rule: str = "") -> list[str]:
    """Assignments of an option that is a mapping, optionally for one `rule`.

    Raise ConfigError for another value.
    """
    entries = options.get(key) or []
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: {key}: expected a mapping, got {entries!r}")
    prefix = f"{rule}:" if rule else ""
    return [str(entry) for entry in entries if str(entry).startswith(prefix)]


def parse_assignment(assignment: str) -> Values:
    """Snakemake's resource of a text `name=value`, by its name without a unit."""
    return dict(parse_set_resources([f"rule:{assignment}"])["rule"])


def evaluate(resources: Mapping[str, Any], **known: Any) -> Values:
    """Resources as Snakemake gives them to a rule. Raise whatever an expression raises.

    `known` has threads, attempt and input if they are not 1, 1 and empty.
    """
    scope = {
        "wildcards": {},
        "input": [],
        "attempt": 1,
        "threads": 1,
        "rulename": "",
        "async_run": None,
    } | known
    return {name: resource.evaluate(**scope).value for name, resource in resources.items()}


def _evaluate_entry(assignment: str, threads: int, where: str) -> Values:
    """The resource of an assignment. Raise ConfigError with advice if Snakemake misreads its text."""
    key, _, text = assignment.partition("=")
    quotes = f"write \"'{text}'\", in both quotes"
    try:
        values = evaluate(parse_assignment(assignment), threads=threads)
    except Exception:  # whatever the expression raises
        if re.fullmatch(r"-\d+", text):
            advice = f"{text} is negative"
        elif key == "runtime":
            advice = f"expected a time such as 90 (minutes) or 2h, got {text!r}"
        elif key in ("mem", "disk"):
            advice = f"expected a size such as 16000 (MB) or 16G, got {text!r}"
        elif key.endswith(("_mb", "_mib")):
            number = text.strip("'")
            advice = f"expected a number without quotes, got {number!r}; `mem: 16G` takes a unit"
        else:
            advice = f"Snakemake reads {text!r} as Python; {quotes}, for a text"
        raise ConfigError(f"{where}: {key}: {advice}") from None
    for value in values.values():
        if isinstance(value, int) and value < 0:
            raise ConfigError(f"{where}: {key}: Snakemake reads {text!r} as {value}; {quotes}")
    return values


def read_command(arguments: Sequence[str]) -> Profile:
    """Machines of a command line (without `snakemake`).

    Of several profiles, the last one that sets resources counts, as in Snakemake. Keys that the
    command sets for train hold for every machine. Raise ConfigError naming the file and the fault.
    """
    options, _ = get_argument_parser().parse_known_args(list(arguments))
    last = options.workflow_profile or "default"
    paths = [find_as_snakemake(name) for name in options.profile or [] if name != "none"]
    paths.append(None if last == "none" else find_workflow_profile(last))
    profile = Profile()
    for path in paths:
        if path is not None:
            read = read_profile(str(path))
            profile = read if read.rules else profile
    typed: Rules = {}
    for entry, resources in (options.set_resources or {}).items():
        if _is_ours(entry):
            typed[entry] = evaluate(resources)
    typed = _drop_inherited_gpus(typed)
    train = {key: value for key, value in profile.train.items() if key in _DEFAULTS}
    given = profile.rules | {"train": train}
    rules = {}
    for entry in given | typed:
        rule, dot, _ = entry.partition(".")
        hidden = typed.get(rule, {}) if dot else {}
        resources = given.get(entry, {}) | typed.get(entry, {})
        rules[entry] = {key: value for key, value in resources.items() if key not in hidden}
    discarded = []
    if options.set_resources:
        entries = list_entries(profile.options, "set-resources", profile.path)
        discarded = [entry for entry in entries if not _is_ours(entry.partition(":")[0])]
    return replace(
        profile,
        rules=rules,
        trains=options.report is None,
        discarded=parse_set_resources(discarded),
    )


def check_python(executable: str) -> None:
    """Raise ConfigError if jobs of Snakemake's SLURM plugin, which quotes no path, cannot start it."""
    if shlex.quote(executable) != executable:
        raise ConfigError(
            f"{executable}: a job of a stage cannot start a Python whose path has spaces or quotes; install into "
            "another path: make install VENV=PATH"
        )


def train_resources(command: Profile) -> Values:
    """Resources of rule train: every option of `Machine`."""
    return _DEFAULTS | {name: value for name, value in command.train.items() if name in _DEFAULTS}


def plan_resources(command: Profile) -> Values:
    """Resources of rule plan, which takes nodes and processes from train."""
    values = train_resources(command) | command.plan | {"device": command.device()}
    return {name: values[name] for name in ("nodes", "nproc_per_node", "device")}


def train_arguments(
    command: Profile, name: str, run: RunConfig, resources: Any, elsewhere: bool
) -> list[str]:
    """Flags of `cellmill train` for a run: its machine's keys over the rule's resources.

    Raise ConfigError unless the run fits on these processes, or if it would train on this machine
    although an executor runs stages `elsewhere`.
    """
    if resources.launcher == "local" and elsewhere:
        raise ConfigError(
            "launcher local would train on this machine, although stages are jobs elsewhere (executor); set "
            "set-resources: train: launcher: slurm in the profile, or leave the executor out"
        )
    given = {key: getattr(resources, key) for key in _DEFAULTS}
    machine = _check_fit(command, name, run, given | command.resources(run.machine, "train"))
    return [
        f"--{key.replace('_', '-')}={value}" for key, value in machine if value != _DEFAULTS[key]
    ]


def plan_arguments(command: Profile, name: str, run: RunConfig, resources: Any) -> list[str]:
    """Flags of `cellmill plan` for a run, as `train_arguments`."""
    changed = {
        key: value
        for key, value in command.resources(run.machine, "train").items()
        if key not in command.plan
    }
    # the training's memory; rule plan has a mem_mb of its own
    mem_mb = str(changed.get("mem_mb", train_resources(command)["mem_mb"]))
    plan = command.resources(run.machine, "plan")
    device = str(plan.get("device", resources.device))  # not the training's `device`
    changed |= plan
    names = ("nodes", "nproc_per_node")
    sizes = {name: changed.get(name, getattr(resources, name)) for name in names}
    # plan has no launcher, and takes a range of nodes
    machine = _check_fit(command, name, run, sizes | {"launcher": "slurm"})
    flags = {
        "--nodes": machine.nodes,
        "--nproc-per-node": str(machine.nproc_per_node),
        "--mem-mb": mem_mb,
        "--device": device,
    }
    return [*chain.from_iterable(flags.items())]


def _check_fit(command: Profile, name: str, run: RunConfig, given: Values) -> Machine:
    """The machine with resources `given`. Raise ConfigError if the run cannot be laid out on it."""
    try:
        if run.machine and command.trains:
            command.machine(run.machine)
        known = {key: value for key, value in given.items() if key in _DEFAULTS}
        machine: Machine = check_options(Machine, known, "the profile's set-resources")
        check_nodes(run, machine.node_counts, machine.nproc_per_node)
    except ConfigError as error:
        raise ConfigError(f"run {name}: {error}") from None
    return machine
