"""Trains through SLURM: submits a job of one torchrun agent per node, follows it, and chains the next one.

What SLURM and the run's own files say is all there is to go by, so the launcher may be killed at any time and a new
one goes on: it attaches to the job on record, or adopts one of its name that was submitted but not recorded, and never
submits while one lives. Jobs that end at their time limit, by preemption or with a node are followed by another from
the last checkpoint; an error ends the chain in one line. Trouble with the queue itself is waited out.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cellmill.config.machine import Machine
from cellmill.errors import Stopped, UserError
from cellmill.launch.cancel_job import cancel_job
from cellmill.launch.job import Job
from cellmill.launch.queue import Queue, QueueError
from cellmill.launch.signals import Signals, blocked
from cellmill.launch.submit import Unreachable, submit
from cellmill.launch.tail import Tail
from cellmill.runs.job_states import GONE, UNKNOWN
from cellmill.runs.jobs import JobRecord, Jobs

ANOTHER = frozenset({"TIMEOUT", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "REVOKED", "LAUNCH_FAILED", GONE})
"""Ends that are no fault of the training."""
FRUITLESS_JOBS = 3  # so many jobs in a row without a new checkpoint: something is wrong that a rerun does not mend
PATIENCE_S = 3600  # how long a queue that gives no answer is waited for
SETTLE_S = 60  # how long a shared folder may take to show what a node wrote
TICK_S = 1.0
_HINTS = {
    "PartitionTimeLimit": "runtime {runtime} min is more than the partition allows: lower it in the profile",
    "PartitionNodeLimit": "the partition has fewer nodes than {nodes}: lower nodes in the profile",
    "QOSMaxWallDurationPerJobLimit": "runtime {runtime} min is more than the QOS allows: lower it in the profile",
    "AssocMaxWallDurationPerJobLimit": "runtime {runtime} min is more than the account allows: lower it in the profile",
    "JobHeldUser": "held: `scontrol release {job_id}` lets it go on",
    "JobHeldAdmin": "held by an administrator, who must release it",
    "BadConstraints": "no node is like that: change constraint, gpus_per_node or mem_mb in the profile",
    "ReqNodeNotAvail": "its nodes are down or reserved",
    "DependencyNeverSatisfied": "it will never start: cancel it",
    "InvalidAccount": "slurm_account is not valid: change it in the profile",
    "InvalidQOS": "qos is not valid: change it in the profile",
}


@dataclass(frozen=True)
class RunFiles:
    """What the files of a run say; asked anew each time."""

    state: Callable[[], str]
    """running, stopped or done."""
    saved_step: Callable[[], int]
    """Step of the newest checkpoint; 0 without one."""


@dataclass
class SlurmLauncher:
    """Submits and follows the jobs of one run. One process at a time: the caller holds the run's lock."""

    train: Path
    machine: Machine
    files: RunFiles
    jobs: Jobs = field(init=False)
    queue: Queue = field(init=False)

    def __post_init__(self) -> None:
        self.jobs = Jobs(self.train)
        self.queue = Queue(self.machine.poll_s)
        for command in ("sbatch", "srun", "squeue", "scancel"):
            if shutil.which(command) is None:
                raise UserError(
                    f"{command} is not on PATH: run this on a login node of the cluster, or set launcher to local or "
                    "allocation in the profile"
                )

        if self.machine.container and not Path(self.machine.container).exists():
            raise UserError(f"{self.machine.container}: no such image; container in the profile is the path of one")

    def living(self, signals: Signals | None = None) -> JobRecord | None:
        """The job of this run that SLURM still has, recorded or not."""
        newest = self.jobs.newest()
        if newest is not None and newest.ended_at is None:
            state = self.queue.state(newest.job_id)
            if state.alive or state.name == UNKNOWN:
                return newest
            newest.now(state.name, state.reason, ended=True)
        for line in self._named(signals):
            for record in self.jobs.all():
                if record.job_id == line[0]:
                    return record
            folder = self.jobs.unrecorded(line[1])
            if folder is not None:
                say(f"job {line[0]} was submitted and not recorded: adopted by its name")
                return self._adopt(line[0], line[1], folder)
            raise UserError(
                f"job {line[0]} is called {line[1]} like the jobs of {self.train}, whose folder is gone; "
                f"`scancel {line[0]}` ends it"
            )
        return None

    def run(self, job: Callable[[Path], Job]) -> None:
        """Trains until the run's files say done. `job` gives what to run, its errors going to a folder.

        Raises Stopped when it was cancelled or let go of, UserError when training or SLURM refuses.
        """
        with Signals() as signals:
            record, fruitless = self.living(signals), 0
            if record is not None:
                say(f"attached to job {record.job_id}; its log: {record.log}")
            for _ in range(self.machine.max_jobs):
                before = self.files.saved_step()
                record = record or self._submit(job, signals)
                ended = self._follow(record, signals)
                self._settle(ended, signals)
                if self.files.state() == "done":
                    return
                why = self._judge(ended)
                saved = self.files.saved_step()
                fruitless = 0 if saved > before else fruitless + 1
                if fruitless == FRUITLESS_JOBS:
                    raise UserError(
                        f"{fruitless} jobs in a row ended without a new checkpoint; {why}; where jobs were too short, "
                        "raise runtime or save_within_s in the profile, or save more often (train.checkpoint_every_min)"
                    )
                say(f"{why}; going on from step {saved} with another job")
                record = None
        raise UserError(
            f"not done after {self.machine.max_jobs} jobs; run the same command to go on, or raise max_jobs "
            "in the profile"
        )

    def _named(self, signals: Signals | None) -> list[tuple[str, str]]:
        """Id and name of the living jobs of this run; waits for an answer. Raises UserError when none comes."""
        give_up, told = time.monotonic() + PATIENCE_S, False
        while True:
            try:
                return [(line.job_id, line.name) for line in self.queue.named(f"{self.jobs.name}.")]
            except QueueError as error:
                if time.monotonic() > give_up:
                    raise UserError(f"the queue gave no usable answer for an hour ({error})") from None
                if not told:
                    say(f"warning: no usable answer from the queue ({error}); waiting for one")
                    told = True
            wait = min(5.0, self.machine.poll_s)
            if signals is None:
                time.sleep(wait)
                continue
            signals.wait(wait)
            if signals.asked:
                raise Stopped("interrupted while the queue gave no usable answer; run the same command to go on")

    def _adopt(self, job_id: str, name: str, folder: Path) -> JobRecord:
        for pickled in folder.glob("*.pkl"):
            if re.fullmatch(r"[0-9a-f]{32}", pickled.stem):  # submitit had no time to give it the job's number
                pickled.rename(folder / f"{job_id}_submitted.pkl")
        return self._record(job_id, name, folder)

    def _record(self, job_id: str, name: str, folder: Path) -> JobRecord:
        machine = self.machine
        return JobRecord(
            path=folder,
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

    def _submit(self, job: Callable[[Path], Job], signals: Signals) -> JobRecord:
        """Submits one job and records it. Waits while SLURM cannot be reached; raises UserError when it refuses."""
        give_up, told = time.monotonic() + PATIENCE_S, False
        while True:
            self.jobs.drop_unrecorded()
            folder, name = self.jobs.new()
            try:
                with blocked():  # a submission is made and recorded, or not made
                    record = self._record(submit(job(folder), self.machine, folder, name), name, folder)
                say(f"submitted job {record.job_id}; its log: {record.log}")
                return record
            except UserError:
                self.jobs.drop(folder)
                raise
            except Unreachable as error:
                if time.monotonic() > give_up:
                    raise UserError(f"sbatch could not reach SLURM for an hour: {error}") from None
                if not told:
                    say(f"warning: sbatch: {error}; trying again")
                    told = True
            signals.wait(min(10.0, 5 * self.machine.poll_s))
            if signals.asked:
                raise Stopped("interrupted before a job was submitted")
            accepted = self.living(signals)
            if accepted is not None:
                return accepted

    def _follow(self, record: JobRecord, signals: Signals) -> JobRecord:
        """Shows a job's state and log until it has ended; does what signals ask for."""
        tail, shown, silent_since, gone = Tail(record.log), "", None, 0
        while True:
            state = self.queue.state(record.job_id)
            tail.copy()
            if state.name == UNKNOWN:
                if silent_since is None:
                    say(f"warning: no usable answer from the queue ({self.queue.trouble}); waiting for one")
                    silent_since = time.monotonic()
                elif time.monotonic() - silent_since > PATIENCE_S:
                    raise Stopped(
                        f"the queue gave no usable answer for an hour; job {record.job_id} may still run: "
                        "run the same command to follow it again"
                    )
            else:
                if silent_since is not None:
                    say("the queue answers again")
                silent_since = None
                gone = gone + 1 if state.name == GONE else 0
                text = self._described(record, state.name, state.reason, state.nodes)
                if text != shown:
                    say(text)
                    shown, record = text, record.now(state.name, state.reason)
                if state.name == "RUNNING" and tail.not_launched:
                    say(f"srun: {tail.not_launched}: the other tasks would wait for it until the time limit")
                    cancel_job(record.job_id, wait=signals.wait)
                    return record.now("LAUNCH_FAILED", ended=True)
                if not state.alive and gone != 1:  # GONE is asked twice: a controller may just be starting
                    tail.copy()
                    return record.now(state.name, state.reason, ended=True)
            if signals.asked:
                self._obey(record, signals)
            signals.wait(min(TICK_S, self.machine.poll_s))

    def _described(self, record: JobRecord, name: str, reason: str, nodes: str) -> str:
        where = f" on {nodes}" if nodes and name in ("RUNNING", "COMPLETING") else ""
        why = f" ({reason})" if reason and name == "PENDING" else ""
        hint = _HINTS.get(reason.split(",")[0], "") if why else ""
        hint = f": {hint.format(job_id=record.job_id, runtime=record.runtime, nodes=record.nodes)}" if hint else ""
        return f"job {record.job_id}: {name}{where}{why}{hint}"

    def _obey(self, record: JobRecord, signals: Signals) -> None:
        if signals.asked == "hand over":
            raise Stopped(f"job {record.job_id} is followed by another process from here")
        if signals.asked == "detach" or self.machine.on_interrupt == "detach":
            raise Stopped(
                f"job {record.job_id} goes on without this process; run the same command to follow it again, "
                f"`scancel {record.job_id}` to end it"
            )
        say(f"cancelling job {record.job_id}")
        signals.again = False
        state = cancel_job(record.job_id, wait=signals.wait, impatient=lambda: signals.again)
        record.now(state.name, state.reason, ended=True)
        raise Stopped(
            f"cancelled job {record.job_id}; saved at step {self.files.saved_step()}; run the same command to go on"
        )

    def _settle(self, ended: JobRecord, signals: Signals) -> None:
        """Waits until the shared folder shows how the training left it."""
        give_up = time.monotonic() + SETTLE_S
        while ended.state == "COMPLETED" and self.files.state() not in ("done", "stopped"):
            if time.monotonic() > give_up or ended.error:
                return
            os.listdir(self.train)  # makes a network file system look again
            signals.wait(TICK_S)

    def _judge(self, ended: JobRecord) -> str:
        """Why the job ended, when another is the answer. Raises UserError or Stopped when it is not."""
        where = f"(job {ended.job_id}, log: {ended.log})"
        if ended.error:
            raise UserError(f"{ended.error} {where}")
        if ended.state == "CANCELLED":
            raise Stopped(f"job {ended.job_id} was cancelled by somebody else; run the same command to go on")
        if ended.state == "COMPLETED" and self.files.state() == "stopped":
            return f"job {ended.job_id} stopped and saved before its time limit or a preemption"
        if ended.state == "OUT_OF_MEMORY" or Tail(ended.log).says_out_of_memory():
            raise UserError(
                f"the job ran out of memory: raise set-resources: train: mem_mb in the profile, or lower "
                f"train.token_budget {where}"
            )
        if (free := shutil.disk_usage(self.train).free) < 1 << 20:
            raise UserError(f"{self.train}: no space left ({free} bytes); make room and run the same command {where}")
        if ended.state in ANOTHER:
            return f"job {ended.job_id} ended with {ended.state}"
        if ended.state == "FAILED" and not ended.log.exists():
            return f"job {ended.job_id} ended with FAILED and left no log (is {ended.path} seen by the nodes?)"
        if ended.state == "FAILED":  # no process says why: it, or its node, was lost
            return f"job {ended.job_id} ended with FAILED and no process says why, log: {ended.log}"
        raise UserError(f"the job ended with {ended.state} and the training is not done {where}")


def say(text: str) -> None:
    """One line of the launcher's own."""
    print(text, flush=True)
