"""status: the state of each run, in one table, and the stages that wait in the queue.

Reads small files and asks squeue once for runs and once for stages; needs neither SLURM nor torch.

A run is `running` if SLURM runs it or its lock is held; if only its files say so, it was killed.
"""

import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from cellmill.commands.results import run_names, train_folder
from cellmill.errors import UserError
from cellmill.files import read_json
from cellmill.launch.queue import Queue, QueuedJob
from cellmill.launch.stage_jobs import stage_jobs, waiting_lines
from cellmill.registry import in_one_line
from cellmill.runs.folder import TrainFolder
from cellmill.runs.job_states import GONE, UNKNOWN, JobState
from cellmill.runs.jobs import Jobs
from cellmill.runs.local_starts import read_local
from cellmill.runs.lock import Holder, holder_of
from cellmill.runs.metrics import TAIL_BYTES, read_lines
from cellmill.runs.progress import progress_of
from cellmill.runs.run_cost import span
from cellmill.runs.slurm_command import CommandError

HEAD = ("run", "state", "step", "loss", "job", "slurm", "left", "saved", "last line")
RIGHT_ALIGNED = {"step", "loss", "left", "saved", "last line"}
WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
STOPPED = {"COMPLETED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "REVOKED", "DEADLINE", GONE}
"""End states after which the same command resumes."""
POLL_S = 1.0
KILLED = "stopped (killed)"
"""On this machine, without a chance to save: it resumes from its last checkpoint."""


def run(*, runs: list[str], results: Path) -> None:
    """Print the table of `runs`, or of all runs under `results`."""
    stages = waiting_stages(results)
    names = runs or run_names(results)
    folders = {name: train_folder(results, name) for name in names}
    if not folders:
        print("\n".join([f"{results / 'runs'}: no run yet", *stages]))
        return
    queued, trouble = ask_queue(folders.values())
    notes, rows = [trouble] if trouble else [], []
    for name, train in folders.items():
        try:
            rows.append(row(name, train, queued))
        except Exception as error:  # one damaged run hides no other
            rows.append([name, "?", *"-" * (len(HEAD) - 2)])
            notes.append(f"{name}: {_message(error, train)}")
    print(table(rows))
    for note in [*notes, *stages]:
        print(note)


def ask_queue(trains: Iterable[Path]) -> tuple[list[QueuedJob] | None, str]:
    """Jobs that squeue lists, if a run has one that may be alive; None without an answer, and the reason."""
    if not any(_may_be_alive(train) for train in trains):
        return None, ""
    if shutil.which("squeue") is None:
        return None, "squeue is not on PATH: jobs are shown as last recorded"
    try:
        return Queue(POLL_S).named(lambda name: True), ""
    except CommandError as error:
        return None, f"no usable answer from squeue ({error}): jobs are shown as last recorded"


def waiting_stages(results: Path) -> list[str]:
    """Lines about stages of this workflow that wait in the queue, with SLURM's reasons."""
    folder = results.resolve().parent
    if not (folder / ".snakemake").is_dir() or shutil.which("squeue") is None:
        return []
    try:
        return waiting_lines(stage_jobs(folder))
    except CommandError:
        return []


def _may_be_alive(train: Path) -> bool:
    try:
        return Jobs(train).may_be_alive()
    except (UserError, OSError):  # reported in its own row
        return False


def row(name: str, train: Path, queued: list[QueuedJob] | None) -> list[str]:
    holder = holder_of(train)
    job_id, slurm = job_of(train, queued, holder is not None)
    state = state_of(train, slurm, holder)
    curve = read_lines(train / "metrics.jsonl", TAIL_BYTES)
    progress = progress_of(train)
    step = max([line["step"] for line in curve], default=progress.get("step"))
    plan = train.parent / "plan.json"
    steps = progress.get("steps") or (read_json(plan).get("steps") if plan.exists() else None)
    loss = next((line["loss"] for line in reversed(curve) if "loss" in line), progress.get("train_loss"))
    saved = TrainFolder(train).saved_step()
    left = None
    if state == "running":
        left = next((line["left_s"] for line in reversed(curve) if "left_s" in line), None)
    age = time.time() - (train / "metrics.jsonl").stat().st_mtime if curve else None
    return [
        name,
        state,
        "-" if step is None else f"{step}/{steps or '-'}",
        "-" if loss is None else f"{loss:.4g}",
        job_id or "-",
        slurm.text if slurm else "-",
        "-" if left is None else span(left),
        str(saved or "-"),
        "-" if age is None else f"{span(max(0.0, age))} ago",
    ]


def job_of(train: Path, queued: list[QueuedJob] | None, held: bool) -> tuple[str, JobState | None]:
    """Id and state of the run's newest job: SLURM's if it gave one, else the last on record."""
    jobs = Jobs(train)
    for job in queued or ():
        if jobs.owns(job.name):
            return job.job_id, job.state
    newest = jobs.newest()
    if newest is None:
        return "", None
    recorded = JobState(newest.state, newest.reason)
    if newest.ended_at is not None or queued is None:
        return newest.job_id, recorded
    for job in queued:
        if job.job_id == newest.job_id:  # of another name: an allocation, which outlives what is started in it
            return job.job_id, job.state if held else JobState(GONE, "the allocation goes on")
    state = Queue(POLL_S).state(newest.job_id, newest.name)  # ended while nobody followed it
    return newest.job_id, recorded if state.name == UNKNOWN else state


def state_of(train: Path, slurm: JobState | None, holder: Holder | None) -> str:
    """not begun, queued, running, stopped, stopped (killed), done or failed."""
    if (train / "status.json").exists() or TrainFolder(train).state() == "done":
        return "done"
    if holder is not None and not holder.follows:
        return "running"
    if slurm is not None and slurm.alive:
        return "queued" if slurm.name in WAITING else "running"
    if holder is not None:
        return "queued"  # its launcher is about to submit the next job
    newest, local = Jobs(train).newest(), read_local(train)
    if local and (newest is None or local[-1]["started_at"] > newest.submitted_at):
        return {"FAILED": "failed", None: KILLED, "KILLED": KILLED}.get(local[-1]["how"], "stopped")
    if newest is not None:
        failed = newest.error is not None or (slurm is not None and slurm.name not in STOPPED)
        return "failed" if failed else "stopped"
    if TrainFolder(train).state() == "running":
        return KILLED
    return "stopped" if (train / "state.json").exists() or TrainFolder(train).saved_step() else "not begun"


def _message(error: Exception, train: Path) -> str:
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}"
    return f"unexpected content in a file of {train} ({in_one_line(error)})"


def table(rows: list[list[str]]) -> str:
    """Columns separated by two spaces; numbers right-aligned."""
    cells = [list(HEAD), *rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join(
        "  ".join(
            text.rjust(width) if head in RIGHT_ALIGNED else text.ljust(width)
            for text, width, head in zip(line, widths, HEAD)
        ).rstrip()
        for line in cells
    )
