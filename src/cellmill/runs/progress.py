"""How far a run is, and how fast, by its files."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from cellmill.errors import DataError
from cellmill.files import read_json
from cellmill.runs.folder import TrainFolder


def progress_of(train: Path) -> dict[str, Any]:
    """The newest of what state.json and the last checkpoint say of step, cells and steps; empty when it never began."""
    folder, found = TrainFolder(train), {}
    if (train / "state.json").exists():
        found = read_json(train / "state.json")
        if not isinstance(found, dict):
            raise DataError(f"{train / 'state.json'}: is not a run's state; the next start writes it anew")
    checkpoints = folder.checkpoints()
    if checkpoints and checkpoints[-1].step > found.get("step", 0):
        saved = checkpoints[-1].state()
        found = {**found, "steps": saved["steps"], **saved["progress"]}
    return found


def step_seconds(train: Path, lines: list[dict[str, Any]]) -> float | None:
    """Seconds of one step at the speed of the last lines, without validation and checkpoints; None if not known."""
    rates = [line["cells_per_s"] for line in lines if line.get("cells_per_s")][-10:]
    cells = cells_per_step(train)
    return cells / statistics.median(rates) if rates and cells else None


def cells_per_step(train: Path) -> float | None:
    """Cells of a step: their mean so far, or what the options say before a checkpoint knows it."""
    so_far = progress_of(train)
    if so_far.get("step") and so_far.get("cells"):
        return float(so_far["cells"] / so_far["step"])
    if not (train / "run.json").exists():
        return None
    return float(read_json(train / "run.json")["options"]["train"]["global_batch"])


def status(name: str, state: dict[str, Any]) -> dict[str, Any]:
    """What status.json and state.json say of a run."""
    return {"state": name, "steps": state["steps"], "world_size": state["world_size"], **state["progress"]}
