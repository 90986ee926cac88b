"""Rules of the workflow as text, with their directives."""

import re
from pathlib import Path

WORKFLOW = Path(__file__).resolve().parents[2] / "workflow"


BRIDGES, ZOO = "bridges.smk", "zoo.smk"
"""Rules of other packages, which call a script in an environment of its own and no stage."""


def rules() -> dict[str, str]:
    """Body of each rule by name, but for bridges and the zoo."""
    files = sorted((WORKFLOW / "rules").glob("*.smk"))
    return _bodies([WORKFLOW / "Snakefile", *(path for path in files if path.name not in (BRIDGES, ZOO))])


def bridges() -> dict[str, str]:
    """Body of each bridge by name."""
    return _bodies([WORKFLOW / "rules" / BRIDGES])


def zoo() -> dict[str, str]:
    """Body of the rule of presets of evaluate.external by name."""
    return _bodies([WORKFLOW / "rules" / ZOO])


def _bodies(files: list[Path]) -> dict[str, str]:
    bodies: dict[str, str] = {}
    for path in files:
        for match in re.finditer(r"^rule (\w+):\n((?:    .*\n|\n(?=\s))*)", path.read_text(encoding="utf-8"), re.M):
            bodies[match[1]] = match[2]
    return bodies


def directive(body: str, name: str) -> str:
    """Text of one directive of a rule; empty if absent."""
    match = re.search(rf"^    {name}:\n((?:        .*\n)+)", body, re.M)
    return match[1] if match else ""


def outputs() -> list[str]:
    """Every output pattern."""
    bodies = (rules() | bridges() | zoo()).values()
    return [path for body in bodies for path in re.findall(r'"([^"]+/[^"]+)"', directive(body, "output"))]
