"""Rules of the workflow as text, with their directives."""

import re
from collections import ChainMap
from pathlib import Path

WORKFLOW = Path(__file__).resolve().parents[2] / "workflow"
BY_FILE = {
    path.name: dict(
        re.findall(
            r"^rule (\w+):\n((?:    .*\n|\n(?=\s))*)", path.read_text(encoding="utf-8"), re.M
        )
    )
    for path in [WORKFLOW / "Snakefile", *sorted((WORKFLOW / "rules").glob("*.smk"))]
}
BRIDGES, ZOO = BY_FILE.pop("bridges.smk"), BY_FILE.pop("zoo.smk")
"""Bodies of the rules of other packages, which call a script in an environment of its own and no
stage, by name.
"""
RULES = dict(ChainMap(*BY_FILE.values()))
"""Bodies of the others."""


def directive(body: str, name: str) -> str:
    """Text of one directive of a rule; empty if absent."""
    match = re.search(rf"^    {name}:\n((?:        .*\n)+)", body, re.M)
    return match[1] if match else ""


def outputs() -> list[str]:
    """Every output pattern."""
    bodies = [*RULES.values(), *BRIDGES.values(), *ZOO.values()]
    patterns = []
    for body in bodies:
        patterns += re.findall(r'"([^"]+/[^"]+)"', directive(body, "output"))
    return patterns
