"""A tracker that writes what it is told, one JSON object a line."""

import json
from pathlib import Path
from typing import Any

from cellmill_toy.options import ToyFile


class File:
    """See the module."""

    def __init__(self, config: ToyFile) -> None:
        self.path = Path(config.path)

    def start(self, config: dict[str, Any], resume_step: int) -> None:
        kept = {name: config[name] for name in ("run", "steps")}
        self._write(
            {"start": config["options"]["model"]["family"], **kept, "resume_step": resume_step}
        )

    def log(self, step: int, scalars: dict[str, Any]) -> None:
        self._write({"step": step, "scalars": scalars})

    def finish(self, status: str) -> None:
        self._write({"finish": status})

    def _write(self, line: dict[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
