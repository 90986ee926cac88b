"""`metrics.jsonl`: one JSON object a line, appended as training goes.

On resume the file is cut back to the checkpoint's step, so that a curve has each step once however often a run was
killed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cellmill.files import write_text


def cut_back(path: Path, step: int) -> None:
    """Drops lines of later steps, and a last line that a kill tore."""
    kept = [json.dumps(line) + "\n" for line in read_lines(path) if line["step"] <= step]
    write_text(path, "".join(kept))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of the file, in order; empty when there is none."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            break  # torn by a kill; what follows a torn line was never written
    return lines


class JsonlTracker:
    """Appends lines to a file; each is flushed, so that a reader sees it at once."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as training goes

    def log(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
