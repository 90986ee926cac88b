"""Lines of metrics.jsonl that a follower has not sent yet, over resumes of the training and of the follower."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cellmill.errors import DataError
from cellmill.files import read_json


@dataclass
class Sent:
    """The part of a run that a tracker or observer has; in sent.json of its folder."""

    id: str
    """Of the run at the tracker, the same after every resume."""
    step: int = 0
    """Newest step that was sent."""
    kinds: list[str] = field(default_factory=list)
    """Kinds of lines sent for that step, see `kind_of`."""
    checkpoint: int = 0
    """Step of the newest checkpoint that an observer was told of."""
    artifacts: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each file that was sent, by name."""

    @classmethod
    def read(cls, path: Path, new_id: str) -> "Sent":
        """The record at `path`; a new one if there is none. Raises DataError if it is damaged."""
        if not path.exists():
            return cls(new_id)
        try:
            return cls(**read_json(path))
        except TypeError:
            raise DataError(f"{path}: not a record of what was sent; remove it to send all again") from None

    def write(self, path: Path) -> None:
        """Replace the record. Not fsynced: a lost one costs lines that are sent twice. Makes no folder."""
        temporary = path.with_name(f".{path.name}.incomplete")
        temporary.write_text(json.dumps(asdict(self)), encoding="utf-8")
        os.replace(temporary, path)

    def is_new(self, line: dict[str, Any]) -> bool:
        """True for a line that was not sent. Steps that a killed training repeats were."""
        return line["step"] > self.step or (line["step"] == self.step and kind_of(line) not in self.kinds)

    def note(self, line: dict[str, Any]) -> None:
        """Count `line` as sent."""
        kinds = self.kinds if line["step"] == self.step else []
        self.step, self.kinds = line["step"], [*kinds, kind_of(line)]


def kind_of(line: dict[str, Any]) -> str:
    """Kind of a line of metrics.jsonl: step, validation or skipped. A step has at most one of each."""
    return "validation" if "val_loss" in line else "skipped" if "skipped" in line else "step"


class CurveTail:
    """New complete lines of metrics.jsonl; from the first one again after the file was replaced, as by a resume."""

    def __init__(self, path: Path) -> None:
        self._path, self._position, self._inode = path, 0, 0

    def read(self) -> list[dict[str, Any]]:
        """Lines since the last call; empty if there is no file. Raises OSError if it cannot be read."""
        try:
            file = open(self._path, "rb")  # noqa: SIM115 - closed by the with below
        except FileNotFoundError:
            return []
        with file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._position:
                self._inode, self._position = status.st_ino, 0
            file.seek(self._position)
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._position += len(complete)
        return [line for part in complete.splitlines() if (line := _parsed(part)) is not None]


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):  # damaged
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None
