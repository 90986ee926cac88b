"""An observer that writes the names of what it sees, one a line."""

from pathlib import Path
from typing import Any

from cellmill_toy.options import ToySteps


class Steps:
    """See the module."""

    def __init__(self, config: ToySteps) -> None:
        self.path = Path(config.path)

    def on_step(self, line: dict[str, Any]) -> None:
        self._write(f"step {line['step']}")

    def on_validation(self, line: dict[str, Any]) -> None:
        self._write(f"validation {line['step']}")

    def on_checkpoint(self, path: Path) -> None:
        self._write(path.name)

    def _write(self, text: str) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(text + "\n")
