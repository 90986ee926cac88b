"""SLURM's words for the state of a job, as its queue and accounting and a run's records have them."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class JobState:
    """SLURM's word for a job's state (or GONE, or UNKNOWN), its reason for waiting, and its nodes."""

    name: str
    reason: str = ""
    nodes: str = ""

    @property
    def alive(self) -> bool:
        return self.name in ALIVE
