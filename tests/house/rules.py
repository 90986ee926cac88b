"""Rules of the workflow as text, with their directives."""

from __future__ import annotations

import re
from pathlib import Path

WORKFLOW = Path(__file__).resolve().parents[2] / "workflow"


def rules() -> dict[str, str]:
    """Body of each rule by name."""
    bodies: dict[str, str] = {}
    for path in (WORKFLOW / "Snakefile", *sorted((WORKFLOW / "rules").glob("*.smk"))):
        for match in re.finditer(r"^rule (\w+):\n((?:    .*\n|\n(?=\s))*)", path.read_text(encoding="utf-8"), re.M):
            bodies[match[1]] = match[2]
    return bodies


def directive(body: str, name: str) -> str:
    """Text of one directive of a rule; empty if absent."""
    match = re.search(rf"^    {name}:\n((?:        .*\n)+)", body, re.M)
    return match[1] if match else ""


def outputs() -> list[str]:
    """Every output pattern."""
    return [path for body in rules().values() for path in re.findall(r'"([^"]+/[^"]+)"', directive(body, "output"))]
