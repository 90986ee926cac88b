"""One check of a preflight, printed as a line: ok, no, or ? for a doubt that does not stop the run."""

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Self

TRAIN = "set-resources: train:"  # section of the profile with the keys that remedies name


@dataclass(frozen=True)
class Check:
    """A verdict, and for a `no` the key to change."""

    verdict: Literal["ok", "no", "?"]
    what: str  # subject of the check
    found: str
    remedy: str = ""
    nodes: tuple[str, ...] = ()  # nodes that a `no` is about

    def __str__(self) -> str:
        line = f"{self.verdict:<3} {self.what}: {self.found}"
        return f"{line}; {self.remedy}" if self.remedy else line

    def for_machine(self, name: str) -> Self:
        """Name the machine in the check, and its section of the profile in the remedy."""
        section = r"(set-resources: (?:train|plan(?=: device)))\b"
        remedy = re.sub(section, rf"\1.{name}", self.remedy)
        return replace(self, what=f"machine {name}, {self.what}", remedy=remedy)


ok = partial(Check, "ok")
no = partial(Check, "no")
doubt = partial(Check, "?")


def judge(fits: bool, what: str, text: str, remedy: str) -> Check:
    """Return an `ok` if it fits, otherwise a `no` with the remedy."""
    return ok(what, text) if fits else no(what, text, remedy)
