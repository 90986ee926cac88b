"""Reading metrics.jsonl: one JSON object per line, appended during training.

On resume the file is truncated to the checkpoint's step, so that each step is in the curve once however often a run
was killed.
"""

import json
from pathlib import Path
from typing import Any

from cellmill.files import require_file, write_text

TAIL_BYTES = 1 << 16  # end of a curve or a log, enough for status and attach
COLLAPSED = 1.5  # `effective_rank` below which the embedding is nearly one direction


def cut_back(path: Path, step: int) -> None:
    """Drop lines of steps after `step`, and a last line that a kill truncated."""
    copy_until(path, path, step)


def copy_until(path: Path, copy: Path, step: int) -> None:
    """Write the lines of `path` up to `step` to `copy`."""
    write_text(copy, "".join(json.dumps(line) + "\n" for line in read_lines(path) if line["step"] <= step))


def read_lines(path: Path, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """Complete lines in order; empty if there is no file. Lines that are not of a step are left out.

    Parameters
    ----------
    last_bytes
        Read no more than the end of the file.
    """
    if not path.exists():
        return []
    require_file(path)
    try:
        with open(path, "rb") as file:
            start = 0 if last_bytes is None else max(0, file.seek(0, 2) - last_bytes)
            file.seek(start)
            texts = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    if start:
        del texts[0]  # incomplete
    lines = []
    for text in texts:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):  # truncated by a kill, being written, or damaged
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines
