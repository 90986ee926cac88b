"""Starts of a run's jobs, from the attempt files that the jobs write themselves."""

from dataclasses import dataclass, replace
from typing import Any

from cellmill.errors import DataError
from cellmill.runs.jobs import JobRecord

OWN_FILES = "own files"
RAN = frozenset({"COMPLETED", "FAILED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED"})
"""End states of jobs that ran: without an attempt file, how long is unknown."""


@dataclass(frozen=True)
class Start:
    """One start of a job, or a wait in the queue that never became one. Times are seconds since 1970; None: unknown."""

    job_id: str
    """Empty on this machine."""
    partition: str
    state: str
    submitted_at: float | None
    started_at: float | None
    ended_at: float | None
    """While it runs, when it was last seen."""
    queue_wait_s: float | None
    elapsed_s: float | None
    nodes: int | None
    processes: int | None
    gpus: int | None
    cpus: int | None
    """Allocated cores."""
    cpu_s: float | None = None
    """CPU time used."""
    max_memory_gb: float | None = None
    """Peak memory of one node's processes together."""
    source: str = OWN_FILES


def attempt_starts(record: JobRecord, now: float) -> list[Start]:
    """Starts of a job by its attempt files; only its wait in the queue if there is none."""
    try:
        attempts = record.attempts()
    except DataError:  # truncated by a full disk
        attempts = []
    if not attempts:
        waited = record.state not in RAN
        return [
            replace(
                _start(record, None, record.submitted_at, record.ended_at),
                queue_wait_s=(record.ended_at or now) - record.submitted_at if waited else None,
                elapsed_s=0.0 if waited else None,
            )
        ]
    starts, queued_at = [], record.submitted_at
    for attempt in attempts:
        ended, state = attempt["ended_at"], record.state
        if attempt is not attempts[-1]:
            state = "REQUEUED"
        elif record.ended_at is None and ended is None:
            state = "RUNNING"
        ended_at = float(attempt["seen_at"] if ended is None else ended)
        starts.append(replace(_start(record, attempt, queued_at, ended_at), state=state))
        queued_at = ended_at  # a requeued job waits again from its end
    return starts


def _start(record: JobRecord, attempt: dict[str, Any] | None, queued_at: float, ended_at: float | None) -> Start:
    nodes = len(attempt["hosts"]) if attempt else int(record.nodes.partition("-")[0])
    started = float(attempt["started_at"]) if attempt else None
    return Start(
        job_id=record.job_id,
        partition=record.slurm_partition,
        state=record.state,
        submitted_at=queued_at,
        started_at=started,
        ended_at=ended_at,
        queue_wait_s=None if started is None else max(0.0, started - queued_at),
        elapsed_s=None if started is None or ended_at is None else ended_at - started,
        nodes=nodes,
        processes=int(attempt["processes"]) if attempt else nodes * record.nproc_per_node,
        gpus=int(attempt["gpus"]) if attempt else nodes * record.gpus_per_node,
        cpus=nodes * record.cpus_per_node,
    )
