"""States of jobs, by squeue and, for jobs it has forgotten, by sacct.

One squeue answer serves all launchers of a user on a host: it is kept in a file and refreshed when it is older than
the poll interval. No answer, or one that cannot be parsed, is UNKNOWN and never taken for the end of a job.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cellmill.files import write_json
from cellmill.runs.job_states import ALIVE, ENDED, FOREIGN, GONE, UNKNOWN, JobState
from cellmill.runs.slurm_command import CommandError, ask, call

_LINE = re.compile(r"(\d+)\|([A-Z_]+)\|([^|]*)\|([^|]*)\|(.*)")


@dataclass(frozen=True)
class QueuedJob:
    """One job as squeue lists it."""

    job_id: str
    state: JobState
    name: str


class Queue:
    """Jobs of this user, by answers that are at most `poll_s` seconds old."""

    def __init__(self, poll_s: float) -> None:
        self.poll_s = poll_s

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
        jobs = [job for job in parse(_shared_answer(0)) if ours(job.name)]
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
        return next((job for job in parse(_shared_answer(max_age_s)) if job.job_id == job_id), None)

    def _from_accounting(self, job_id: str) -> JobState:
        try:
            words = ask(["sacct", "-X", "-n", "-P", "-j", job_id, "-o", "State"]).split()
        except CommandError:  # without accounting nothing is lost: the run's own files say how far it came
            words = []
        return JobState(words[0]) if words and words[0] in ALIVE | ENDED else JobState(GONE)


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


def _shared_answer(max_age_s: float) -> str:
    folder = _own_folder()
    if folder is None:
        return _ask()
    cluster = f"{os.environ.get('SLURM_CONF')} {shutil.which('squeue')}"  # clusters must not answer for each other
    file = folder / f"squeue-{hashlib.sha256(cluster.encode()).hexdigest()[:12]}.json"
    asked, kept = time.time(), _kept(file, max_age_s)
    if kept is None:
        with open(file.with_suffix(".lock"), "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # another launcher may have asked while this one waited for the lock
            kept = _kept(file, max(max_age_s, time.time() - asked)) or _renewed(file)
    if kept["trouble"]:
        raise CommandError(kept["trouble"])
    return str(kept["answer"])


def _renewed(file: Path) -> dict[str, Any]:
    kept = {"asked_at": time.time(), "answer": "", "trouble": ""}
    try:
        kept["answer"] = _ask()
    except CommandError as error:  # kept as well: spare a controller in trouble
        kept["trouble"] = str(error)
    write_json(file, kept)
    return kept


def _kept(file: Path, max_age_s: float) -> dict[str, Any] | None:
    try:
        kept = json.loads(file.read_text())
        young = 0 <= time.time() - kept["asked_at"] < max_age_s
        return kept if young and {"answer", "trouble"} <= set(kept) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _own_folder() -> Path | None:
    """A folder on this host that only this user can write to; None if another user owns that name."""
    path = Path(tempfile.gettempdir()) / f"cellmill-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError:
        return None
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    return path if ours else None


def _ask() -> str:
    # by uid, since the environment can change the name; -a: also hidden partitions
    return ask(["squeue", "-a", "-h", "-t", "all", "-u", str(os.getuid()), "-o", "%i|%T|%r|%N|%j"])
