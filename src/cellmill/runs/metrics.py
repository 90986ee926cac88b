"""`metrics.jsonl`: one JSON object a line, appended as training goes. The one place that reads it.

On resume the file is cut back to the checkpoint's step, so that a curve has each step once however often a run was
killed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cellmill.files import write_text

TAIL_BYTES = 1 << 16  # of a curve or a log, enough for what is shown


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


def last_lines(metrics: Path) -> list[dict[str, Any]]:
    """The whole lines at the end of a curve."""
    try:
        with open(metrics, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            texts = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    if size > TAIL_BYTES:
        del texts[0]  # cut
    lines = []
    for text in texts:
        try:
            line = json.loads(text)
        except ValueError:  # torn by a kill, or being written
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines
