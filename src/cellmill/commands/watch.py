"""watch: a run shown live, from its files alone.

On a terminal it redraws a block of lines; into a pipe or file it prints a line per update that
brings something new. It waits for a run that has not begun, and shows a run that has ended once.
"""

import math
import shutil
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

from cellmill.commands.run_state import (
    KILLED,
    RunState,
    find_newest,
    find_train_folder,
    measure_age_s,
    print_reason,
    until_interrupted,
)
from cellmill.errors import UserError
from cellmill.files import span
from cellmill.runs.folder import read_progress
from cellmill.track.metric_lines import CurveTail, name_kind

BARS = "▁▂▃▄▅▆▇█"
LATEST = {
    "loss": "loss {loss:.4g}",
    "lr": "lr {lr:.2e}",
    "val_loss": "validation {val_loss:.4g} at step {step}",
    "effective_rank": "effective rank {effective_rank:.1f}",
}
"""Text for the last line of the curve that has a key, by key."""
SPEED = {
    "cells_per_s": "{cells_per_s:,.0f} cells/s",
    "data_wait_frac": "waiting for data {data_wait_frac:.0%}",
    "mfu": "MFU {mfu:.1%}",
}
"""Text for a key of the last line, while the run trains."""


def watch(*, run: str, results: Path, every_s: float) -> None:
    """Show `run` until it has ended.

    Raise UserError if it is unknown, or once its folder is deleted.
    """
    if not 0.1 <= every_s <= 3600:
        raise UserError(f"--every-s: expected seconds from 0.1 to 3600, got {every_s:g}")
    train = find_train_folder(results, run, may_begin=True)
    watched = WatchedRun(run, train)
    screen = Screen(sys.stdout)
    with until_interrupted():
        while True:
            state = watched.update()
            screen.show(watched.describe(state), watched.list_losses())
            if state in ("done", "failed", "stopped", KILLED):
                print_reason(train)
                return
            time.sleep(every_s)


class WatchedRun:
    """The curve and the state of a run, read from its files again at each update."""

    def __init__(self, name: str, train: Path) -> None:
        self._name = name
        self._train = train
        self._was_there = False
        self._tail = CurveTail(train / "metrics.jsonl")
        self._lines: dict[tuple[int, str], dict[str, Any]] = {}  # by step and kind
        self._steps: int | None = None

    def update(self) -> str:
        """Read what is new; return the state. Raise UserError if the folder was there and is gone."""
        if not self._train.is_dir():
            if self._was_there:
                raise UserError(f"{self._train}: the run's folder was deleted")
            return "not begun"
        self._was_there = True
        lines = self._tail.read()
        if lines:  # a resume goes back to the last checkpoint
            first_step = lines[0]["step"]
            self._lines = {key: line for key, line in self._lines.items() if key[0] <= first_step}
            self._lines |= {(line["step"], name_kind(line)): line for line in lines}
        self._steps = read_progress(self._train).get("steps", self._steps)
        return RunState(self._train).state

    def list_losses(self) -> list[float]:
        """List the training losses of the curve."""
        return [line["loss"] for line in self._lines.values() if "loss" in line]

    def describe(self, state: str) -> list[str]:
        """Describe the run in short texts."""
        lines = list(self._lines.values())
        pieces = [f"{self._name}: {state}"]
        if lines:
            step = max(line["step"] for line in lines)
            text = f"step {step}"
            if self._steps:
                text += f"/{self._steps} ({step / self._steps:.0%})"
            pieces.append(text)
        for key, text in LATEST.items():
            latest = find_newest(key, lines)
            if latest:
                pieces.append(text.format(**latest))
        line = find_newest("loss", lines)
        if line.get("skipped_steps"):
            pieces.append(f"{line['skipped_steps']} steps skipped")
        if state == "running" and line:
            pieces += self._describe_speed(line)
        return pieces

    def _describe_speed(self, line: dict[str, Any]) -> list[str]:
        """Describe throughput and time in short texts."""
        age_s = measure_age_s(self._train / "metrics.jsonl")
        pieces = [text.format(**line) for key, text in SPEED.items() if key in line]
        if line.get("gpu_busy_frac"):
            pieces.append(f"GPU {max(line['gpu_busy_frac']):.0%}")
        if "left_s" in line:
            pieces.append(f"left {span(max(0.0, line['left_s'] - age_s))}")
        return [*pieces, f"last line {span(age_s)} ago"]


class Screen:
    """A terminal on which a block of lines is redrawn, or a pipe with a line per change."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._n_drawn = 0
        self._last = ""

    def show(self, pieces: list[str], losses: list[float]) -> None:
        """Show the texts of a run, and on a terminal its losses as bars."""
        if self._out.isatty():
            columns, _ = shutil.get_terminal_size()
            lines = [*wrap(pieces, columns - 1), draw_bars(losses, columns - 1)]
            back = f"\x1b[{self._n_drawn}A\x1b[J" if self._n_drawn else ""
            print(back + "\n".join(lines), file=self._out, flush=True)
            self._n_drawn = len(lines)
            return
        # the age of the last line is no news
        line = "  ".join(text for text in pieces if not text.startswith("last line "))
        if line != self._last:
            print(line, file=self._out, flush=True)
        self._last = line


def wrap(pieces: list[str], columns: int) -> list[str]:
    """Join pieces by two spaces into lines of at most `columns` characters; cut a longer piece."""
    lines: list[str] = []
    for piece in pieces:
        if lines and len(lines[-1]) + 2 + len(piece) <= columns:
            lines[-1] += f"  {piece}"
        else:
            lines.append(piece[: max(1, columns)])
    return lines


def draw_bars(losses: list[float], columns: int) -> str:
    """Draw the losses in at most `columns` characters, each of which is the mean of an equal part."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    if not finite:
        return ""
    width = max(1, min(columns, len(finite)))
    means = []
    for index in range(width):
        end = len(finite) * (index + 1) // width
        means.append(fmean(finite[len(finite) * index // width : end]))
    lowest = min(means)
    height = max(means) - lowest or 1.0
    return "".join(BARS[round((mean - lowest) / height * (len(BARS) - 1))] for mean in means)
