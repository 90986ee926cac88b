"""Runs by name, and what their files say at this moment: shared by the commands that look after them.

Nothing here changes a file, and the lock is only tried: a training that is running is not disturbed.
"""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path

from cellmill.errors import UserError
from cellmill.launch.queue import Line, Queue
from cellmill.runs.folder import Holder
from cellmill.runs.jobs import JobRecord, Jobs


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
