"""One job that is run once and then over: submitted or started, followed to its end, never chained.

What is asked of it must lie in its own folder; what it is worth is for the caller to judge. Under slurm a job that
waits too long, or that Ctrl-C no longer wants, is cancelled, and so is one that a killed process has left behind, or
one of whose tasks srun could not launch: the others would wait for it until their time limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cellmill.config.machine import Machine
from cellmill.errors import Stopped, UserError
from cellmill.launch.allocation import run_allocation
from cellmill.launch.cancel_job import cancel_job
from cellmill.launch.job import Job
from cellmill.launch.local import run_local
from cellmill.launch.queue import Queue, QueueError
from cellmill.launch.signals import Signals, blocked
from cellmill.launch.submit import Unreachable, submit
from cellmill.launch.tail import NOT_LAUNCHED
from cellmill.runs.job_states import GONE, UNKNOWN
from cellmill.runs.jobs import JobRecord, Jobs

PATIENCE_S = 120  # how long a controller that gives no answer is waited for: nobody's training hangs on it
TICK_S = 1.0


class StillQueued(UserError):
    """The job did not start in the time it was given, and was cancelled."""


@dataclass(frozen=True)
class End:
    """How a job ended."""

    path: Path
    """Its folder."""
    state: str
    """SLURM's word; COMPLETED or FAILED where SLURM was not asked, LAUNCH_FAILED when srun could not launch a task."""
    job_id: str = ""
    nodes: str = ""
    """As SLURM writes them, such as node[1-2]."""
    queued_s: float = 0.0
    log: Path | None = None
    lost: tuple[str, str] | None = None
    """Tasks that srun could not launch (`1`, `0-3`, or the name of a node), and its words."""

    @property
    def error(self) -> str | None:
        """The line a process left about what went wrong."""
        file = self.path / "error.txt"
        return " ".join(file.read_text(encoding="utf-8", errors="replace").split()) if file.exists() else None


def run_once(job: Callable[[Path], Job], machine: Machine, folder: Path, keep_open: int, wait_s: float) -> End:
    """Runs the job that `job` gives for its folder under `folder`/jobs, by the machine's launcher.

    Raises UserError when SLURM refuses the job or gives no answer, StillQueued when it waits for longer than `wait_s`,
    KeyboardInterrupt when a signal ended it. One process at a time: the caller holds a lock, whose descriptor is
    `keep_open`.
    """
    if machine.launcher == "slurm":
        with Signals() as signals:
            return _Submission(machine, folder, signals).run(job, wait_s)
    if machine.launcher == "allocation":
        code, error = run_allocation(job, machine, folder, keep_open)
        return End(error.parent, "COMPLETED" if code == 0 else "FAILED")
    path, _ = Jobs(folder).new()
    try:
        code = run_local(job(path), keep_open)
    except Stopped:
        raise KeyboardInterrupt from None
    return End(path, "COMPLETED" if code == 0 else "FAILED")


class _Submission:
    """One job under SLURM."""

    def __init__(self, machine: Machine, folder: Path, signals: Signals) -> None:
        self.machine, self.signals = machine, signals
        self.jobs, self.queue = Jobs(folder), Queue(min(machine.poll_s, 5.0))

    def run(self, job: Callable[[Path], Job], wait_s: float) -> End:
        for line in self._named(f"{self.jobs.name}."):
            print(f"cancelling job {line}, left by an earlier process", flush=True)
            self._cancel(line)
        path, name = self.jobs.new()
        record = self._submit(job, path, name)
        print(f"submitted job {record.job_id}; its log: {record.log}", flush=True)
        return self._follow(record, wait_s)

    def _named(self, prefix: str) -> list[str]:
        """Numbers of the living jobs of this name. Raises UserError when the queue gives no answer."""
        give_up = time.monotonic() + PATIENCE_S
        while True:
            try:
                return [line.job_id for line in self.queue.named(prefix)]
            except QueueError as error:
                if time.monotonic() > give_up:
                    raise UserError(f"no usable answer from the queue within {PATIENCE_S} s ({error})") from None
            self.signals.wait(TICK_S)
            if self.signals.asked:
                raise KeyboardInterrupt

    def _submit(self, job: Callable[[Path], Job], path: Path, name: str) -> JobRecord:
        """Submits the job and records it; an answer that was lost is looked up by the job's name."""
        machine, give_up = self.machine, time.monotonic() + PATIENCE_S
        what = job(path)
        job_id = ""
        while not job_id:
            try:
                with blocked():  # a submission is made and recorded, or not made
                    job_id = submit(what, machine, path, name)
            except Unreachable as error:
                if time.monotonic() > give_up:
                    raise UserError(f"sbatch could not reach SLURM within {PATIENCE_S} s: {error}") from None
                self.signals.wait(TICK_S)
                job_id = next(iter(self._named(name)), "")
                if self.signals.asked and not job_id:
                    raise KeyboardInterrupt from None
        return JobRecord(
            path=path,
            job_id=job_id,
            name=name,
            submitted_at=time.time(),
            nodes=machine.nodes,
            nproc_per_node=machine.nproc_per_node,
            gpus_per_node=machine.gpus,
            cpus_per_node=machine.cpus,
            slurm_partition=machine.slurm_partition,
            runtime=machine.runtime,
        ).write()

    def _follow(self, record: JobRecord, wait_s: float) -> End:
        submitted = time.monotonic()
        waiting: float | None = submitted
        silent: float | None = None
        queued_s, gone, nodes = 0.0, 0, ""
        while True:
            state, now = self.queue.state(record.job_id), time.monotonic()
            if self.signals.asked:
                print(f"cancelling job {record.job_id}", flush=True)
                self._cancel(record.job_id, record)
                raise KeyboardInterrupt
            if state.name == UNKNOWN:
                silent = silent or now
                if now - silent > PATIENCE_S:
                    raise UserError(
                        f"no usable answer from the queue for {PATIENCE_S} s ({self.queue.trouble}); job "
                        f"{record.job_id} may still run, `scancel {record.job_id}` ends it"
                    )
                self.signals.wait(TICK_S)
                continue
            silent, nodes = None, state.nodes or nodes
            gone = gone + 1 if state.name == GONE else 0
            if (state.name, state.reason) != (record.state, record.reason) and state.name != GONE:
                record = record.now(state.name, state.reason)
                why = f" ({state.reason})" if state.reason and state.name == "PENDING" else ""
                where = f" on {state.nodes}" if state.nodes and state.name == "RUNNING" else ""
                print(f"job {record.job_id}: {state.name}{why}{where}", flush=True)
            if state.name in ("RUNNING", "COMPLETING") and waiting is not None:
                queued_s, waiting = queued_s or now - submitted, None
            if not state.alive and gone != 1:  # GONE is asked twice: a controller may just be starting
                record.now(state.name, state.reason, ended=True)
                return End(record.path, state.name, record.job_id, nodes, queued_s, record.log)
            if state.name == "RUNNING" and (lost := _lost_tasks(record.log)) is not None:
                self._cancel(record.job_id, record)
                return End(record.path, "LAUNCH_FAILED", record.job_id, nodes, queued_s, record.log, lost)
            if state.name not in ("RUNNING", "COMPLETING", GONE):
                waiting = waiting or now  # a job that was preempted waits again
                if now - waiting > wait_s:
                    self._cancel(record.job_id, record)
                    why = f" ({state.reason})" if state.reason else ""
                    raise StillQueued(
                        f"job {record.job_id} was still {state.name}{why} after {wait_s / 60:g} min in the queue and "
                        "is cancelled"
                    )
            self.signals.wait(min(TICK_S, self.machine.poll_s))

    def _cancel(self, job_id: str, record: JobRecord | None = None) -> None:
        """Cancels a job and waits until it is over. Raises UserError when it does not end."""
        state = cancel_job(job_id)
        if record is not None:
            record.now(state.name, state.reason, ended=True)


def _lost_tasks(log: Path) -> tuple[str, str] | None:
    """What srun says, in the log of task 0, of tasks that it could not launch."""
    try:
        with open(log, encoding="utf-8", errors="replace") as file:
            match = NOT_LAUNCHED.search(file.read(1 << 16))
    except OSError:  # not there yet
        return None
    return None if match is None else (match[1] or match[2], match[3].strip())
