"""Contracts of a tracker, which gets the metrics of a training, and of an observer of a training."""

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from cellmill.files import span

STEP_EVERY_S = 5.0  # between lines of steps in a log


class Tracker(Protocol):
    """A plug-in made from its `TrackerConfig`, called in its own process (`track.follow`)."""

    def start(self, config: dict[str, Any], resume_step: int) -> None:
        """Begin, before any other call.

        `config` is JSON-able. It has `run`, `id` (32 hexadecimal digits, the same for all processes
        that track this training), `folder` for the tracker's files, and the records of run.json and
        state.json: `options`, `identity`, `fingerprint`, `environment`, `steps`, `world_size`.
        `resume_step` is the newest step that an earlier process sent, otherwise 0.
        """

    def log(self, step: int, scalars: dict[str, Any]) -> None:
        """Record a line of metrics.jsonl, of a training step or with `val_loss`. Each comes once.

        It has only numbers: the largest of a list over ranks (memory), and no text (the reason of a
        skipped step).
        """

    def finish(self, status: str) -> None:
        """End with status `done`, `stopped` (to be resumed) or `failed`.

        It is not called when the process is killed. Another process may start again with the same
        `id`.
        """


@runtime_checkable
class ArtifactTracker(Protocol):
    """A tracker that takes files too."""

    def artifact(self, name: str, path: Path) -> None:
        """Record a file of the run under `name`, before `finish`; again when the file has changed."""


class JsonlTracker:
    """metrics.jsonl at `path`: one JSON object per line, flushed at once for readers."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def start(self, config: dict[str, Any], resume_step: int) -> None:
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 - until finish

    def log(self, step: int, scalars: dict[str, Any]) -> None:
        self._file.write(json.dumps({"step": step} | scalars) + "\n")
        self._file.flush()

    def finish(self, status: str) -> None:
        self._file.close()


class ConsoleTracker:
    """Progress on stdout: one line that is rewritten on a terminal, plain lines in a log.

    A log has a line of a step every 5 s, of the first and the last step, and of each validation;
    metrics.jsonl has all. `config` of `start` must have `steps`, the steps of the whole run.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due = -math.inf  # time of the next line of a step in a log

    def start(self, config: dict[str, Any], resume_step: int) -> None:
        self.steps = config["steps"]
        self.terminal = sys.stdout.isatty()

    def log(self, step: int, scalars: dict[str, Any]) -> None:
        text = f"step {step}/{self.steps}  "
        bar = ""
        end = "\n"
        if "val_loss" in scalars:
            text += f"validation loss {scalars['val_loss']:.4f}"
        elif "skipped" in scalars:
            text += f"skipped: {scalars['skipped']}"
            if "skipped_steps" in scalars:
                text += f"; {scalars['skipped_steps']} steps so far"
        else:
            time_now = self._clock()
            if not self.terminal and time_now < self._due and step < self.steps:
                return
            self._due = time_now + STEP_EVERY_S
            text += f"loss {scalars['loss']:.4f}  lr {scalars['lr']:.2e}  {scalars['cells_per_s']:.0f} cells/s  "
            text += (
                f"waiting for data {scalars['data_wait_frac']:.0%}  left {span(scalars['left_s'])}"
            )
            if self.terminal:
                done = round(20 * step / self.steps)
                bar = f"[{'#' * done}{'.' * (20 - done)}] "
                end = "\n" if step == self.steps else ""
        print(f"\r\x1b[K{bar}{text}" if self.terminal else text, end=end, flush=True)

    def finish(self, status: str) -> None:
        if self.terminal:
            print(flush=True)


class Observer(Protocol):
    """A plug-in made from its `ObserverConfig`, called in its own process.

    It cannot change, delay or fail the training. An observer that raises is dropped with one
    warning. Each line and checkpoint comes once, also if the training was killed and repeats steps.
    """

    def on_step(self, line: dict[str, Any]) -> None:
        """Called with each line of metrics.jsonl about a training step, `step` included."""

    def on_validation(self, line: dict[str, Any]) -> None:
        """Called with each line that has `val_loss`."""

    def on_checkpoint(self, path: Path) -> None:
        """Called with the folder of each new complete checkpoint.

        Later checkpoints replace it (`train.keep_checkpoints`): copy what is to be kept.
        """
