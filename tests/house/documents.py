"""The documents for people, which tests compare with the code."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    *("README.md", "CONTRIBUTING.md", "config/README.md", "profiles/README.md"),
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
]
"""Documents whose commands, targets and links are checked."""


def read(name: str) -> str:
    """Text of a file of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def documentation() -> str:
    """README and the pages of docs/, one after the other."""
    return "\n".join(
        read(name) for name in DOCUMENTS if name == "README.md" or name.startswith("docs/")
    )
