"""A Snakemake profile as the machine it describes, read the way Snakemake reads it.

Snakemake lays a profile's `default-resources` under what a rule declares and `set-resources` over it. The rule train
declares every option of `Machine`, so `set-resources: train:` alone changes them. A text is Python to Snakemake first
and a text only where that fails: `1-2` arrives as -1, and `"'1-2'"` as written.
"""

from __future__ import annotations

import ast
import builtins
import math
import operator
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from cellmill.config.load import check_options
from cellmill.config.machine import Machine
from cellmill.errors import ConfigError

_FILE = re.compile(r"(profile|config)(?:\.v(\d+)\+)?\.yaml")
_OF_SNAKEMAKE = frozenset({"tmpdir", "disk_mb"})  # every rule has them; nothing of a training depends on them
_OF_A_SITE = ("slurm_partition", "slurm_account", "qos", "constraint", "reservation")
_SECONDS = {"": 1, "s": 1, "sec": 1, "second": 1, "m": 60, "min": 60, "minute": 60, "h": 3600, "hour": 3600}
_SECONDS |= {"d": 86_400, "day": 86_400, "w": 604_800, "week": 604_800}
_BYTES = {"": 1, "b": 1, "byte": 1} | {
    name: base**power
    for power, prefix in enumerate("kmgtp", 1)
    for name, base in ((prefix, 1000), (f"{prefix}b", 1000), (f"{prefix}ib", 1024))
}
# what an expression may name besides; anything else is no name to Snakemake, and its text stays a text
_NAMES = frozenset({"attempt", "threads", "wildcards", "input", "output", "params", "resources", "shutil"})
_NAMES |= {"system_tmpdir", "async_run", "lookup", "evaluate", "branch", "collect", "exists", "subpath", "flatten"}
_NAMES |= {"prepend_param", "parse_input", "extract_checksum", "choose_file", "choose_folder", "choose_tmp"}
_NAMES |= set(dir(builtins))
_ARITHMETIC: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


@dataclass(frozen=True)
class Profile:
    """What a profile's file says of train and plan, as Snakemake would hand it to the two rules."""

    name: str
    path: Path
    """Its file."""
    train: dict[str, Any]
    plan: dict[str, Any]
    default: dict[str, Any]
    """What `default-resources` says of partition and account; it lies under what both rules declare themselves."""
    over: Path | None = None
    """A file profiles/default/config.yaml, which Snakemake loads by itself and which wins key by key."""

    def machine(self) -> Machine:
        """The machine of a training. Raises ConfigError naming the key that is wrong."""
        given = {name: value for name, value in self.train.items() if name not in _OF_SNAKEMAKE}
        machine: Machine = check_options(Machine, given, f"{self.path}: set-resources: train")
        return machine

    def unread(self) -> list[str]:
        """Keys of `default-resources` that a training would want too, and that do not reach it."""
        return [name for name in _OF_A_SITE if name in self.default and name not in self.train]


def find_profile(name: str) -> Path:
    """The file of a profile: in ./profiles, or where Snakemake looks. Raises ConfigError with the places."""
    at_hand = None if Path(name).name != name else _file_of(Path("profiles") / name)
    found = at_hand or snakemake_finds(name)
    if found is None:
        places = ", ".join(str(place) for place in [Path("profiles") / name, *_places(name)])
        raise ConfigError(f"no profile is called {name!r}: none of {places} is one, or holds config.yaml")
    return found


def snakemake_finds(name: str) -> Path | None:
    """The file `snakemake --profile NAME` reads from here, if it finds one."""
    return next((file for place in _places(name) if (file := _file_of(place)) is not None), None)


def read_profile(name: str) -> Profile:
    """The profile called `name`, or at that path. Raises ConfigError naming the file and what is wrong with it."""
    path = find_profile(name)
    tree, over = _tree(path), None
    for place in (Path("default"), Path("profiles") / "default"):
        file = _file_of(place)
        if file is not None and file.resolve() != path.resolve():
            tree, over = tree | _tree(file), file
        if place.exists():
            break
    threads = dict(_pairs(tree, "set-threads", path)).get("train", 1)
    threads = threads if isinstance(threads, int) else 1
    rules: dict[str, dict[str, Any]] = {"train": {}, "plan": {}}
    for rule, key, value in _set_resources(tree, path):
        if rule in rules:
            _add(rules[rule], key, value, threads, f"{path}: set-resources: {rule}")
    default: dict[str, Any] = {}
    for key, value in _pairs(tree, "default-resources", path):
        if key in _OF_A_SITE:
            _add(default, key, value, threads, f"{path}: default-resources")
    own = path.parent.name if _FILE.fullmatch(path.name) else path.stem
    return Profile(re.sub(r"[^A-Za-z0-9_.-]", "", own) or "profile", path, **rules, default=default, over=over)


def _places(name: str) -> list[Path]:
    """Where Snakemake looks for a profile, in its order."""
    if os.path.exists(name):
        return [Path(name)]
    home = os.environ.get("XDG_CONFIG_HOME", "").strip() or "~/.config"
    site = os.environ.get("XDG_CONFIG_DIRS", "").split(os.pathsep)[0].strip() or "/etc/xdg"
    return [Path(name), *(Path(place).expanduser() / "snakemake" / name for place in (home, site))]


def _file_of(place: Path) -> Path | None:
    """The file of a profile that may be a file or a folder; of several the one for the newest Snakemake."""
    if place.is_file():
        return place
    if not place.is_dir():
        return None
    ours = int(version("snakemake").split(".")[0])
    found: dict[int, Path] = {}
    for file in sorted(place.iterdir(), reverse=True):  # profile.yaml before config.yaml
        if (match := _FILE.fullmatch(file.name)) and int(match[2] or 0) <= ours:
            found.setdefault(int(match[2] or 0), file)
    return found[max(found)] if found else None


def _tree(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a profile is a mapping of Snakemake's options, not {type(tree).__name__}")
    if tree.get("__use_yte__"):
        raise ConfigError(f"{path}: __use_yte__: templates are not read here; give a profile without them")
    return {str(key): value for key, value in tree.items()}


def _set_resources(tree: dict[str, Any], path: Path) -> list[tuple[str, str, Any]]:
    """`set-resources` as (rule, resource, value); a mapping, or a list of `rule:resource=value`."""
    given = tree.get("set-resources") or {}
    if isinstance(given, list):
        parts = [re.fullmatch(r"([^:=]+):([^=]+)=(.*)", str(entry), re.S) for entry in given]
        if any(part is None for part in parts):
            raise ConfigError(f"{path}: set-resources: entries are rule:resource=value, not {given!r}")
        return [(part[1], part[2], _Bare(part[3])) for part in parts if part is not None]
    if not isinstance(given, dict) or not all(isinstance(value, dict) for value in given.values()):
        raise ConfigError(f"{path}: set-resources: a mapping of rules, each a mapping of resources, is wanted")
    return [(str(rule), str(key), value) for rule, keys in given.items() for key, value in keys.items()]


def _pairs(tree: dict[str, Any], key: str, path: Path) -> list[tuple[str, Any]]:
    """A section that is a mapping, or a list of `name=value`."""
    given = tree.get(key) or {}
    if isinstance(given, dict):
        return [(str(name), value) for name, value in given.items()]
    if not isinstance(given, list) or not all("=" in str(entry) for entry in given):
        raise ConfigError(f"{path}: {key}: a mapping is wanted, not {given!r}")
    return [(name, _Bare(value)) for name, _, value in (str(entry).partition("=") for entry in given)]


class _Bare(str):
    """A text of a list, which Snakemake does not quote where it looks like a number."""


def _add(resources: dict[str, Any], key: str, value: Any, threads: int, where: str) -> None:
    name = {"mem": "mem_mb", "mem_mib": "mem_mb", "disk": "disk_mb", "disk_mib": "disk_mb"}.get(key, key)
    if name in resources:
        raise ConfigError(f"{where}: {key} is given twice, in two units")
    found = _value(key, value, threads, where)
    if key.endswith(("_mb", "_mib")) and not isinstance(found, int):
        raise ConfigError(f"{where}: {key}: a number without quotes is wanted, not {found!r}; `mem: 16G` takes a unit")
    resources[name] = math.floor(found * 1.048576) if key.endswith("_mib") else found


def _value(key: str, value: Any, threads: int, where: str) -> Any:
    """What a resource's value is to a rule."""
    text = str(value)
    if key in ("runtime", "mem", "disk"):
        amount = _amount(key, text)
        if amount is not None:
            return amount
    elif _is_number(text) and isinstance(value, str) and not isinstance(value, _Bare):
        return text
    found = _evaluated(key, os.path.expanduser(os.path.expandvars(text)), threads, where)
    if isinstance(found, str) and key in ("runtime", "mem", "disk"):
        amount = _amount(key, found)
        if amount is None:
            unit = "a time such as 90 (minutes) or 2h" if key == "runtime" else "a size such as 16000 (MB) or 16G"
            raise ConfigError(f"{where}: {key}: {unit} is wanted, not {text!r}")
        return amount
    if isinstance(found, int) and not isinstance(found, bool) and found < 0:
        if _is_number(text):
            raise ConfigError(f"{where}: {key}: {text} is negative")
        raise ConfigError(f"{where}: {key}: Snakemake reads {text!r} as {found}; write \"'{text}'\", in both quotes")
    return found


def _amount(key: str, text: str) -> int | None:
    """Minutes or MB, from a number or a number with a unit; None when it is neither."""
    stripped = text.strip("'\"")
    if stripped.isdecimal():
        return int(stripped)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", stripped)
    if match is None:
        return None
    unit = match[2].lower()
    units = _SECONDS if key == "runtime" else _BYTES
    factor = units.get(unit, units.get(unit.removesuffix("s")))
    if factor is None:
        return None
    amount = float(match[1]) * factor
    return max(round(amount) // 60, 1) if key == "runtime" else max(math.ceil(int(amount) / 1e6), 1)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _evaluated(key: str, text: str, threads: int, where: str) -> Any:
    """`text` as Snakemake evaluates it: arithmetic is done, what names nothing known is a text."""
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        return text
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if names - _NAMES:
        return text
    try:
        found = _computed(tree, {"attempt": 1, "threads": threads})
    except (ValueError, TypeError, ArithmeticError):
        raise ConfigError(
            f"{where}: {key}: Snakemake reads {text!r} as Python; write \"'{text}'\", in both quotes, for a text"
        ) from None
    return round(found) if isinstance(found, float) else found


def _computed(node: ast.AST, names: dict[str, int]) -> Any:
    """Numbers, texts and the four operations. Raises ValueError at anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float | str):
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](_computed(node.operand, names))
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        sides = _computed(node.left, names), _computed(node.right, names)
        if all(isinstance(side, int | float) for side in sides):
            return _ARITHMETIC[type(node.op)](*sides)
    raise ValueError(type(node).__name__)
