"""Contract of a tracker: it receives the numbers of a training."""

from __future__ import annotations

from typing import Any, Protocol


class Tracker(Protocol):
    """Used by rank 0 only. A plug-in is made from its `config.track.TrackerConfig`; see `track.background`."""

    def start(self, config: dict[str, Any], resume_step: int) -> None:
        """Begin, before any other call.

        Parameters
        ----------
        config
            `run`, `steps`, `world_size`, `fingerprint`, `options` and what else checkpoints record; JSON-able.
        resume_step
            Optimizer steps done so far, 0 for a new run. Steps after it that an earlier process logged come again.
        """

    def log(self, step: int, scalars: dict[str, Any]) -> None:
        """Record a line of metrics.jsonl: numbers of a training step, or `val_loss`.

        Plug-ins get numbers only: the largest of a list over ranks (memory), and no text (the reason of a skipped
        step).
        """

    def finish(self, status: str) -> None:
        """End: `done`, `stopped` (to be resumed) or `failed`. Not called when the process is killed."""
