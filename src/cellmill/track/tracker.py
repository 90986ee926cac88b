"""The contract of a tracker: something that takes lines of numbers as training goes."""

from __future__ import annotations

from typing import Any, Protocol


class Tracker(Protocol):
    """Only rank 0 has trackers."""

    def log(self, line: dict[str, Any]) -> None:
        """Takes one line: `step`, and either the numbers of a training step or `val_loss`."""

    def close(self) -> None:
        """Nothing follows."""
