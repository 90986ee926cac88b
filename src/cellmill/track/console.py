"""Progress of a training on stdout: one line that is rewritten on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from typing import Any


class ConsoleTracker:
    """Prints to stdout; `config` of `start` must have `steps`, the steps of the whole run."""

    def start(self, config: dict[str, Any], resume_step: int) -> None:
        self.steps, self.resume_step = config["steps"], resume_step
        self.started = time.perf_counter()
        self.terminal = sys.stdout.isatty()

    def log(self, step: int, scalars: dict[str, Any]) -> None:
        head = f"step {step}/{self.steps}"
        if "val_loss" in scalars:
            self._print(f"{head}  validation loss {scalars['val_loss']:.4f}")
            return
        if "skipped" in scalars:
            self._print(f"{head}  skipped: {scalars['skipped']}; {scalars['skipped_steps']} steps so far")
            return
        elapsed_s = time.perf_counter() - self.started
        left_s = elapsed_s / max(1, step - self.resume_step) * (self.steps - step)
        text = (
            f"{head}  loss {scalars['loss']:.4f}  lr {scalars['lr']:.2e}  {scalars['cells_per_s']:.0f} cells/s  "
            f"waiting for data {scalars['data_wait_frac']:.0%}  left {_clock(left_s)}"
        )
        if not self.terminal:
            self._print(text)
            return
        done = round(20 * step / self.steps)
        print(f"\r\x1b[K[{'#' * done}{'.' * (20 - done)}] {text}", end="\n" if step == self.steps else "", flush=True)

    def finish(self, status: str) -> None:
        if self.terminal:
            print(flush=True)

    def _print(self, text: str) -> None:
        """Print a line of its own."""
        print(f"\r\x1b[K{text}" if self.terminal else text, flush=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
