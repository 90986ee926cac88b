"""Ends a job and waits until it has ended: an answer of scancel's says only that it was asked."""

from __future__ import annotations

import time
from collections.abc import Callable

from cellmill.errors import UserError
from cellmill.launch.queue import Queue
from cellmill.runs.job_states import UNKNOWN, JobState

CANCEL_S = 60  # a job saves before it ends
TICK_S = 1.0


def cancel_job(
    job_id: str,
    wait: Callable[[float], None] = time.sleep,
    impatient: Callable[[], bool] = lambda: False,
    within_s: float = CANCEL_S,
) -> JobState:
    """Cancels a job and returns how it ended. Raises UserError when it has not ended in time.

    Parameters
    ----------
    wait
        Waits so many seconds, or fewer.
    impatient
        Whether to wait no longer.
    """
    queue = Queue(TICK_S)
    complaint, give_up = queue.cancel(job_id), time.monotonic() + within_s
    while (state := queue.state(job_id)).alive or state.name == UNKNOWN:
        if time.monotonic() > give_up or impatient():
            raise UserError(
                f"job {job_id} was asked to end and has not yet ({complaint or state.name}); `scancel {job_id}` "
                "asks again"
            )
        if complaint:
            complaint = queue.cancel(job_id)
        wait(TICK_S)
    return state
