"""Progress and speed of a run, from its files.

metrics.jsonl has one JSON object per line, appended during training. On resume it is truncated to the checkpoint's
step, so that each step is in the curve once however often a run was killed.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from cellmill.errors import DataError
from cellmill.files import read_json, write_text
from cellmill.runs.folder import TrainFolder

TAIL_BYTES = 1 << 16  # end of a curve or a log, enough for status and attach
COLLAPSED = 1.5  # `effective_rank` below which the embedding is nearly one direction


def cut_back(path: Path, step: int) -> None:
    """Drop lines of steps after `step`, and a last line that a kill truncated."""
    copy_until(path, path, step)


def copy_until(path: Path, copy: Path, step: int) -> None:
    """Write the lines of `path` up to `step` to `copy`."""
    write_text(copy, "".join(json.dumps(line) + "\n" for line in read_lines(path) if line["step"] <= step))


def read_lines(path: Path, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """Complete lines with a step in order, of the whole file or of its last bytes; empty if there is none."""
    try:
        with open(path, "rb") as file:
            start = 0 if last_bytes is None else max(0, file.seek(0, 2) - last_bytes)
            file.seek(start)
            texts = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    if start:
        del texts[0]  # incomplete
    return parsed(texts)


def parsed(texts: Iterable[bytes]) -> list[dict[str, Any]]:
    """The JSON objects with a step; what a kill truncated, is being written or is damaged is left out."""
    lines = []
    for text in texts:
        with suppress(ValueError, RecursionError):
            lines.append(json.loads(text))
    return [line for line in lines if isinstance(line, dict) and isinstance(line.get("step"), int)]


def progress_of(train: Path) -> dict[str, Any]:
    """Step, cells and steps by state.json or the last checkpoint, whichever is newer; empty before the first start."""
    file, progress = train / "state.json", {}
    if file.exists():
        progress = read_json(file)
        if not isinstance(progress, dict):
            raise DataError(f"{file}: not a run's state; start the run again: it rewrites the file")
    checkpoints = TrainFolder(train).checkpoints()
    if checkpoints and checkpoints[-1].step > progress.get("step", 0):
        saved = checkpoints[-1].state()
        progress = {**progress, "steps": saved["steps"], **saved["progress"]}
    return progress


def training_seconds(train: Path) -> float | None:
    """Seconds spent on the steps of the curve; None without a curve.

    Each line of metrics.jsonl has the rate since the line before it: the sum of (steps between them) x (cells per
    step) / (cells per second). Waiting for data is included; validation and checkpoints are not. Steps that were lost
    with a job and repeated are in the curve once.
    """
    lines = [line for line in read_lines(train / "metrics.jsonl") if line.get("cells_per_s")]
    if not lines:
        return None
    progress = progress_of(train)
    if progress.get("step") and progress.get("cells"):
        cells = progress["cells"] / progress["step"]
    elif (train / "run.json").exists():  # before the first checkpoint
        cells = read_json(train / "run.json")["options"]["train"]["global_batch"]
    else:
        return None
    before = [0, *(line["step"] for line in lines)]
    return float(sum(max(0, line["step"] - last) * cells / line["cells_per_s"] for line, last in zip(lines, before)))


def status(name: str, state: dict[str, Any]) -> dict[str, Any]:
    """Contents of status.json and state.json."""
    return {"state": name, "steps": state["steps"], "world_size": state["world_size"], **state["progress"]}
