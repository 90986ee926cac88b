"""Machines of a snakemake command, from its profiles and options as Snakemake reads them.

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
from argparse import Namespace
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from configargparse import ConfigFileParserException
from snakemake.api import resolve_snakefile
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

from cellmill.config.load import check_options
from cellmill.config.machine import MEMORY, Machine
from cellmill.errors import ConfigError, did_you_mean
from cellmill.files import require_file

Values = dict[str, Any]
"""Resources, or options of Snakemake, by name."""
Rules = dict[str, Values]
"""Resources by the entry of set-resources: `train`, `plan`, and `train.NAME` and `plan.NAME` of
named machines.
"""
DEFAULTS = {name: field.default for name, field in Machine.model_fields.items()}
"""Defaults of the options of `Machine`, which are the resources of rule train."""
# resources of every rule, on which no training depends
_SNAKEMAKE_KEYS = frozenset({"tmpdir", "disk_mb"})
_SITE_KEYS = (
    "slurm_cluster",
    "slurm_partition",
    "slurm_account",
    "qos",
    "constraint",
    "reservation",
)
_ALTERNATIVES = (("gres", "gpus_per_node"), MEMORY)
"""Groups of keys; a machine has at most one key of each."""


@dataclass(frozen=True)
class Profile:
    """Resources that a profile, or a command with its profiles, gives the rules train and plan."""

    name: str = "profile"
    path: Path = Path("the profile")  # its file
    rules: Rules = field(default_factory=dict)
    # the file of profiles/default, which Snakemake always loads; its keys win
    overriding: Path | None = None
    # all options of Snakemake in the profile; mappings are lists of assignments
    options: Values = field(default_factory=dict)
    # False for a command that starts no training, such as --report, and needs no profile
    trains: bool = True
    # entries for rules other than train and plan, if those of the command replace them
    discarded: dict[str, Resources] = field(default_factory=dict)

    @property
    def train(self) -> Values:
        return self.rules.get("train", {})

    @property
    def plan(self) -> Values:
        return self.rules.get("plan", {})

    def resources(self, machine: str | None, rule: str) -> Values:
        """Return the keys of a rule that a named machine changes; none for None or an unknown machine."""
        return self.rules.get(name_entry(rule, machine), {}) if machine else {}

    def machine(self, name: str = "") -> Machine:
        """Make the machine of a training, or the one called `name`.

        Raise ConfigError naming the key that is wrong.
        """
        entry = name_entry("train", name)
        names = dict.fromkeys(rule.partition(".")[2] for rule in self.rules if "." in rule)
        if name and name not in names:
            hint = f"it has none; set-resources: {entry} adds it"
            if names:
                hint = did_you_mean(name, names)
            raise ConfigError(f"no machine {name!r} in {self.path}; {hint}")
        return check_machine(self.train | self.resources(name, "train"), str(self.path), entry)

    def device(self, name: str = "") -> str:
        """Return the device of the plan, or of the plan for the machine called `name`."""
        return str((self.plan | self.resources(name, "plan")).get("device", "cpu"))

    @property
    def unread(self) -> list[str]:
        """Keys of `default-resources` that a training needs but does not get."""
        entries = list_entries(self.options, "default-resources", self.path)
        defaults = {entry.partition("=")[0] for entry in entries}
        return [name for name in _SITE_KEYS if name in defaults - self.train.keys()]


def check_machine(resources: Values, source: str, rule: str) -> Machine:
    """Make the machine that resources of a rule describe.

    Raise ConfigError naming the key in `source` that is wrong.
    """
    options = {key: value for key, value in resources.items() if key not in _SNAKEMAKE_KEYS}
    machine: Machine = check_options(Machine, options, f"{source}: set-resources: {rule}")
    return machine


def name_entry(rule: str, name: str) -> str:
    """Name the entry of a rule in `set-resources`, for the machine `name` if it is not empty."""
    return f"{rule}.{name}" if name else rule


def find_profile(name: str) -> Path:
    """Find the file of a profile in ./profiles, or where Snakemake looks.

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
    """Find the file that `snakemake --profile NAME` reads from here; None if it finds none."""
    profile = get_profile_dir(name)  # folder and file
    return None if profile is None else profile[1]


def find_workflow_profile(name: str, beside: Path = Path()) -> Path | None:
    """Find the file that `snakemake --workflow-profile NAME` reads.

    It is at that path, or in folder profiles here or `beside` the Snakefile.
    """
    for path in (Path(name), Path("profiles", name), beside / "profiles" / name):
        if path.exists():
            return find_as_snakemake(str(path))
    return None


def read_profile(name: str) -> Profile:
    """Read a profile by its name or path. Raise ConfigError naming the file and what is wrong."""
    path = find_profile(name)
    options = _parse(path)
    overriding = find_workflow_profile("default")
    if overriding is not None and overriding.resolve() == path.resolve():
        overriding = None
    if overriding is not None:
        options |= _parse(overriding)
    rules = _read_rules(options, path)
    list_entries(options, "default-resources", path)  # raises if it is not a mapping
    is_in_folder = re.fullmatch(r"(profile|config)(\.v\d+\+)?\.yaml", path.name)
    stem = path.parent.name if is_in_folder else path.stem
    plain_name = re.sub(r"[^A-Za-z0-9_.-]", "", stem) or "profile"
    return Profile(plain_name, path, rules, overriding, options)


def _read_rules(options: Values, path: Path) -> Rules:
    """Evaluate the entries of set-resources for train, plan and named machines.

    Raise ConfigError naming the entry that is wrong.
    """
    set_threads = parse_set_threads(list_entries(options, "set-threads", path)).get("train")
    threads = 1 if set_threads is None else set_threads.value
    rules: Rules = defaultdict(dict)
    for entry in list_entries(options, "set-resources", path):
        rule, colon, assignment = entry.partition(":")
        if not colon:
            raise ConfigError(f"{path}: set-resources: expected rule:resource=value, got {entry!r}")
        if _is_for_training(rule):
            where = f"{path}: set-resources: {rule}"
            values = _evaluate_assignment(assignment, threads, where)
            repeated = rules[rule].keys() & values
            if repeated:
                raise ConfigError(f"{where}: {repeated.pop()} is given twice, in two units")
            rules[rule] |= values
    return _drop_inherited(rules)


def _is_for_training(entry: str) -> bool:
    """Return whether an entry of set-resources is for train, plan or a named machine."""
    return entry.partition(".")[0] in ("train", "plan")


def _drop_inherited(rules: Rules) -> Rules:
    """Clear the inherited alternatives to a key that a named machine sets, such as gres to gpus_per_node."""
    for entry, resources in rules.items():
        for keys in _ALTERNATIVES:
            if "." in entry and resources.keys() & set(keys):
                for key in keys:
                    resources.setdefault(key, DEFAULTS[key])
    return rules


def _parse(path: Path) -> Values:
    """Read the options of Snakemake in a profile; mappings become lists of assignments."""
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
    """List the assignments of an option that is a mapping, optionally those for `rule`.

    Raise ConfigError if the option is not a mapping.
    """
    entries = options.get(key) or []
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: {key}: expected a mapping, got {entries!r}")
    prefix = f"{rule}:" if rule else ""
    return [str(entry) for entry in entries if str(entry).startswith(prefix)]


def parse_assignment(assignment: str) -> Values:
    """Parse `name=value` into a resource of Snakemake, by its name without a unit."""
    return dict(parse_set_resources([f"rule:{assignment}"])["rule"])


def evaluate(resources: Mapping[str, Any], **variables: Any) -> Values:
    """Evaluate resources as Snakemake does for a rule. Raise whatever an expression raises.

    `variables` may set threads, attempt and input, which are 1, 1 and empty by default.
    """
    scope = {
        "wildcards": {},
        "input": [],
        "attempt": 1,
        "threads": 1,
        "rulename": "",
        "async_run": None,
    } | variables
    return {name: resource.evaluate(**scope).value for name, resource in resources.items()}


def _evaluate_assignment(assignment: str, threads: int, where: str) -> Values:
    """Evaluate an assignment. Raise ConfigError with advice if Snakemake misreads its text."""
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
    """Read the machines of a command line (without `snakemake`), in the folder in which it was typed.

    Of several profiles, the last one that sets resources counts, as in Snakemake. Keys that the
    command sets for train hold for every machine. Raise ConfigError naming the file and the fault.
    """
    options, _ = get_argument_parser().parse_known_args(list(arguments))
    profile = _read_last(options)
    given = options.set_resources or {}
    command_rules = _drop_inherited(
        {entry: evaluate(given[entry]) for entry in filter(_is_for_training, given)}
    )
    train = {key: value for key, value in profile.train.items() if key in DEFAULTS}
    profile_rules = profile.rules | {"train": train}
    rules = {}
    for entry in profile_rules | command_rules:
        resources = profile_rules.get(entry, {}) | command_rules.get(entry, {})
        rule, dot, _ = entry.partition(".")
        if dot:  # a named machine takes from its rule what the command sets there
            inherited = command_rules.get(rule, {})
            resources = {key: value for key, value in resources.items() if key not in inherited}
        rules[entry] = resources
    entries = list_entries(profile.options, "set-resources", profile.path) if given else []
    discarded = [entry for entry in entries if not _is_for_training(entry.partition(":")[0])]
    return replace(
        profile,
        rules=rules,
        trains=options.report is None,
        discarded=parse_set_resources(discarded),
    )


def _read_last(options: Namespace) -> Profile:
    """Read the last of a command's profiles that sets resources; an empty profile if none does."""
    paths = [find_as_snakemake(name) for name in options.profile or [] if name != "none"]
    if None in paths:  # Snakemake has read it
        raise ConfigError(
            f"--profile {' '.join(options.profile)}: not found from {Path.cwd()}; give its whole path"
        )
    if options.workflow_profile != "none":
        snakefile = Path(str(resolve_snakefile(options.snakefile, allow_missing=True)))
        paths.append(find_workflow_profile(options.workflow_profile or "default", snakefile.parent))
    last = Profile()
    for path in filter(None, paths):
        profile = read_profile(str(path))
        last = profile if profile.rules else last
    return last
