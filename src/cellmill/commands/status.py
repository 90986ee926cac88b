"""Commands that show runs: status once, watch live. Both need neither SLURM nor torch, and change
no file.

A run is `running` if SLURM runs it or its lock is held; if only its files say so, it was killed. On
a terminal `watch` redraws a block of lines; into a pipe or file it prints a line per update that
brings something new. It waits for a run that has not begun, and shows one that has ended once.
"""

import math
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from cellmill.config.load import read_yaml, with_sweeps
from cellmill.config.plugin import in_one_line
from cellmill.errors import UserError, did_you_mean
from cellmill.files import PROGRESS, read_json, span
from cellmill.launch.follow import how_to_end, lost_start
from cellmill.launch.queue import Queue, QueuedJob, explained, stage_jobs, stage_lines
from cellmill.runs.cost import read_local
from cellmill.runs.folder import TAIL_BYTES, TrainFolder, progress_of, read_lines
from cellmill.runs.jobs import Jobs
from cellmill.runs.lock import Holder, holder_of
from cellmill.runs.slurm import NOT_LISTED, RESUMABLE, UNKNOWN, WAITING, CommandError, JobState
from cellmill.track.follow import CurveTail, kind_of

HEAD = ("run", "state", "step", "loss", "job", "slurm", "left", "saved", "last line")
RIGHT_ALIGNED = {"step", "loss", "left", "saved", "last line"}
POLL_S = 1.0
# age of a log whose stage is taken for dead: ten times that between two lines of progress
STALE_S = 300.0
# on this machine, without a chance to save: it resumes from its last checkpoint
KILLED = "stopped (killed)"
BARS = "▁▂▃▄▅▆▇█"


def run_names(results: Path) -> list[str]:
    """Every run under `results`. Raises UserError if it is not the results folder of a workflow."""
    folder = results / "runs"
    if folder.is_dir():
        return sorted(
            path.name
            for path in folder.iterdir()
            if path.is_dir() and not path.name.startswith(".")
        )
    if results.is_dir() or any(
        (results.parent / name).exists() for name in ("Snakefile", "workflow", ".snakemake")
    ):
        return []
    raise UserError(f"{folder}: no such folder; set --results to the results folder of a workflow")


def train_folder(results: Path, run: str, may_begin: bool = False) -> Path:
    """The training folder of a run. Raises UserError naming the runs that exist, if `may_begin`
    also those of the configuration; before the first run any name may begin.
    """
    runs = run_names(results)
    where = f"{results / 'runs'}"
    config = results.parent / "config" / "config.yaml"
    if may_begin and config.exists() and run not in runs:
        runs += (with_sweeps(read_yaml(config)) or {}).get("runs") or ()
        where += f" or {config}"
    is_path = "/" in run or "\\" in run
    if is_path or (run not in runs and (runs or not may_begin)):
        problem = "expected the name of a run, got a path" if is_path else "no such run"
        raise UserError(
            f"{run!r}: {problem} in {where}; {did_you_mean(run, runs) if runs else 'no run yet'}"
        )
    return results / "runs" / run / "train"


def train_log(results: Path, run: str) -> Path:
    """The file in which the workflow keeps the output of `train`."""
    return results.parent / "logs" / "train" / f"{run}.log"


def living_jobs(train: Path, queue: Queue) -> list[QueuedJob]:
    """Jobs of a run that SLURM has, recorded or not. Raises UserError without an answer."""
    jobs = Jobs(train)
    if not jobs.path.is_dir() or (shutil.which("squeue") is None and not jobs.may_be_alive()):
        return []
    try:
        return queue.named(jobs.owns)
    except CommandError as error:
        raise UserError(f"no usable answer from squeue ({error}); try again") from None


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
    queued, trouble = query(folders.values())
    notes = [trouble] if trouble else []
    rows = []
    for name, train in folders.items():
        try:
            cells, waits = row(name, train, queued)
            rows.append(cells)
            notes += [waits] if waits else []
        except Exception as error:  # one damaged run hides no other
            rows.append([name, "?", *"-" * (len(HEAD) - 2)])
            line = str(error)
            if isinstance(error, OSError):
                line = f"{error.filename}: {error.strerror}"
            elif not isinstance(error, UserError):
                line = f"unexpected content in a file of {train} ({in_one_line(error)})"
            notes.append(f"{name}: {line}")
    print(table(rows), *notes, *stages, sep="\n")


def running_stages(logs: Path) -> list[str]:
    """The last line of each stage's log that says how far it is, unless it is older than stages
    write them.
    """
    lines = []
    for path in sorted(logs.glob("*/*.log")):
        with suppress(OSError), open(path, "rb") as file:
            age_s = age(path)
            if age_s < STALE_S:
                file.seek(-min(TAIL_BYTES, file.seek(0, 2)), 2)
                *_, last = ["", *file.read().decode(errors="replace").splitlines()]
                lines += [f"{last} ({span(age_s)} ago)"] if PROGRESS.fullmatch(last) else []
    return lines


def query(trains: Iterable[Path]) -> tuple[list[QueuedJob] | None, str]:
    """Jobs that squeue lists, if a run has one that may be alive; None without an answer, and the
    reason.
    """
    alive = False
    for train in trains:
        with suppress(UserError, OSError):  # reported in its own row
            alive = alive or Jobs(train).may_be_alive()
    if not alive:
        return None, ""
    if shutil.which("squeue") is None:
        return None, "squeue is not on PATH: jobs are shown as last recorded"
    try:
        return Queue(POLL_S).named(lambda name: True), ""
    except CommandError as error:
        return None, f"no usable answer from squeue ({error}): jobs are shown as last recorded"


def row(name: str, train: Path, queued: list[QueuedJob] | None) -> tuple[list[str], str]:
    """Cells of a run in the table, and a line that says what its job waits for; empty if it only
    has to wait.
    """
    holder = holder_of(train)
    folder = TrainFolder(train)
    job_id, slurm = job_of(train, queued, holder is not None)
    state = state_of(train, slurm, holder)
    curve = read_lines(train / "metrics.jsonl", TAIL_BYTES)
    progress = progress_of(train)
    step = max([line["step"] for line in curve], default=progress.get("step"))
    plan = train.parent / "plan.json"
    steps = progress.get("steps") or (read_json(plan).get("steps") if plan.exists() else None)
    loss = newest("loss", curve).get("loss", progress.get("train_loss"))
    left = newest("left_s", curve).get("left_s") if state == "running" else None
    cells = [
        name,
        state,
        "-" if step is None else f"{step}/{steps or '-'}",
        "-" if loss is None else f"{loss:.4g}",
        job_id or "-",
        slurm.text if slurm else "-",
        "-" if left is None else span(left),
        str(folder.saved_step() or "-"),
        f"{span(age(train / 'metrics.jsonl'))} ago" if curve else "-",
    ]
    record = Jobs(train).newest()
    if (slurm is None or not slurm.alive) and (lost := lost_start(train)):
        return cells, f"{name}: {how_to_end(train, lost)}"
    if slurm is None or record is None or record.job_id != job_id:
        return cells, ""
    why = explained(slurm, **record.request)
    return cells, "" if why == slurm.text else f"{name}: job {job_id}: {why}"


def age(path: Path) -> float:
    """Seconds since a file was written; 0 if it is gone, or from a clock that is ahead."""
    with suppress(OSError):
        return max(0.0, time.time() - path.stat().st_mtime)
    return 0.0


def newest(key: str, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The last of the lines of a curve that has `key`; empty without one."""
    return next((line for line in reversed(lines) if key in line), {})


def job_of(train: Path, queued: list[QueuedJob] | None, held: bool) -> tuple[str, JobState | None]:
    """Id and state of the run's newest job: SLURM's if it gave one, else the last on record."""
    jobs = Jobs(train)
    for job in queued or ():
        if jobs.owns(job.name):
            return job.job_id, job.state
    record = jobs.newest()
    if record is None:
        return "", None
    recorded = JobState(record.state, record.reason)
    if record.ended_at is not None or queued is None:
        return record.job_id, recorded
    for job in queued:
        # of another name: an allocation, which outlives what is started in it
        if job.job_id == record.job_id:
            return job.job_id, job.state if held else JobState(NOT_LISTED, "the allocation goes on")
    state = Queue(POLL_S).state(record.job_id, record.name)  # ended while nobody followed it
    return record.job_id, recorded if state.name == UNKNOWN else state


def state_of(train: Path, slurm: JobState | None, holder: Holder | None) -> str:
    """not begun, queued, running, stopped, stopped (killed), done or failed."""
    if (train / "status.json").exists() or TrainFolder(train).state() == "done":
        return "done"
    if holder is not None and not holder.follows:
        return "running"
    if slurm is not None and slurm.alive:
        return "queued" if slurm.name in WAITING else "running"
    if lost_start(train):
        return "running"
    if holder is not None:
        return "queued"  # its launcher is about to submit the next job
    record = Jobs(train).newest()
    local = read_local(train)
    if local and (record is None or local[-1]["started_at"] > record.submitted_at):
        return {"FAILED": "failed", None: KILLED, "KILLED": KILLED}.get(local[-1]["how"], "stopped")
    if record is not None:
        failed = record.error is not None or (slurm is not None and slurm.name not in RESUMABLE)
        return "failed" if failed else "stopped"
    if TrainFolder(train).state() == "running":
        return KILLED
    return (
        "stopped"
        if (train / "state.json").exists() or TrainFolder(train).saved_step()
        else "not begun"
    )


def table(rows: list[list[str]]) -> str:
    """Columns separated by two spaces; numbers right-aligned."""
    columns = []
    for head, *texts in zip(HEAD, *rows):
        width = max(map(len, (head, *texts)))
        columns.append(
            [f"{text:{'>' if head in RIGHT_ALIGNED else '<'}{width}}" for text in (head, *texts)]
        )
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns))


def watch(*, run: str, results: Path, every_s: float) -> None:
    """Show `run` until it has ended. Raises UserError for an unknown run, and once its folder is
    deleted.
    """
    if not 0.1 <= every_s <= 3600:
        raise UserError(f"--every-s: expected seconds from 0.1 to 3600, got {every_s:g}")
    watched = WatchedRun(run, train_folder(results, run, may_begin=True))
    screen = Screen(sys.stdout)
    with until_interrupted():
        while True:
            state = watched.update()
            screen.show(watched.pieces(state), watched.losses())
            if state in ("done", "failed", "stopped", KILLED):
                return
            time.sleep(every_s)


@contextmanager
def until_interrupted() -> Iterator[None]:
    """Ctrl-C, or a reader such as `head` that closes the pipe, ends what is enclosed without an
    error.
    """
    try:
        yield
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class WatchedRun:
    """The curve and the state of a run as far as they are known."""

    def __init__(self, name: str, train: Path) -> None:
        self._name = name
        self._train = train
        self._seen = False
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
            self._lines = {
                key: line for key, line in self._lines.items() if key[0] <= lines[0]["step"]
            }
            self._lines |= {(line["step"], kind_of(line)): line for line in lines}
        holder = holder_of(self._train)
        self._steps = progress_of(self._train).get("steps", self._steps)
        return state_of(self._train, job_of(self._train, None, holder is not None)[1], holder)

    def losses(self) -> list[float]:
        """The training loss of each line."""
        return [line["loss"] for line in self._lines.values() if "loss" in line]

    def pieces(self, state: str) -> list[str]:
        """The view in short texts."""
        lines = list(self._lines.values())
        line = newest("loss", lines)
        shown = [f"{self._name}: {state}"]
        if lines:
            step = max(each["step"] for each in lines)
            shown.append(
                f"step {step}"
                + (f"/{self._steps} ({step / self._steps:.0%})" if self._steps else "")
            )
        for key, text in (
            ("loss", "loss {loss:.4g}"),
            ("lr", "lr {lr:.2e}"),
            ("val_loss", "validation {val_loss:.4g} at step {step}"),
            ("effective_rank", "effective rank {effective_rank:.1f}"),
        ):
            shown += [text.format(**found)] if (found := newest(key, lines)) else []
        shown += (
            ["{skipped_steps} steps skipped".format(**line)] if line.get("skipped_steps") else []
        )
        if state == "running" and line:
            age_s = age(self._train / "metrics.jsonl")
            shown += [f"{line['cells_per_s']:,.0f} cells/s"] if "cells_per_s" in line else []
            shown += (
                [f"waiting for data {line['data_wait_frac']:.0%}"]
                if "data_wait_frac" in line
                else []
            )
            shown += [f"MFU {line['mfu']:.1%}"] if "mfu" in line else []
            shown += [f"GPU {max(line['gpu_busy_frac']):.0%}"] if line.get("gpu_busy_frac") else []
            shown += [f"left {span(max(0.0, line['left_s'] - age_s))}"] if "left_s" in line else []
            shown.append(f"last line {span(age_s)} ago")
        return shown


class Screen:
    """A terminal on which a block of lines is drawn again, or a pipe that gets a line for each
    change.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._drawn = 0
        self._last = ""

    def show(self, pieces: list[str], losses: list[float]) -> None:
        if self._out.isatty():
            columns, _ = shutil.get_terminal_size()
            lines = [*wrapped(pieces, columns - 1), bars(losses, columns - 1)]
            back = f"\x1b[{self._drawn}A\x1b[J" if self._drawn else ""
            print(back + "\n".join(lines), file=self._out, flush=True)
            self._drawn = len(lines)
            return
        # the age of the last line is no news
        line = "  ".join(text for text in pieces if not text.startswith("last line "))
        if line != self._last:
            print(line, file=self._out, flush=True)
        self._last = line


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
    """The curve as one line of at most `columns` characters, each the mean of its part; low is
    good.
    """
    finite = [loss for loss in losses if math.isfinite(loss)]
    width = max(1, min(columns, len(finite)))
    parts = [
        finite[len(finite) * at // width : len(finite) * (at + 1) // width] for at in range(width)
    ]
    means = [sum(part) / len(part) for part in parts if part]
    lowest = min(means, default=0.0)
    highest = max(means, default=0.0)
    scale = (len(BARS) - 1) / (highest - lowest) if highest > lowest else 0.0
    return "".join(BARS[round((mean - lowest) * scale)] for mean in means)
