"""Runs by name, and what their files say at this moment: shared by the commands that look after them.

Nothing here changes a file, and the lock is only tried: a training that is running is not disturbed.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import statistics
from pathlib import Path
from typing import Any

from cellmill.errors import DataError, UserError
from cellmill.files import read_json
from cellmill.launch.jobs import JobRecord, Jobs
from cellmill.launch.queue import Line, Queue
from cellmill.train.folder import Holder, TrainFolder

TAIL_BYTES = 1 << 16  # of a curve or a log, enough for what is shown


def names(results: Path) -> list[str]:
    """Every run under `results`. Raises UserError when that is no folder of results."""
    folder = results / "runs"
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; --results should be the results folder of a workflow")
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def folder_of(results: Path, name: str) -> Path:
    """The training folder of a run. Raises UserError naming those there are."""
    have = names(results)
    if name not in have:
        what = "a run's name is wanted, not a path" if "/" in name or "\\" in name else "no such run"
        raise UserError(f"{name!r}: {what}; {results / 'runs'} has {', '.join(have) or 'none yet'}")
    return results / "runs" / name / "train"


def local_log(results: Path, name: str) -> Path:
    """Where the workflow keeps what `train` prints."""
    return results.parent / "logs" / "train" / f"{name}.log"


def holder_of(train: Path) -> Holder | None:
    """Who trains or follows in this folder now; None when nobody does."""
    try:
        file = open(train / "lock", encoding="utf-8")  # noqa: SIM115 - closed by the with below
    except FileNotFoundError:
        return None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # let go at once, when the file is closed
        except BlockingIOError:
            return Holder.read(file)
        except OSError:  # a file system without locks: nobody can hold one
            return None
        return None


def living_jobs(train: Path, queue: Queue) -> list[Line]:
    """Jobs of this run that SLURM has, recorded or not. Raises QueueError without an answer."""
    jobs = Jobs(train)
    if not jobs.path.is_dir() or (shutil.which("squeue") is None and not is_open(train)):
        return []
    return queue.named(f"{jobs.name}.")


def is_open(train: Path) -> bool:
    """Whether SLURM must be asked: the newest submission has not ended by its record, or has none."""
    folders = sorted((path for path in (train / "jobs").glob("*") if path.name.isdigit()), key=lambda p: int(p.name))
    if not folders:
        return False
    newest = Jobs(train).newest()
    return newest is None or newest.path != folders[-1] or newest.ended_at is None


def record_of(train: Path, line: Line) -> JobRecord | None:
    """The record of a job; None for one that was submitted and not recorded."""
    return next((record for record in Jobs(train).all() if record.job_id == line.job_id), None)


def last_lines(metrics: Path) -> list[dict[str, Any]]:
    """The whole lines at the end of a curve."""
    try:
        with open(metrics, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            texts = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    if size > TAIL_BYTES:
        del texts[0]  # cut
    lines = []
    for text in texts:
        try:
            line = json.loads(text)
        except ValueError:  # torn by a kill, or being written
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines


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
