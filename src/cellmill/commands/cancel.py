"""cancel: ends a run wherever it runs, and waits until it has ended with its state saved."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from cellmill.commands.results import living_jobs, train_folder
from cellmill.errors import UserError
from cellmill.launch.follow import cancel_job, save_job
from cellmill.launch.queue import Queue, QueuedJob
from cellmill.runs.folder import TrainFolder
from cellmill.runs.job_states import JobState
from cellmill.runs.jobs import CANCELLED, JobRecord, Jobs
from cellmill.runs.lock import Holder, holder_of

LAUNCHER_S = 15  # how long a launcher may take to notice that its job was cancelled, and to end
SAVE_S = 600  # how long a training on this machine may take to save
TICK_S = 0.2


def run(*, run: str, results: Path) -> None:
    """Cancel the job of `run`, or end its training on this machine. Raises UserError if it cannot."""
    train = train_folder(results, run)
    holder = holder_of(train)
    if holder is None or holder.follows:  # otherwise no job of this run is alive
        ended, holder = _cancel_jobs(train), holder_of(train)
    else:
        ended = []
    if holder is not None and not ended:  # a training here, or a launcher that is about to submit
        ended = [_end_process(train, holder)]
    if not ended:
        print(f"{run}: no job is queued or running, and no training runs on this machine")
        return
    print(f"{' and '.join(ended)}; saved at step {TrainFolder(train).saved_step()}; train goes on from there")


def _cancel_jobs(train: Path) -> list[str]:
    """Cancel the run's jobs; return a line for each."""
    done, jobs = list[str](), Jobs(train)
    while living := living_jobs(train, Queue(1.0)):  # its launcher may just have submitted the next one
        for job in living:
            print(f"cancelling job {job.job_id}", flush=True)
            if (folder := jobs.folder(job.name)) is not None:
                (folder / CANCELLED).touch()  # so that its launcher submits no other
            state = _save_and_cancel(job, jobs.record(job.job_id, job.name))
            # a launcher that still follows records the end itself
            record = jobs.record(job.job_id, job.name) if _is_released(train, LAUNCHER_S) else None
            if record is not None and record.ended_at is None:
                record.now(state.name, state.reason, ended=True)
            done.append(f"cancelled job {job.job_id}")
    return done


def _save_and_cancel(job: QueuedJob, record: JobRecord | None) -> JobState:
    with suppress(KeyboardInterrupt):
        save_job(job.job_id, job.name, SAVE_S if record is None else record.save_within_s)
    return cancel_job(job.job_id, job.name)


def _is_released(train: Path, within_s: float) -> bool:
    """Wait for the run's lock to be released; True if it is free."""
    deadline = time.monotonic() + within_s
    while holder_of(train) is not None:
        if time.monotonic() > deadline:
            return False
        time.sleep(TICK_S)
    return True


def _end_process(train: Path, holder: Holder) -> str:
    """Ask the lock's holder to save and end, and wait until it has; return a line about it."""
    if not holder.holds(train / "lock"):
        here = holder.host == os.uname().nodename
        remedy = "it has passed the lock on; end its processes" if here else f"run cellmill cancel on {holder.host}"
        raise UserError(f"{train}: trained by {holder.text}: {remedy}")
    print(f"asking {holder.text} to save and end", flush=True)
    try:
        os.kill(holder.pid, signal.SIGTERM)
    except ProcessLookupError:
        pass
    except PermissionError:
        raise UserError(f"{train}: trained by {holder.text}, which you may not signal") from None
    if not _is_released(train, SAVE_S):
        raise UserError(f"{holder.text} was asked to end {SAVE_S // 60} min ago and has not ended")
    return f"ended process {holder.pid}"
