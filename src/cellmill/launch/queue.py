"""States of jobs, by squeue and, for jobs it has forgotten, by sacct.

Each launcher queries squeue itself, and holds no lock while it does. No answer, or one that cannot be parsed, is
UNKNOWN and never taken for the end of a job.
"""

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cellmill.runs.job_states import ALIVE, ENDED, FOREIGN, GONE, UNKNOWN, UNLISTED, JobState
from cellmill.runs.slurm_command import CommandError, ask, call

_HINTS = {
    "PartitionTimeLimit": "{runtime} is more than the partition allows: lower it in the profile",
    "PartitionNodeLimit": "the partition has fewer nodes than {nodes}: lower nodes in the profile",
    "QOSMaxWallDurationPerJobLimit": "{runtime} is more than the QOS allows: lower it in the profile",
    "AssocMaxWallDurationPerJobLimit": "{runtime} is more than the account allows: lower it in the profile",
    "JobHeldUser": "held: `scontrol release {job_id}` releases it",
    "JobHeldAdmin": "held by an administrator, who must release it",
    "job requeued in held state": "held: `scontrol release {job_id}` releases it",
    "launch failed requeued held": "held after a failed start: `scontrol release {job_id}` tries again",
    "JobHoldMaxRequeue": "held after too many requeues: `scontrol release {job_id}` tries again",
    "BadConstraints": "no node satisfies it: change constraint, gpus_per_node or mem_mb in the profile",
    "ReqNodeNotAvail": "its nodes are down or reserved",
    "DependencyNeverSatisfied": "it will never start: cancel it",
    "InvalidAccount": "slurm_account is not valid: change it in the profile",
    "InvalidQOS": "qos is not valid: change it in the profile",
}

_LINE = re.compile(r"(\d+)\|([A-Z_]+)\|([^|]*)\|([^|]*)\|(.*)")


@dataclass(frozen=True)
class QueuedJob:
    """One job as squeue lists it."""

    job_id: str
    state: JobState
    name: str


@dataclass
class Queue:
    """Jobs of this user, by answers that are at most `poll_s` seconds old."""

    poll_s: float
    _asked_at: float = field(default=float("-inf"), init=False)
    _answer: str | CommandError = field(default="", init=False)

    def state(self, job_id: str, name: str) -> JobState:
        """The state of the job of this id and name; FOREIGN if the job of this id has another name."""
        try:
            job = self._find(job_id, self.poll_s) or self._find(job_id, 0)  # a new job is in no earlier answer
        except CommandError as error:
            return JobState(UNKNOWN, str(error))
        if job is None:
            return self._from_accounting(job_id)
        return job.state if job.name == name else JobState(FOREIGN)

    def named(self, ours: Callable[[str], bool]) -> list[QueuedJob]:
        """Jobs alive now whose name is one of `ours`. Raises CommandError without a usable answer."""
        jobs = [job for job in self._listed(0) if ours(job.name)]
        for job in jobs:
            if job.state.name == UNKNOWN:
                raise CommandError(job.state.reason)
        return [job for job in jobs if job.state.alive]

    def cancel(self, job_id: str, name: str, signal: str = "") -> str:
        """Cancel the job of this id and name, or send its tasks a signal.

        Returns scancel's error message, or an empty text. scancel leaves a job of another name alone.
        """
        try:
            how = [f"--name={name}", *([f"--signal={signal}"] if signal else [])]
            return call(["scancel", *how, job_id]).stderr.strip()
        except CommandError as error:
            return str(error)

    def _find(self, job_id: str, max_age_s: float) -> QueuedJob | None:
        return next((job for job in self._listed(max_age_s) if job.job_id == job_id), None)

    def _listed(self, max_age_s: float) -> list[QueuedJob]:
        """Jobs by an answer of at most this age. Raises CommandError without a usable answer."""
        if time.monotonic() - self._asked_at >= max_age_s:
            try:  # by uid, since the environment can change the name; -a: also hidden partitions
                command = ["squeue", "-a", "-h", "-t", "all", "-u", str(os.getuid()), "-o", "%i|%T|%r|%N|%j"]
                self._answer = ask(command)
            except CommandError as error:  # kept as well: spare a controller in trouble
                self._answer = error
            self._asked_at = time.monotonic()
        if isinstance(self._answer, CommandError):
            raise self._answer
        return parse(self._answer)

    def _from_accounting(self, job_id: str) -> JobState:
        try:
            words = ask(["sacct", "-X", "-n", "-P", "-j", job_id, "-o", "State"]).split()
        except CommandError:  # without accounting nothing is lost: the run's own files say how far it came
            words = []
        if not words or words[0] not in ALIVE | ENDED:
            return JobState(GONE)
        return JobState(words[0], UNLISTED if words[0] in ALIVE else "")


def parse(answer: str) -> list[QueuedJob]:
    """The jobs in squeue's answer. Raises CommandError if a line is not a job."""
    jobs = []
    for text in answer.splitlines():
        match = _LINE.fullmatch(text.strip())
        if match is not None:
            number, word, reason, nodes, name = match.groups()
            state = JobState(word, "" if reason == "None" else reason, nodes)
            if word not in ALIVE | ENDED:
                state = JobState(UNKNOWN, f"squeue gives job {number} an unknown state: {word}")
            jobs.append(QueuedJob(number, state, name))
        elif not re.match(r"\d+[_+]", text.strip()):  # array task or component of a heterogeneous job: not ours
            raise CommandError(f"squeue answered {text.strip()[:80]!r}")
    return jobs


def pending_hint(reason: str, **request: str) -> str:
    """Advice for a job that is pending for this reason; empty if it only has to wait.

    Parameters
    ----------
    request
        `runtime`, `nodes` and `job_id`, as they are named to the user.
    """
    return _HINTS.get(reason.split(",")[0].replace("_", " "), "").format(**request)
