"""One line of a preflight's result: ok, no, or ? for a doubt that does not stand in the way."""

import re
from dataclasses import dataclass, replace
from typing import Literal

TRAIN = "set-resources: train:"
"""Section of the profile with the keys that remedies name."""


@dataclass(frozen=True)
class Check:
    """One check: its figure, and for a `no` the key to change."""

    verdict: Literal["ok", "no", "?"]
    what: str
    figure: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.verdict:<3} {self.what}: {self.figure}{f'; {self.remedy}' if self.remedy else ''}"


def ok(what: str, figure: str) -> Check:
    return Check("ok", what, figure)


def no(what: str, figure: str, remedy: str = "") -> Check:
    return Check("no", what, figure, remedy)


def doubt(what: str, figure: str, remedy: str = "") -> Check:
    return Check("?", what, figure, remedy)


def judged(fits: bool, what: str, figure: str, remedy: str) -> Check:
    """ok if it fits, else no with the remedy."""
    return ok(what, figure) if fits else no(what, figure, remedy)


def of_named(check: Check, machine: str) -> Check:
    """The check as one of the machine that runs name `machine`: the keys to change are of its own entries."""
    remedy = re.sub(r"(set-resources: (?:train|plan(?=: device)))\b", rf"\1.{machine}", check.remedy)
    return replace(check, what=f"machine {machine}, {check.what}", remedy=remedy)
