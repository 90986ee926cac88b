"""status: a table of runs, and the stages that are running. Needs neither SLURM nor torch."""

import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from cellmill.commands.run_state import (
    POLL_S,
    RunState,
    find_newest,
    find_train_folder,
    list_runs,
    measure_age_s,
)
from cellmill.config.plugin import in_one_line
from cellmill.errors import UserError
from cellmill.files import PROGRESS, read_json, span
from cellmill.launch.bad_nodes import BadNodes
from cellmill.launch.follow import how_to_end
from cellmill.launch.queue import Queue, QueuedJob, explained
from cellmill.launch.stage_jobs import stage_jobs, stage_lines
from cellmill.runs.folder import TAIL_BYTES, read_lines, read_progress
from cellmill.runs.jobs import Jobs
from cellmill.runs.slurm import CommandError

COLUMNS = ("run", "state", "step", "loss", "job", "slurm", "left", "saved", "last line")
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
    stages += list_running_stages(workflow / "logs")
    folders = {name: find_train_folder(results, name) for name in runs or list_runs(results)}
    if not folders:
        print("\n".join([f"{results / 'runs'}: no run yet", *stages]))
        return
    queued, problem = ask_queue(folders.values())
    notes = [problem]
    rows = []
    for name, train in folders.items():
        try:
            cells, note = make_row(name, train, queued)
        except Exception as error:  # one damaged run hides no other
            cells = [name, "?", *"-" * (len(COLUMNS) - 2)]
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
    print(format_table(rows), *filter(None, notes), *stages, sep="\n")


def list_running_stages(logs: Path) -> list[str]:
    """List the last line of each stage's log that is about progress, unless the log is old."""
    lines = []
    for path in sorted(logs.glob("*/*.log")):
        with suppress(OSError), open(path, "rb") as file:
            age_s = measure_age_s(path)
            if age_s >= STALE_S:
                continue
            file.seek(-min(TAIL_BYTES, file.seek(0, 2)), 2)
            *_, last = ["", *file.read().decode(errors="replace").splitlines()]
            if PROGRESS.fullmatch(last):
                lines.append(f"{last} ({span(age_s)} ago)")
    return lines


def ask_queue(trains: Iterable[Path]) -> tuple[list[QueuedJob] | None, str]:
    """List the jobs in SLURM's queue, if the job of any run may be alive.

    Return None without an answer, and the reason; the reason is empty if no job may be alive.
    """
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


def make_row(name: str, train: Path, queued: list[QueuedJob] | None) -> tuple[list[str], str]:
    """Make the cells of a run in the table, and a note on why its job waits or failed.

    The note is empty if there is nothing to do.
    """
    run = RunState(train, queued)
    job = run.job_state
    curve = read_lines(train / "metrics.jsonl", TAIL_BYTES)
    progress = read_progress(train)
    step = max([line["step"] for line in curve], default=progress.get("step"))
    steps = progress.get("steps")
    plan = train.parent / "plan.json"
    if not steps and plan.exists():
        steps = read_json(plan).get("steps")
    loss = find_newest("loss", curve).get("loss", progress.get("train_loss"))
    left_s = find_newest("left_s", curve).get("left_s") if run.state == "running" else None
    cells = [
        name,
        run.state,
        "-" if step is None else f"{step}/{steps or '-'}",
        "-" if loss is None else f"{loss:.4g}",
        run.job_id or "-",
        job.text if job else "-",
        "-" if left_s is None else span(left_s),
        str(run.folder.saved_step() or "-"),
        f"{span(measure_age_s(train / 'metrics.jsonl'))} ago" if curve else "-",
    ]
    if (job is None or not job.alive) and run.lost_job:
        return cells, f"{name}: {how_to_end(train, run.lost_job)}"
    if job is None or run.newest is None or run.newest.job_id != run.job_id:
        return cells, ""
    why = run.failure or explained(job, **run.newest.request)
    return cells, "" if why == job.text else f"{name}: job {run.job_id}: {why}"


def format_table(rows: list[list[str]]) -> str:
    """Format rows under COLUMNS, two spaces apart, with numbers right-aligned."""
    columns = []
    for texts in zip(COLUMNS, *rows):
        align = ">" if texts[0] in RIGHT_ALIGNED else "<"
        width = max(map(len, texts))
        columns.append([f"{text:{align}{width}}" for text in texts])
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns))
