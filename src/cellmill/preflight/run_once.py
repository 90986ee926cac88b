"""One job that is run once: submitted or started, followed to its end, never chained.

The job does its work in its own folder; the caller judges the result. Under slurm the job is cancelled if it waits too
long, on Ctrl-C, and if srun could not launch one of its tasks, since the others would wait for that one until the time
limit. A job left over from a killed process is cancelled first.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cellmill.config.machine import Machine
from cellmill.errors import UserError
from cellmill.launch.allocation import run_allocation
from cellmill.launch.follow import TICK_S, JobFollower, Tail, cancel_job, say
from cellmill.launch.job import Job
from cellmill.launch.local import run_local
from cellmill.launch.queue import Queue
from cellmill.launch.signals import Interrupted, Requests, requests
from cellmill.launch.slurm_jobs import SlurmJobs
from cellmill.runs.jobs import JobRecord, Jobs, error_line

PATIENCE_S = 120  # how long to wait for a controller that gives no answer: no training depends on it
POLL_S = 5.0


class StillQueued(UserError):
    """The job did not start in time, and was cancelled."""


@dataclass(frozen=True)
class End:
    path: Path
    """Its folder."""
    state: str
    """SLURM's word; COMPLETED or FAILED without SLURM, LAUNCH_FAILED if srun could not launch a task."""
    job_id: str = ""
    nodes: str = ""
    """As SLURM writes them, such as node[1-2]."""
    queued_s: float = 0.0
    log: Path | None = None
    lost: tuple[str, str] | None = None
    """Tasks that srun could not launch (`1`, `0-3`, or the name of a node), and its reason."""

    @property
    def error(self) -> str | None:
        """The line a process left about what went wrong."""
        return error_line(self.path)


def run_once(job: Callable[[Path], Job], machine: Machine, folder: Path, keep_open: int, wait_s: float) -> End:
    """Run the job that `job` returns for a folder under `folder`/jobs, by the machine's launcher.

    Raises UserError if SLURM refuses the job or gives no answer, StillQueued if it waits for more than `wait_s`,
    KeyboardInterrupt if a signal ended it. The caller holds a lock, whose descriptor is `keep_open`.
    """
    try:
        if machine.launcher == "slurm":
            with requests() as asked:
                return _submit_and_follow(job, machine, folder, wait_s, asked)
        if machine.launcher == "allocation":
            code, error = run_allocation(job, machine, folder, keep_open)
            return End(error.parent, "COMPLETED" if code == 0 else "FAILED")
        path, _ = Jobs(folder).new()
        code = run_local(job(path), keep_open)
    except Interrupted:
        raise KeyboardInterrupt from None
    return End(path, "COMPLETED" if code == 0 else "FAILED")


def _submit_and_follow(
    job: Callable[[Path], Job], machine: Machine, folder: Path, wait_s: float, asked: Requests
) -> End:
    queue = Queue(min(machine.poll_s, POLL_S))
    slurm = SlurmJobs(Jobs(folder), queue, machine, asked, PATIENCE_S)
    for left in slurm.alive():
        say(f"cancelling job {left.job_id}, left by an earlier process")
        cancel_job(left.job_id, left.name)
    record = slurm.submit(job)
    follower = JobFollower(record.job_id, record.name, queue, Tail(record.log, echo=False), record, PATIENCE_S)
    return _follow(follower, record, wait_s, asked)


def _follow(follower: JobFollower, record: JobRecord, wait_s: float, asked: Requests) -> End:
    submitted = time.monotonic()
    waiting_since: float | None = submitted
    queued_s = 0.0
    lost: tuple[str, str] | None = None
    while follower.alive():
        now, state = time.monotonic(), follower.state
        if asked.asked:
            say(f"cancelling job {record.job_id}")
            follower.cancel()
            raise KeyboardInterrupt
        if state.name in ("RUNNING", "COMPLETING"):
            queued_s, waiting_since = queued_s or now - submitted, None
        elif state.name:
            waiting_since = waiting_since or now  # a preempted job waits again
            if now - waiting_since > wait_s:
                follower.cancel()
                waited = f"after {wait_s / 60:g} min in the queue"
                raise StillQueued(f"job {record.job_id} was still {state.text} {waited} and was cancelled")
        if state.name == "RUNNING" and (launch := follower.tail.not_launched) is not None:
            lost = launch[1] or launch[2], launch[3].strip()
            follower.cancel()
            break
        asked.wait(min(TICK_S, POLL_S, follower.queue.poll_s))
    ended = "LAUNCH_FAILED" if lost is not None else follower.state.name
    return End(record.path, ended, record.job_id, follower.nodes, queued_s, record.log, lost)
