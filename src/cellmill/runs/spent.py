"""cost.json of a run: what launch/cost.py finds of its jobs, with the time that went into steps of its curve."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cellmill.config.machine import Machine
from cellmill.files import write_json
from cellmill.runs.cost import cost, noted, sentence
from cellmill.runs.metrics import read_lines
from cellmill.runs.progress import cells_per_step


@contextmanager
def accounted(train: Path, machine: Machine) -> Iterator[None]:
    """A training that leaves cost.json, and a line of it, however it ends. The caller holds the run's lock."""
    try:
        if machine.launcher == "local":
            with noted(train, machine):
                yield
        else:
            yield
    finally:
        write_cost(train)


def write_cost(train: Path, show: bool = True) -> None:
    """Writes cost.json in `train`; says in a line what it cost, or why that could not be found out. Never raises."""
    try:
        found = cost(train, training_seconds(train), time.time())
        if found is None:
            return
        write_json(train / "cost.json", found)
    except Exception as error:  # a training of days must not end in a traceback about its cost
        print(f"warning: cost.json is not written: {type(error).__name__}: {error}", flush=True)
        return
    if show:
        print(sentence(found), flush=True)


def training_seconds(train: Path) -> float | None:
    """Seconds that the steps of the curve took; None without one.

    Each line of metrics.jsonl has the rate since the line before it: the sum of (steps between them) x (cells of a
    step) / (cells per second). Waiting for data is part of it; validation and checkpoints are not. Steps that were
    lost with a job and trained again are in the curve once.
    """
    cells = cells_per_step(train)
    lines: list[dict[str, Any]] = [line for line in read_lines(train / "metrics.jsonl") if line.get("cells_per_s")]
    if not lines or cells is None:
        return None
    seconds, before = 0.0, 0
    for line in lines:
        seconds += max(0, line["step"] - before) * cells / line["cells_per_s"]
        before = line["step"]
    return seconds
