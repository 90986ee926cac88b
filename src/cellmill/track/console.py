"""Training as a person follows it: one line that is rewritten on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from typing import Any


class ConsoleTracker:
    """Prints to stdout.

    Parameters
    ----------
    steps
        Steps of the whole run.
    start
        Step it begins at, for the time that is left.
    """

    def __init__(self, steps: int, start: int) -> None:
        self.steps, self.start, self.begun = steps, start, time.perf_counter()
        self.terminal = sys.stdout.isatty()

    def log(self, line: dict[str, Any]) -> None:
        if "val_loss" in line:
            self.say(f"step {line['step']}/{self.steps}  validation loss {line['val_loss']:.4f}")
            return
        step = line["step"]
        if "skipped" in line:
            self.say(f"step {step}/{self.steps}  skipped: {line['skipped']}; {line['skipped_steps']} steps so far")
            return
        left_s = (time.perf_counter() - self.begun) / max(1, step - self.start) * (self.steps - step)
        text = (
            f"step {step}/{self.steps}  loss {line['loss']:.4f}  lr {line['lr']:.2e}  "
            f"{line['cells_per_s']:.0f} cells/s  waiting for data {line['data_wait_frac']:.0%}  left {_clock(left_s)}"
        )
        if not self.terminal:
            self.say(text)
            return
        done = round(20 * step / self.steps)
        print(f"\r\x1b[K[{'#' * done}{'.' * (20 - done)}] {text}", end="\n" if step == self.steps else "", flush=True)

    def say(self, text: str) -> None:
        """A line of its own."""
        print(f"\r\x1b[K{text}" if self.terminal else text, flush=True)

    def close(self) -> None:
        if self.terminal:
            print(flush=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
