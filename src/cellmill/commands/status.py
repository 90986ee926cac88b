"""status: where each run stands, in one table. Reads small files, asks the queue once; needs neither SLURM nor torch.

`running` is said of a run that SLURM runs or whose lock is held; where files merely say so, it was killed.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cellmill.commands.run_names import folder_of, holder_of, is_open, names
from cellmill.errors import UserError
from cellmill.files import read_json
from cellmill.launch.queue import Line, Queue, QueueError
from cellmill.runs.cost import read_local, span
from cellmill.runs.folder import TrainFolder
from cellmill.runs.job_states import GONE, UNKNOWN, JobState
from cellmill.runs.jobs import JobRecord, Jobs
from cellmill.runs.metrics import last_lines
from cellmill.runs.progress import progress_of, step_seconds

HEAD = ("run", "state", "step", "loss", "job", "slurm", "left", "saved", "last line")
RIGHT = {"step", "loss", "left", "saved", "last line"}
WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
STOPPED = {"COMPLETED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "REVOKED", "DEADLINE", GONE}
"""Ends after which the same command goes on."""
KILLED = "stopped (killed)"
"""On this machine, without a chance to save: it goes on from its last checkpoint."""


def run(*, runs: list[str], results: Path) -> None:
    """Prints the table of `runs`, or of all there are under `results`."""
    folders = {name: folder_of(results, name) for name in runs} or {n: folder_of(results, n) for n in names(results)}
    if not folders:
        print(f"{results / 'runs'}: no run yet")
        return
    queue = Answer.get(list(folders.values()))
    notes = [queue.trouble] if queue.trouble else []
    rows = []
    for name, train in folders.items():
        try:
            rows.append(row(name, train, queue))
        except (UserError, OSError, KeyError, TypeError, ValueError) as error:  # one damaged run hides no other
            rows.append([name, "?", *"-" * (len(HEAD) - 2)])
            notes.append(f"{name}: {_said(error)}")
    print(table(rows))
    for note in notes:
        print(note)


@dataclass(frozen=True)
class Answer:
    """What the queue said of all runs."""

    lines: list[Line]
    queue: Queue | None
    trouble: str = ""

    @classmethod
    def get(cls, trains: list[Path]) -> Answer:
        """Asks the queue when a run has a job that may live."""
        if not any(_may_live(train) for train in trains):
            return cls([], None)
        if shutil.which("squeue") is None:
            return cls([], None, "squeue is not on PATH: jobs are shown as last recorded")
        queue = Queue(1.0)
        try:
            return cls(queue.named(""), queue)
        except QueueError as error:
            return cls([], None, f"the queue gave no usable answer ({error}): jobs are shown as last recorded")


def _may_live(train: Path) -> bool:
    try:
        return is_open(train)
    except (UserError, OSError):  # said in its own row
        return False


def row(name: str, train: Path, queue: Answer) -> list[str]:
    """The cells of one run."""
    holder = holder_of(train)
    job_id, slurm = job_of(train, queue, holder is not None)
    state = state_of(train, slurm, holder is not None, holder is not None and holder.follows)
    curve = last_lines(train / "metrics.jsonl")
    now = progress_of(train)
    step = max([line["step"] for line in curve], default=now.get("step"))
    steps = now.get("steps") or _planned_steps(train)
    loss = next((line["loss"] for line in reversed(curve) if "loss" in line), now.get("train_loss"))
    saved = TrainFolder(train).saved_step()
    left = None
    if state == "running" and steps and step is not None and (each := step_seconds(train, curve)) is not None:
        left = (steps - step) * each
    age = time.time() - (train / "metrics.jsonl").stat().st_mtime if curve else None
    return [
        name,
        state,
        "-" if step is None else f"{step}/{steps or '-'}",
        "-" if loss is None else f"{loss:.4g}",
        job_id or "-",
        _word(slurm) if slurm else "-",
        "-" if left is None else span(left),
        str(saved or "-"),
        "-" if age is None else f"{span(max(0.0, age))} ago",
    ]


def job_of(train: Path, queue: Answer, held: bool) -> tuple[str, JobState | None]:
    """Number and state of the run's newest job: SLURM's word where it gave one, else the last on record."""
    jobs = Jobs(train)
    for line in queue.lines:
        if line.name.startswith(f"{jobs.name}."):
            return line.job_id, line.state
    newest = jobs.newest()
    if newest is None:
        return "", None
    recorded = JobState(newest.state, newest.reason)
    if newest.ended_at is not None or queue.queue is None:
        return newest.job_id, recorded
    for line in queue.lines:
        if line.job_id == newest.job_id:  # of another name: an allocation, which outlives what is started in it
            return line.job_id, line.state if held else JobState(GONE, "the allocation goes on")
    state = queue.queue.state(newest.job_id)  # ended while nobody followed it
    return newest.job_id, recorded if state.name == UNKNOWN else state


def state_of(train: Path, slurm: JobState | None, held: bool, follows: bool) -> str:
    """not begun, queued, running, stopped, stopped (killed), done or failed."""
    if (train / "status.json").exists() or TrainFolder(train).state() == "done":
        return "done"
    if held and not follows:
        return "running"
    if slurm is not None and slurm.alive:
        return "queued" if slurm.name in WAITING else "running"
    if held:
        return "queued"  # its launcher is about to submit the next job
    newest, local = Jobs(train).newest(), read_local(train)
    here = bool(local) and (newest is None or local[-1]["started_at"] > newest.submitted_at)
    if here:
        return {"FAILED": "failed", None: KILLED, "KILLED": KILLED}.get(local[-1]["how"], "stopped")
    if newest is not None:
        return "failed" if _failed(newest, slurm) else "stopped"
    if TrainFolder(train).state() == "running":
        return KILLED
    return "stopped" if (train / "state.json").exists() or TrainFolder(train).saved_step() else "not begun"


def _failed(newest: JobRecord, slurm: JobState | None) -> bool:
    return newest.error is not None or (slurm is not None and slurm.name not in STOPPED)


def _planned_steps(train: Path) -> int | None:
    plan = train.parent / "plan.json"
    return read_json(plan).get("steps") if plan.exists() else None


def _word(slurm: JobState) -> str:
    return f"{slurm.name} ({slurm.reason})" if slurm.reason else slurm.name


def _said(error: Exception) -> str:
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}"
    return f"its files are not as cellmill writes them ({type(error).__name__}: {error})"


def table(rows: list[list[str]]) -> str:
    """Columns set apart by two spaces; figures to the right."""
    cells: list[Any] = [list(HEAD), *rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEAD))]
    return "\n".join(
        "  ".join(
            text.rjust(width) if head in RIGHT else text.ljust(width) for text, width, head in zip(line, widths, HEAD)
        ).rstrip()
        for line in cells
    )
