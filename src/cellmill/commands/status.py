"""status: a table of runs, and the stages that are at work. Needs neither SLURM nor torch."""

import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cellmill.commands.run_state import POLL_S, RunState, run_names, train_folder
from cellmill.config.plugin import in_one_line
from cellmill.errors import UserError
from cellmill.files import PROGRESS, read_json, span
from cellmill.launch.bad_nodes import BadNodes
from cellmill.launch.follow import how_to_end
from cellmill.launch.queue import Queue, QueuedJob, explained
from cellmill.launch.stage_jobs import stage_jobs, stage_lines
from cellmill.runs.folder import TAIL_BYTES, progress_of, read_lines
from cellmill.runs.jobs import Jobs
from cellmill.runs.slurm import CommandError

HEAD = ("run", "state", "step", "loss", "job", "slurm", "left", "saved", "last line")
RIGHT_ALIGNED = {"step", "loss", "left", "saved", "last line"}
# a stage whose log is older counts as dead: ten times the time between two lines of progress
STALE_S = 300.0


def status(*, runs: list[str], results: Path) -> None:
    """Print the table of `runs`, or of all runs under `results`."""
    stages = []
    workflow = results.resolve().parent
    if (workflow / ".snakemake").is_dir() and shutil.which("squeue") is not None:
        with suppress(CommandError):
            stages = stage_lines(stage_jobs(workflow))
    stages += running_stages(workflow / "logs")
    folders = {name: train_folder(results, name) for name in runs or run_names(results)}
    if not folders:
        print("\n".join([f"{results / 'runs'}: no run yet", *stages]))
        return
    queued, problem = query(folders.values())
    notes = [problem]
    rows = []
    for name, train in folders.items():
        try:
            cells, note = row(name, train, queued)
        except Exception as error:  # one damaged run hides no other
            cells = [name, "?", *"-" * (len(HEAD) - 2)]
            if isinstance(error, OSError):
                note = f"{name}: {error.filename}: {error.strerror}"
            elif isinstance(error, UserError):
                note = f"{name}: {error}"
            else:
                note = f"{name}: unexpected content in a file of {train} ({in_one_line(error)})"
        rows.append(cells)
        notes.append(note)
    for node in BadNodes(results).all():
        notes.append(f"excluded from new jobs: {node.text}")
    print(table(rows), *filter(None, notes), *stages, sep="\n")


def running_stages(logs: Path) -> list[str]:
    """The line on progress at the end of each stage's log, unless the log is old."""
    lines = []
    for path in sorted(logs.glob("*/*.log")):
        with suppress(OSError), open(path, "rb") as file:
            age_s = age(path)
            if age_s >= STALE_S:
                continue
            file.seek(-min(TAIL_BYTES, file.seek(0, 2)), 2)
            *_, last = ["", *file.read().decode(errors="replace").splitlines()]
            if PROGRESS.fullmatch(last):
                lines.append(f"{last} ({span(age_s)} ago)")
    return lines


def query(trains: Iterable[Path]) -> tuple[list[QueuedJob] | None, str]:
    """Jobs that squeue lists if any run's job may be alive; None without an answer, and the reason."""
    may_be_alive = False
    for train in trains:
        with suppress(UserError, OSError):  # reported in its own row
            may_be_alive = may_be_alive or Jobs(train).may_be_alive()
    if not may_be_alive:
        return None, ""
    if shutil.which("squeue") is None:
        return None, "squeue is not on PATH: jobs are shown as last recorded"
    try:
        return Queue(POLL_S).named(lambda name: True), ""
    except CommandError as error:
        return None, f"no usable answer from squeue ({error}): jobs are shown as last recorded"


def row(name: str, train: Path, queued: list[QueuedJob] | None) -> tuple[list[str], str]:
    """Cells of a run in the table, and a line on what its job waits for.

    Empty if it only has to wait.
    """
    run = RunState(train, queued)
    job = run.job_state
    curve = read_lines(train / "metrics.jsonl", TAIL_BYTES)
    progress = progress_of(train)
    step = max([line["step"] for line in curve], default=progress.get("step"))
    steps = progress.get("steps")
    plan = train.parent / "plan.json"
    if not steps and plan.exists():
        steps = read_json(plan).get("steps")
    loss = newest("loss", curve).get("loss", progress.get("train_loss"))
    left_s = newest("left_s", curve).get("left_s") if run.name == "running" else None
    cells = [
        name,
        run.name,
        "-" if step is None else f"{step}/{steps or '-'}",
        "-" if loss is None else f"{loss:.4g}",
        run.job_id or "-",
        job.text if job else "-",
        "-" if left_s is None else span(left_s),
        str(run.folder.saved_step() or "-"),
        f"{span(age(train / 'metrics.jsonl'))} ago" if curve else "-",
    ]
    if (job is None or not job.alive) and run.lost_job:
        return cells, f"{name}: {how_to_end(train, run.lost_job)}"
    if job is None or run.newest is None or run.newest.job_id != run.job_id:
        return cells, ""
    why = run.why or explained(job, **run.newest.request)
    return cells, "" if why == job.text else f"{name}: job {run.job_id}: {why}"


def age(path: Path) -> float:
    """Seconds since a file was written; 0 if it is gone, or from a clock that is ahead."""
    with suppress(OSError):
        return max(0.0, time.time() - path.stat().st_mtime)
    return 0.0


def newest(key: str, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The last line of a curve that has `key`; empty if none has."""
    return next((line for line in reversed(lines) if key in line), {})


def table(rows: list[list[str]]) -> str:
    """Columns separated by two spaces; numbers right-aligned."""
    columns = []
    for texts in zip(HEAD, *rows):
        align = ">" if texts[0] in RIGHT_ALIGNED else "<"
        width = max(map(len, texts))
        columns.append([f"{text:{align}{width}}" for text in texts])
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns))
