"""Runs under a results folder: their names, files and states, by their files and SLURM.

A run is `running` if SLURM runs it or its lock is held; if only its files say so, it was killed.
Nothing here needs torch, or changes a file.
"""

import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from cellmill.config.load import read_yaml, with_sweeps
from cellmill.errors import UserError, did_you_mean
from cellmill.launch.follow import lost_start
from cellmill.launch.queue import Queue, QueuedJob, living_jobs
from cellmill.runs.cost import read_local
from cellmill.runs.folder import TrainFolder
from cellmill.runs.jobs import Jobs
from cellmill.runs.lock import find_holder
from cellmill.runs.slurm import NOT_LISTED, RESUMABLE, UNKNOWN, WAITING, CommandError, JobState

POLL_S = 1.0
# on this machine, without a chance to save: it resumes from its last checkpoint
KILLED = "stopped (killed)"


def list_runs(results: Path) -> list[str]:
    """List the runs under `results`. Raise UserError if it is not the results folder of a workflow."""
    folder = results / "runs"
    if folder.is_dir():
        runs = (path for path in folder.iterdir() if path.is_dir())
        return sorted(path.name for path in runs if not path.name.startswith("."))
    workflow_files = ("Snakefile", "workflow", ".snakemake")
    if results.is_dir() or any((results.parent / name).exists() for name in workflow_files):
        return []
    raise UserError(f"{folder}: no such folder; set --results to the results folder of a workflow")


def find_train_folder(results: Path, run: str, may_begin: bool = False) -> Path:
    """Find the training folder of a run. Raise UserError naming the runs that exist if it does not.

    With `may_begin`, the run may only be in the configuration; before the first run, it may have any
    name.
    """
    runs = list_runs(results)
    where = f"{results / 'runs'}"
    config = results.parent / "config" / "config.yaml"
    if may_begin and config.exists() and run not in runs:
        configured = (with_sweeps(read_yaml(config)) or {}).get("runs") or ()
        runs = [*dict.fromkeys([*runs, *configured])]
        where += f" or {config}"
    problem = ""
    if "/" in run or "\\" in run:
        problem = "expected the name of a run, got a path"
    elif run not in runs and (runs or not may_begin):
        problem = "no such run"
    if problem:
        hint = did_you_mean(run, runs) if runs else "no run yet"
        raise UserError(f"{run!r}: {problem} in {where}; {hint}")
    return results / "runs" / run / "train"


def find_train_log(results: Path, run: str) -> Path:
    """Return the file in which the workflow keeps the output of `train`."""
    return results.parent / "logs" / "train" / f"{run}.log"


def find_living_jobs(train: Path, queue: Queue) -> list[QueuedJob]:
    """Find the jobs of a run in SLURM's queue, recorded or not. Raise UserError without an answer."""
    jobs = Jobs(train)
    if not jobs.path.is_dir() or (shutil.which("squeue") is None and not jobs.may_be_alive()):
        return []
    try:
        return living_jobs(jobs, queue)
    except CommandError as error:
        raise UserError(f"no usable answer from squeue ({error}); try again") from None


class RunState:
    """A run by its files, its lock and SLURM's queue."""

    def __init__(self, train: Path, queued: Sequence[QueuedJob] | None = None) -> None:
        """Read the run in folder `train`. `queued` are the jobs in the queue, None if unknown."""
        self.train = train
        self.folder = TrainFolder(train)
        self.holder = find_holder(train)
        self.trains_here = self.holder is not None and not self.holder.follows
        self.jobs = Jobs(train)
        self.newest = self.jobs.newest()
        self.job_id = "" if self.newest is None else self.newest.job_id
        self.job_state = self._find_job_state(queued)

    def _find_job_state(self, queued: Sequence[QueuedJob] | None) -> JobState | None:
        """Find the state of the newest job: by SLURM if it answers, else the last on record."""
        for job in queued or ():
            if self.jobs.owns(job.name):
                self.job_id = job.job_id
                return job.state
        record = self.newest
        if record is None:
            return None
        recorded = JobState(record.state, record.reason)
        if record.ended_at is not None or queued is None:
            return recorded
        for job in queued:
            # another name: an allocation, which outlives the training in it
            if not record.cluster and job.job_id == record.job_id:
                if self.holder is not None:
                    return job.state
                return JobState(NOT_LISTED, "the allocation goes on")
        # it ended while nobody followed it
        state = Queue(POLL_S, record.cluster).state(record)
        return recorded if state.name == UNKNOWN else state

    @cached_property
    def lost_job(self) -> str:
        """Id of a job that still trains although SLURM has lost it; otherwise empty."""
        return lost_start(self.train)

    @property
    def failure(self) -> str:
        """Reason why the newest job failed; empty unless the run has failed."""
        if self.newest is None or self.state != "failed":
            return ""
        return self.newest.error or ""

    @cached_property
    def state(self) -> str:
        """State of the run: not begun, queued, running, stopped, KILLED, done or failed."""
        recorded = self.folder.state()
        job = self.job_state
        if recorded == "done" or (self.train / "status.json").exists():
            return "done"
        if self.trains_here:
            return "running"
        if job is not None and job.alive:
            return "queued" if job.name in WAITING else "running"
        if self.lost_job:
            return "running"
        if self.holder is not None:
            return "queued"  # its launcher is about to submit the next job
        newest = self.newest
        local = read_local(self.train)
        if local and (newest is None or local[-1]["started_at"] > newest.submitted_at):
            ends = {"FAILED": "failed", None: KILLED, "KILLED": KILLED}
            return ends.get(local[-1]["how"], "stopped")
        if newest is not None:
            has_failed = newest.error or (job is not None and job.name not in RESUMABLE)
            return "failed" if has_failed else "stopped"
        if recorded == "running":
            return KILLED
        has_begun = (self.train / "state.json").exists() or self.folder.saved_step()
        return "stopped" if has_begun else "not begun"


def print_reason(train: Path) -> None:
    """Print why a run has failed, if it has."""
    failure = RunState(train).failure
    if failure:
        print(failure)


def measure_age_s(path: Path) -> float:
    """Return the seconds since a file was written; 0 if it is gone, or written by a clock ahead."""
    with suppress(OSError):
        return max(0.0, time.time() - path.stat().st_mtime)
    return 0.0


def find_newest(key: str, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the last line of a curve that has `key`; an empty one if none has."""
    return next((line for line in reversed(lines) if key in line), {})


@contextmanager
def until_interrupted() -> Iterator[None]:
    """End the block without an error at Ctrl-C, or if the reader of a pipe closes it."""
    try:
        yield
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
