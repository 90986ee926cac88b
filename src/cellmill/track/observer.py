"""Contract of an observer, which sees what a training does and changes nothing."""

from pathlib import Path
from typing import Any, Protocol

from cellmill.runs.folder import TrainFolder


class Observer(Protocol):
    """A plug-in made from its `config.track.ObserverConfig`, in a process of its own: it cannot change, delay or fail
    the training. One that raises is dropped with one warning. Each line and checkpoint comes once, also if the
    training was killed and repeats steps.
    """

    def on_step(self, line: dict[str, Any]) -> None:
        """Called with each line of metrics.jsonl about a training step, `step` included."""

    def on_validation(self, line: dict[str, Any]) -> None:
        """Called with each line that has `val_loss`."""

    def on_checkpoint(self, path: Path) -> None:
        """Called with the folder of each new complete checkpoint.

        Later checkpoints replace it (`train.keep_checkpoints`): copy what is to be kept.
        """


class ObserverTracker:
    """An observer behind the calls of a tracker."""

    def __init__(self, observer: Observer, folder: TrainFolder) -> None:
        self._observer, self._folder = observer, folder

    def start(self, config: dict[str, Any], resume_step: int) -> None:
        """Observers have no start."""

    def log(self, step: int, scalars: dict[str, Any]) -> None:
        call = self._observer.on_validation if "val_loss" in scalars else self._observer.on_step
        call({"step": step} | scalars)

    def checkpoints(self, after: int) -> int:
        """Tell of the complete checkpoints of steps after `after`; return the newest step."""
        for checkpoint in self._folder.checkpoints():
            if checkpoint.step > after:
                self._observer.on_checkpoint(checkpoint.path)
                after = checkpoint.step
        return after

    def finish(self, status: str) -> None:
        """Observers have no end."""
