"""Lines of metrics.jsonl: those that are new, their kind, and the numbers that trackers get."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from cellmill.runs.folder import parse_lines


class CurveTail:
    """New complete lines of metrics.jsonl.

    It starts again at the first line after the file was replaced, as by a resume.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._inode = 0

    def read(self) -> list[dict[str, Any]]:
        """Return lines since the last call; empty without a file. Raise OSError if unreadable."""
        with suppress(FileNotFoundError), open(self._path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._position:
                self._inode = status.st_ino
                self._position = 0
            file.seek(self._position)
            text = file.read()
            complete = text[: text.rfind(b"\n") + 1]
            self._position += len(complete)
            return parse_lines(complete.splitlines())
        return []


def name_kind(line: dict[str, Any]) -> str:
    """Return the kind of a line of metrics.jsonl. A step has at most one line of each kind."""
    if "val_loss" in line:
        return "validation"
    return "skipped" if "skipped" in line else "step"


def select_scalars(line: dict[str, Any]) -> dict[str, int | float]:
    """Return the numbers of a line except its step; the largest of a list over ranks."""
    scalars = {}
    for name, value in line.items():
        number = max(value) if isinstance(value, list) and value else value
        if isinstance(number, int | float) and name != "step":
            scalars[name] = number
    return scalars
