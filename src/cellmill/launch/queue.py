"""What SLURM says of jobs: squeue first, then sacct where a site has it.

One `squeue` answer serves all launchers of a user on a host: it is kept in a file of theirs, and asked again when it
is older than the poll interval. An answer that makes no sense, or none, is UNKNOWN and never taken for an end.
"""

from __future__ import annotations

import fcntl
import getpass
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

GONE = "GONE"
"""SLURM knows the job no longer."""
UNKNOWN = "UNKNOWN"
"""No usable answer this time."""
ALIVE = {
    "PENDING",
    "CONFIGURING",
    "RUNNING",
    "COMPLETING",
    "SUSPENDED",
    "REQUEUED",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "RESIZING",
    "SIGNALING",
    "STAGE_OUT",
    "STOPPED",
    "RESV_DEL_HOLD",
    "SPECIAL_EXIT",
}
"""States of jobs that hold or will hold nodes."""
ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
    "LAUNCH_FAILED",
}
ANSWER_WITHIN_S = 60
_LINE = re.compile(r"(\d+)\|([A-Z_]+)\|([^|]*)\|([^|]*)\|(.*)")


@dataclass(frozen=True)
class JobState:
    """SLURM's word for a job's state (or GONE, or UNKNOWN), its reason for waiting, and its nodes."""

    name: str
    reason: str = ""
    nodes: str = ""

    @property
    def alive(self) -> bool:
        return self.name in ALIVE


@dataclass(frozen=True)
class Line:
    """One job in the queue."""

    job_id: str
    state: JobState
    name: str


class QueueError(Exception):
    """squeue gave no usable answer."""


class Queue:
    """The jobs of this user; answers are at most `poll_s` seconds old."""

    def __init__(self, poll_s: float) -> None:
        self.poll_s = poll_s
        self.trouble = ""
        """Why the last answer was UNKNOWN."""

    def state(self, job_id: str) -> JobState:
        """The state of one job."""
        try:
            found = self._find(job_id, self.poll_s) or self._find(job_id, 0)  # a job just submitted is in no old answer
        except QueueError as error:
            self.trouble = str(error)
            return JobState(UNKNOWN)
        return found or self._from_accounting(job_id)

    def named(self, prefix: str) -> list[Line]:
        """Living jobs whose name begins with `prefix`, as of now. Raises QueueError without a usable answer."""
        return [line for line in self._lines(0) if line.name.startswith(prefix) and line.state.alive]

    def cancel(self, job_id: str) -> str:
        """Cancels a job; what scancel complained about, or nothing."""
        return _call(["scancel", job_id])[1].strip()

    def _find(self, job_id: str, max_age_s: float) -> JobState | None:
        return next((line.state for line in self._lines(max_age_s) if line.job_id == job_id), None)

    def _lines(self, max_age_s: float) -> list[Line]:
        return parse(_shared_answer(max_age_s))

    def _from_accounting(self, job_id: str) -> JobState:
        output, _, code = _call(["sacct", "-X", "-n", "-P", "-j", job_id, "-o", "State"])
        word = output.split()[0] if code == 0 and output.split() else ""
        # accounting that is off, or down, costs nothing here: what a training reached is in its own files
        return JobState(word) if word in ALIVE | ENDED else JobState(GONE)


def parse(answer: str) -> list[Line]:
    """squeue's answer as jobs. Raises QueueError when a line of it is not a job."""
    lines = []
    for text in answer.splitlines():
        match = _LINE.fullmatch(text.strip())
        if match is None or match[2] not in ALIVE | ENDED:
            if re.match(r"\d+_", text.strip()):  # an array's task: not ours
                continue
            raise QueueError(f"squeue answered {text.strip()[:80]!r}")
        lines.append(Line(match[1], JobState(match[2], "" if match[3] == "None" else match[3], match[4]), match[5]))
    return lines


def _shared_answer(max_age_s: float) -> str:
    folder = _own_folder()
    if folder is None:
        return _ask()
    where = f"{os.environ.get('SLURM_CONF')} {shutil.which('squeue')}"  # two clusters must not answer for each other
    file = folder / f"squeue-{hashlib.sha256(where.encode()).hexdigest()[:12]}.json"
    if max_age_s > 0 and (kept := _kept(file, max_age_s)) is not None:
        return kept
    asked = time.time()
    with open(file.with_suffix(".lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # somebody may have asked while we waited for the lock
        if (kept := _kept(file, max(max_age_s, time.time() - asked))) is not None:
            return kept
        began = time.time()
        answer = _ask()
        temporary = file.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({"asked_at": began, "answer": answer}))
        temporary.replace(file)
        return answer


def _kept(file: Path, max_age_s: float) -> str | None:
    try:
        kept = json.loads(file.read_text())
        young = 0 <= time.time() - kept["asked_at"] < max_age_s
        return str(kept["answer"]) if young else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _own_folder() -> Path | None:
    """A folder on this host that only this user can write to; None when somebody else made one of that name."""
    path = Path(tempfile.gettempdir()) / f"cellmill-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError:
        return None
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    return path if ours else None


def _ask() -> str:
    output, error, code = _call(["squeue", "-h", "-t", "all", "-u", getpass.getuser(), "-o", "%i|%T|%r|%N|%j"])
    if code != 0:
        raise QueueError(f"squeue: {' '.join(error.split())[:200] or f'exit code {code}'}")
    return output


def _call(command: list[str]) -> tuple[str, str, int]:
    """Output, error and exit code of a SLURM command; 127 when it is not there, 124 when it does not answer."""
    try:
        # a session of its own: Ctrl-C at the terminal must not cut an answer short
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=ANSWER_WITHIN_S, start_new_session=True
        )
    except FileNotFoundError:
        return "", f"{command[0]}: not on PATH", 127
    except subprocess.TimeoutExpired:
        return "", f"no answer within {ANSWER_WITHIN_S} s", 124
    return done.stdout, done.stderr, done.returncode
