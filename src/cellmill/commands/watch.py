"""watch: a run live, from its files alone: loss, effective rank, throughput, waiting for data, time left.

On a terminal a block of lines is drawn again at each update; into a pipe or file goes one line per update that brings
something new. A run that has not begun is waited for; one that has ended is shown once.
"""

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from cellmill.commands.results import run_names
from cellmill.commands.status import KILLED, job_of, state_of
from cellmill.config.load import with_sweeps
from cellmill.config.yaml_text import read_yaml
from cellmill.errors import UserError, did_you_mean
from cellmill.runs.lock import holder_of
from cellmill.runs.progress import progress_of
from cellmill.runs.run_cost import span
from cellmill.track.sent import CurveTail, kind_of

ENDED = ("done", "failed", "stopped", KILLED)
BARS = "▁▂▃▄▅▆▇█"


def run(*, run: str, results: Path, every_s: float) -> None:
    """Show `run` until it has ended. Raises UserError for a path or an unknown run, and once its folder is deleted."""
    if "/" in run or "\\" in run:
        raise UserError(f"{run!r}: expected the name of a run, got a path")
    known, config = set(run_names(results)), results.parent / "config" / "config.yaml"
    if config.exists() and run not in known:
        known |= set((with_sweeps(read_yaml(config)) or {}).get("runs") or ())
    if known and run not in known:
        raise UserError(f"{run!r}: no such run in {results / 'runs'} or {config}; {did_you_mean(run, sorted(known))}")
    screen, watched = Screen(sys.stdout), WatchedRun(run, results / "runs" / run / "train")
    try:
        while True:
            state = watched.update()
            screen.show(watched.pieces(state), watched.losses())
            if state in ENDED:
                return
            time.sleep(every_s)
    except KeyboardInterrupt:
        return
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class WatchedRun:
    """The curve and the state of a run as far as they are known."""

    def __init__(self, name: str, train: Path) -> None:
        self._name, self._train, self._seen = name, train, False
        self._tail = CurveTail(train / "metrics.jsonl")
        self._lines: dict[tuple[int, str], dict[str, Any]] = {}
        self._steps: int | None = None

    def update(self) -> str:
        """Read what is new; return the state. Raises UserError if the folder was there and is gone."""
        if not self._train.is_dir():
            if self._seen:
                raise UserError(f"{self._train}: the run's folder was deleted")
            return "not begun"
        self._seen = True
        lines = self._tail.read()
        if lines:  # a resume goes back to the last checkpoint
            first = lines[0]["step"]
            self._lines = {key: line for key, line in self._lines.items() if key[0] <= first}
        self._lines |= {(line["step"], kind_of(line)): line for line in lines}
        holder = holder_of(self._train)
        state = state_of(self._train, job_of(self._train, None, holder is not None)[1], holder)
        self._steps = progress_of(self._train).get("steps", self._steps)
        return state

    def losses(self) -> list[float]:
        """The training loss of each line."""
        return [line["loss"] for line in self._lines.values() if "loss" in line]

    def pieces(self, state: str) -> list[str]:
        """The view in short texts."""
        step = max((number for number, _ in self._lines), default=None)
        of = f"/{self._steps} ({(step or 0) / self._steps:.0%})" if self._steps else ""
        shown = [f"{self._name}: {state}", "" if step is None else f"step {step}{of}"]
        train, validation = self._newest("loss"), self._newest("val_loss")
        if train:
            shown += [f"loss {train['loss']:.4g}", f"lr {train['lr']:.2e}" if "lr" in train else ""]
        if validation:
            shown.append(f"validation {validation['val_loss']:.4g} at step {validation['step']}")
        if ranked := self._newest("effective_rank"):
            shown.append(f"effective rank {ranked['effective_rank']:.1f}")
        if train.get("skipped_steps"):
            shown.append(f"{train['skipped_steps']} steps skipped")
        if state == "running":
            shown += self._speed(train)
        return [text for text in shown if text]

    def _speed(self, line: dict[str, Any]) -> list[str]:
        age_s = max(0.0, time.time() - self._written_at())
        shown = [f"{line['cells_per_s']:,.0f} cells/s"] if "cells_per_s" in line else []
        shown += [f"waiting for data {line['data_wait_frac']:.0%}"] if "data_wait_frac" in line else []
        shown += [f"MFU {line['mfu']:.1%}"] if "mfu" in line else []
        shown += [f"GPU {max(line['gpu_busy_frac']):.0%}"] if line.get("gpu_busy_frac") else []
        shown += [f"left {span(max(0.0, line['left_s'] - age_s))}"] if "left_s" in line else []
        return [*shown, f"last line {span(age_s)} ago"] if line else shown

    def _newest(self, key: str) -> dict[str, Any]:
        return next((line for line in reversed(self._lines.values()) if key in line), {})

    def _written_at(self) -> float:
        try:
            return (self._train / "metrics.jsonl").stat().st_mtime
        except OSError:
            return time.time()


class Screen:
    """A terminal on which a block of lines is drawn again, or a pipe that gets a line for each change."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._drawn, self._last = out, 0, ""

    def show(self, pieces: list[str], losses: list[float]) -> None:
        if not self._out.isatty():
            # the age of the last line is no news
            line = "  ".join(text for text in pieces if not text.startswith("last line "))
            if line != self._last:
                print(line, file=self._out, flush=True)
            self._last = line
            return
        columns, _ = shutil.get_terminal_size()
        lines = [*wrapped(pieces, columns - 1), bars(losses, columns - 1)]
        back = f"\x1b[{self._drawn}A\x1b[J" if self._drawn else ""
        print(back + "\n".join(lines), file=self._out, flush=True)
        self._drawn = len(lines)


def wrapped(pieces: list[str], columns: int) -> list[str]:
    """Lines of at most `columns` characters with two spaces between pieces; a longer piece is cut."""
    lines: list[str] = []
    for piece in pieces:
        if lines and len(lines[-1]) + 2 + len(piece) <= columns:
            lines[-1] += f"  {piece}"
        else:
            lines.append(piece[: max(1, columns)])
    return lines


def bars(losses: list[float], columns: int) -> str:
    """The curve as one line of at most `columns` characters, each the mean of its part; low is good."""
    finite = [loss for loss in losses if loss == loss and abs(loss) != float("inf")]
    width = max(1, min(columns, len(finite)))
    parts = [finite[len(finite) * at // width : len(finite) * (at + 1) // width] for at in range(width)]
    means = [sum(part) / len(part) for part in parts if part]
    lowest, highest = min(means, default=0.0), max(means, default=0.0)
    scale = (len(BARS) - 1) / (highest - lowest) if highest > lowest else 0.0
    return "".join(BARS[round((mean - lowest) * scale)] for mean in means)
