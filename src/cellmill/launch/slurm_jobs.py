"""The jobs of one folder in SLURM: finding them by name, and submitting one exactly once.

sbatch may accept a job and its answer be lost. So a submission that got no answer is looked up by the job's name
before it is tried again, and a job without a record is adopted.
"""

import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cellmill.config.machine import Machine
from cellmill.errors import UserError
from cellmill.launch.follow import PATIENCE_S, say
from cellmill.launch.job import Job
from cellmill.launch.queue import Queue, QueuedJob
from cellmill.launch.signals import Interrupted, Requests, blocked
from cellmill.launch.submit import QuotaFull, Unreachable, submit
from cellmill.runs.jobs import JobRecord, Jobs
from cellmill.runs.slurm_command import CommandError


@dataclass
class SlurmJobs:
    """Submits and finds the jobs of `jobs`. One process at a time: the caller holds the folder's lock."""

    jobs: Jobs
    queue: Queue
    machine: Machine
    requests: Requests = field(default_factory=Requests)
    """Any request ends a wait with Interrupted."""
    patience_s: float = PATIENCE_S
    """Longest time without an answer from SLURM."""

    def alive(self) -> list[QueuedJob]:
        """Jobs of this folder that SLURM has. Waits for an answer; raises UserError if none comes."""
        deadline, warned = time.monotonic() + self.patience_s, False
        while True:
            try:
                return self.queue.named(self.jobs.owns)
            except CommandError as error:
                if time.monotonic() > deadline:
                    raise UserError(f"no usable answer from squeue within {self.patience_s:.0f} s ({error})") from None
                if not warned:
                    say(f"warning: no usable answer from squeue ({error}); waiting for one")
                    warned = True
            self.pause(min(5.0, self.machine.poll_s))

    def find(self) -> JobRecord | None:
        """The record of the job of this folder that SLURM has; a job without a record gets one."""
        for queued in self.alive():
            record = self.jobs.record(queued.job_id, queued.name)
            if record is not None:
                return record
            folder = self.jobs.folder(queued.name)
            if folder is not None:  # with another record: of two jobs of one number, one ends at once
                say(f"job {queued.job_id} was submitted but not recorded: adopted by its name")
                return self._adopt(queued, folder)
            raise UserError(
                f"job {queued.job_id} ({queued.name}) belongs to {self.jobs.path.parent}, but its folder there is "
                f"missing; `scancel {queued.job_id}` ends it"
            )
        return None

    def submit(self, job: Callable[[Path], Job]) -> JobRecord:
        """Submit the job that `job` returns for its folder, unless SLURM has one of this folder.

        Waits for SLURM; raises UserError if it refuses. The folder of a submission without an answer stays: its job may
        be accepted late, and then ends at once if another one has claimed the run.
        """
        deadline, warned = time.monotonic() + self.patience_s, set[type]()
        while (accepted := self.find()) is None:
            folder, name = self.jobs.new()
            try:
                with blocked():  # submitted and recorded, or neither
                    job_id = submit(job(folder), self.machine, folder, name)
                    record = JobRecord.of(self.machine, folder, job_id, name).write()
                say(f"submitted job {record.job_id}; its log: {record.log}")
                return record
            except UserError:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            except QuotaFull as full:
                shutil.rmtree(folder, ignore_errors=True)
                deadline = time.monotonic() + self.patience_s
                if QuotaFull not in warned:
                    say(f"sbatch: {full}: SLURM accepts no further job of yours until others have ended; waiting")
                    warned.add(QuotaFull)
            except Unreachable as error:
                if time.monotonic() > deadline:
                    raise UserError(f"sbatch could not reach SLURM within {self.patience_s:.0f} s: {error}") from None
                if Unreachable not in warned:
                    say(f"warning: sbatch: {error}; trying again")
                    warned.add(Unreachable)
            self.pause(min(10.0, 5 * self.machine.poll_s))
        say(f"job {accepted.job_id} of this run is alive; its log: {accepted.log}")
        return accepted

    def _adopt(self, queued: QueuedJob, folder: Path) -> JobRecord:
        for pickled in folder.glob("*.pkl"):
            if re.fullmatch(r"[0-9a-f]{32}", pickled.stem):  # submitit did not get to rename it
                pickled.rename(folder / f"{queued.job_id}_submitted.pkl")
        return JobRecord.of(self.machine, folder, queued.job_id, queued.name).write()

    def pause(self, seconds: float) -> None:
        """Wait. Raises Interrupted at a request."""
        self.requests.wait(seconds)
        if self.requests.asked:
            raise Interrupted("interrupted while waiting for SLURM; run the same command to go on")
