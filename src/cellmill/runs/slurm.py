"""States of SLURM jobs, and calls of SLURM's commands."""

import os
import re
import subprocess
from dataclasses import dataclass

NOT_LISTED = "NOT_LISTED"  # SLURM no longer knows the job
OTHER_JOB = "OTHER_JOB"
"""SLURM has a job with this id but another name: the allocation that a training ran in, or a reused
job id.
"""
UNKNOWN = "UNKNOWN"  # squeue gave no usable answer
UNLISTED = "not in squeue"
"""Reason of a state that only sacct reports: the controller may have lost the job."""

WAITING = frozenset(
    "PENDING CONFIGURING EXPEDITING REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT".split()
)
ALIVE = WAITING | frozenset(
    "RUNNING COMPLETING SUSPENDED RESIZING SIGNALING STAGE_OUT STOPPED".split()
)
"""States of jobs that hold nodes or are going to."""
ENDED_BY_SITE = frozenset("PREEMPTED NODE_FAIL BOOT_FAIL REVOKED".split())
"""End states that say nothing about the job."""
INFRASTRUCTURE = ENDED_BY_SITE | {"TIMEOUT", "LAUNCH_FAILED", NOT_LISTED, OTHER_JOB}
"""End states that are not the training's fault: another job continues."""
RESUMABLE = ENDED_BY_SITE | {"COMPLETED", "CANCELLED", "TIMEOUT", "DEADLINE", NOT_LISTED}
"""End states after which the same command resumes."""
RAN = frozenset("COMPLETED FAILED TIMEOUT OUT_OF_MEMORY NODE_FAIL PREEMPTED".split())
"""End states of jobs that were started."""
ENDED = ENDED_BY_SITE | frozenset(
    "CANCELLED COMPLETED DEADLINE FAILED LAUNCH_FAILED OUT_OF_MEMORY TIMEOUT".split()
)

ANSWER_WITHIN_S = 60
NO_PROCESS = "this host allows no further process (ulimit -u); end others of yours, or use another login node"
_FILTERS = ("SQUEUE_", "SCANCEL_", "SACCT_")  # a job they filter out would seem to be gone


@dataclass(frozen=True)
class JobState:
    """State of a job: a word of SLURM, NOT_LISTED, OTHER_JOB or UNKNOWN."""

    name: str
    reason: str = ""  # why the job is pending, or the state unknown
    nodes: str = ""
    limit_s: float | None = None  # its time limit, if squeue gives one

    @property
    def alive(self) -> bool:
        return self.name in ALIVE

    @property
    def may_be_alive(self) -> bool:
        """True unless SLURM says that the job has ended."""
        return self.alive or self.name == UNKNOWN

    @property
    def text(self) -> str:
        """The name, with the reason in brackets if there is one."""
        return f"{self.name} ({self.reason})" if self.reason else self.name


def on_cluster(cluster: str, *arguments: str) -> list[str]:
    """Arguments of a SLURM command for `cluster`, or for several separated by commas.

    Without one, the command uses the cluster of this host or `SLURM_CLUSTERS`.
    """
    return ["-M", cluster, *arguments] if cluster else [*arguments]


class ClusterJob:
    """A job of a cluster."""

    job_id: str
    name: str
    cluster: str  # empty for the default

    @property
    def argument(self) -> str:
        """The job as an argument of scancel and scontrol."""
        return " ".join(on_cluster(self.cluster, self.job_id))


class CommandError(Exception):
    """A command of SLURM is missing, failed or gave no usable answer.

    The text begins with the command's name.
    """


def call(
    command: list[str], within_s: float | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command without the filters of the user's environment.

    Raise CommandError if it is missing, or does not answer within `within_s` seconds
    (default: `ANSWER_WITHIN_S`).
    """
    within_s = within_s or ANSWER_WITHIN_S
    unfiltered = {
        name: value for name, value in os.environ.items() if not name.startswith(_FILTERS)
    }
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=within_s,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C at the terminal must not cut an answer short
            env=unfiltered | environment,
        )
    except subprocess.TimeoutExpired:
        problem = f"no answer within {within_s:g} s"
    except FileNotFoundError:
        problem = "not on PATH"
    except BlockingIOError:
        problem = NO_PROCESS
    except OSError as error:
        problem = str(error.strerror)
    raise CommandError(f"{command[0]}: {problem}")


def ask(command: list[str], within_s: float | None = None, **environment: str) -> str:
    """Return the output of a command, run as by `call`. Raise CommandError also if it fails."""
    done = call(command, within_s, **environment)
    if done.returncode:
        complaint = " ".join(done.stderr.split())[:200] or f"exit code {done.returncode}"
        complaint = complaint.removeprefix(f"{command[0]}: ").removeprefix("error: ")
        raise CommandError(f"{command[0]}: {complaint}")
    return done.stdout


def parse_duration(text: str) -> float | None:
    """Seconds of SLURM's `[[days-]hours:]minutes:seconds[.fraction]`; None for another text."""
    match = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+(?:\.\d+)?)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return ((24 * days + hours) * 60 + minutes) * 60 + seconds
