"""SLURM's job states, as in squeue, sacct and a run's records."""

from dataclasses import dataclass

GONE = "GONE"
"""SLURM no longer knows the job."""
FOREIGN = "FOREIGN"
"""SLURM has a job of this id, but of another name: an allocation that a training ran in, or a number given again."""
UNKNOWN = "UNKNOWN"
"""squeue gave no usable answer."""
UNLISTED = "not in squeue"
"""Reason of a state that sacct alone reports: the job may be one that the controller lost."""
ALIVE = {
    *("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD"),
    *("RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "RESV_DEL_HOLD", "SPECIAL_EXIT"),
}
"""States of jobs that hold nodes or are going to."""
ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED", "TIMEOUT"),
}


@dataclass(frozen=True)
class JobState:
    """A job's state in SLURM's words (or GONE, FOREIGN or UNKNOWN), why it is pending or unknown, and its nodes."""

    name: str
    reason: str = ""
    nodes: str = ""

    @property
    def alive(self) -> bool:
        return self.name in ALIVE

    @property
    def text(self) -> str:
        """Its name, and the reason in brackets if there is one."""
        return f"{self.name} ({self.reason})" if self.reason else self.name
