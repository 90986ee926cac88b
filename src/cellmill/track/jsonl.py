"""metrics.jsonl: one JSON object per line, flushed at once so that readers see it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any


class JsonlTracker:
    """Appends lines to the file `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def start(self, config: dict[str, Any], resume_step: int) -> None:
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 - until finish

    def log(self, step: int, scalars: dict[str, Any]) -> None:
        assert self._file is not None, "start comes first"
        self._file.write(json.dumps({"step": step} | scalars) + "\n")
        self._file.flush()

    def finish(self, status: str) -> None:
        if self._file is not None:
            self._file.close()
