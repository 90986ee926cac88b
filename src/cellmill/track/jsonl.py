"""Appends a training's numbers to `metrics.jsonl`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class JsonlTracker:
    """Appends lines to a file; each is flushed, so that a reader sees it at once."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as training goes

    def log(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
