"""attach: follows the log of a run's job until it ends, beside a launcher that may follow it too.

Takes no lock and changes no file. Ctrl-C ends the following, never the job.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from cellmill.commands.results import living_jobs, train_folder, train_log
from cellmill.errors import Stopped, UserError
from cellmill.launch.follow import TICK_S, JobFollower, Tail, say, settle
from cellmill.launch.queue import Queue, QueuedJob
from cellmill.runs.folder import TrainFolder
from cellmill.runs.jobs import Jobs
from cellmill.runs.lock import Holder, holder_of
from cellmill.runs.metrics import TAIL_BYTES

SLOWEST_POLL_S = 10.0  # for a job that is followed for long
SETTLE_S = 10  # how long a shared folder may take to show what a node wrote


def run(*, run: str, results: Path) -> None:
    """Follow the job of `run`. Raises Stopped if it stopped with its state saved, UserError if it failed or if nothing
    is running."""
    train = train_folder(results, run)
    queue, holder = Queue(TICK_S), holder_of(train)
    if holder is not None and not holder.follows:  # then no job of this run is alive
        what, follow_it = "the training", partial(_follow_local, train, holder, train_log(results, run))
    elif (job := next(iter(living_jobs(train, queue)), None)) is not None:
        what, follow_it = f"job {job.job_id}", partial(_follow_job, train, job, queue)
    else:
        raise UserError(f"{run}: no job is queued or running, and no training runs on this machine")
    try:
        end_state = follow_it()
    except KeyboardInterrupt:
        print(f"\nno longer following; {what} goes on")
        return
    _report_end(train, what, end_state)


def follow(tail: Tail, alive: Callable[[], bool]) -> None:
    """Print what is appended to a log as long as `alive`, and what came with the end."""
    while alive():
        tail.read()
        time.sleep(TICK_S)
    tail.read()


def _last_lines(log: Path) -> Tail:
    """The log from its last lines on."""
    tail = Tail(log)
    if log.exists() and log.stat().st_size > TAIL_BYTES:
        with open(log, "rb") as file:
            file.seek(-TAIL_BYTES, 2)
            file.readline()  # incomplete
            tail.position = file.tell()
    return tail


def _follow_job(train: Path, job: QueuedJob, queue: Queue) -> str:
    """Follow a job to its end; return its final state."""
    jobs = Jobs(train)
    record = jobs.record(job.job_id, job.name)
    folder = record.path if record is not None else jobs.folder(job.name)
    if folder is None:
        raise UserError(f"job {job.job_id} has the name {job.name}, but its folder is missing: there is no log")
    log = folder / f"{job.job_id}_0_log.out"
    say(f"following job {job.job_id}, its log: {log}; Ctrl-C ends only the following")
    follower = JobFollower(job.job_id, job.name, queue, _last_lines(log), slowest_poll_s=SLOWEST_POLL_S)
    follow(follower.tail, follower.alive)
    return follower.state.name


def _follow_local(train: Path, holder: Holder, log: Path) -> str:
    if not log.exists():
        raise UserError(f"trained by {holder.text}, which prints where it was started: {log} does not exist")
    say(f"following {holder.text}, its log: {log}; Ctrl-C ends only the following")
    follow(_last_lines(log), lambda: holder_of(train) is not None)
    return ""


def _report_end(train: Path, what: str, end_state: str) -> None:
    """Print how the training ended. Raises Stopped or UserError if the run is not done."""
    ended = f"{what} ended{f' with {end_state}' if end_state else ''}"
    folder = TrainFolder(train)
    newest = Jobs(train).newest()
    error = newest.error if end_state and newest is not None else None
    if end_state == "COMPLETED" and not error:
        settle(lambda: folder.state() in ("done", "stopped"), train, SETTLE_S, time.sleep)
    if folder.state() == "done":
        print(f"{ended}: the training is done")
        return
    saved = folder.saved_step()
    if error:
        raise UserError(f"{ended}: {error}")
    if folder.state() == "stopped" or end_state in ("", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL"):
        raise Stopped(f"{ended}; saved at step {saved}")
    raise UserError(f"{ended}; saved at step {saved}; `cellmill logs {train.parent.name}` shows its output")
