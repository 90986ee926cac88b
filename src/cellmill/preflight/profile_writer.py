"""The text of a profile: one template for the profiles of this repository and those of `cellmill profiles new`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from snakemake.cli import parse_set_resources

from cellmill.config.machine import Machine

RETRIES = 2
COMMENTS_AT = 28
"""Column of the comments, where the text before them is not longer."""
_OF_SNAKEMAKE: dict[str, Any] = {
    "wildcards": {}, "input": [], "attempt": 1, "threads": 1, "rulename": "", "async_run": None,
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Partition in which stages run, and the most that a job may request there; None for no limit."""

    partition: str = ""
    qos: str = ""
    limit_min: int | None = None
    mem_mb: int | None = None
    """0 where SLURM does not manage memory: no job may request any."""
    cpus: int | None = None

    def memory(self, megabytes: int, per: int | None = None) -> str:
        """Memory that grows with each attempt and by 1 MB for each `per` MB of input, as Snakemake evaluates it."""
        return _growing(megabytes, self.mem_mb, per)

    def runtime(self, minutes: int, per: int | None = None) -> str:
        """Time limit that grows with each attempt and by a minute for each `per` MB of input, in the same way."""
        return _growing(minutes, self.limit_min, per)

    def at_most(self, number: int, limit: int | None) -> int:
        return number if limit is None else min(number, limit)


@dataclass(frozen=True)
class ProfileValues:
    """Everything that differs between two profiles."""

    head: str
    """First comment."""
    machine: Machine
    """Of train."""
    device: str
    """Of plan."""
    stages: Place
    vectors: Place
    """Of embed, embed_external, predict, evaluate and predict_changes, which use one GPU."""
    vectors_gpu: Mapping[str, str | int]
    """Their keys for it; comments if `vectors` has no partition."""
    status_command: str
    why: Mapping[str, str] = field(default_factory=dict)
    """The reason of a value; it follows the general comment of its key."""
    shipped: bool = False
    """True for a profile of this repository, to be filled in."""


def render(values: ProfileValues) -> str:
    """The profile's config.yaml."""
    loader = PackageLoader("cellmill", "preflight")
    environment = Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)

    def note(name: str, general: str = "") -> str:
        said = "; ".join(filter(None, (general, values.why.get(name))))
        return f" # {said}" if said else ""

    text = environment.get_template("profile_template.yaml").render(
        vars(values), retries=RETRIES, note=note, key=_key, text=quoted
    )
    return "".join(f"{_aligned(line)}\n" for line in text.splitlines())


def quoted(text: str) -> str:
    """`text` as YAML in which Snakemake reads a text: in both quotes if it could be Python, as `all` and 2-4 are."""
    inner = text if _stays(text) else f"'{text}'"
    plain = re.fullmatch(r"[A-Za-z][\w.,:/-]*", inner) and yaml.safe_load(f"k: {inner}") == {"k": inner}
    return inner if plain else f'"{inner}"'


def _stays(text: str) -> bool:
    """True if Snakemake evaluates `text` to a text or number that prints the same."""
    try:
        resource = parse_set_resources([f"rule:text={text}"])["rule"]["text"]
        return str(resource.evaluate(**_OF_SNAKEMAKE).value) == text
    except Exception:  # whatever the expression raises
        return False


def _growing(base: int, limit: int | None, per: int | None) -> str:
    """`base` and a part of the input's size, times the attempt, which exceeds `limit` in no attempt."""
    sized = base if per is None else f"int({base} + input.size_mb / {per})"
    if limit is None or (per is None and base * (1 + RETRIES) <= limit):
        return f"{sized} * attempt"
    return str(limit) if limit <= base else f"min({sized} * attempt, {limit})"


def _key(name: str, value: str | int, example: str) -> str:
    """A line of the profile, commented if there is no value."""
    if value == "":
        return f"# {name}: {example}"
    return f"{name}: {quoted(value) if isinstance(value, str) else value}"


def _aligned(line: str) -> str:
    match = re.fullmatch(r"(\s*(?:# )?[\w-]+:.*?) # (.*)", line)
    if match is None:
        return line
    return f"{match[1].ljust(max(COMMENTS_AT, len(match[1]) + 2))}# {match[2]}"
