"""The results folder: runs by name, their training folders, logs and jobs. Changes no file."""

import shutil
from pathlib import Path

from cellmill.errors import UserError, did_you_mean
from cellmill.launch.queue import Queue, QueuedJob
from cellmill.runs.jobs import Jobs
from cellmill.runs.slurm_command import CommandError


def run_names(results: Path) -> list[str]:
    """Every run under `results`. Raises UserError if it is not the results folder of a workflow."""
    folder = results / "runs"
    if not folder.is_dir():
        if results.is_dir() or any(
            (results.parent / name).exists() for name in ("Snakefile", "workflow", ".snakemake")
        ):
            return []
        raise UserError(f"{folder}: no such folder; set --results to the results folder of a workflow")
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def train_folder(results: Path, run: str) -> Path:
    """The training folder of a run. Raises UserError naming the runs that exist."""
    runs = run_names(results)
    if run not in runs:
        problem = "expected the name of a run, got a path" if "/" in run or "\\" in run else "no such run"
        hint = did_you_mean(run, runs) if runs else "no run yet"
        raise UserError(f"{run!r}: {problem} in {results / 'runs'}; {hint}")
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
