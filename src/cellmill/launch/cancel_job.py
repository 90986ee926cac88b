"""Cancelling a job and waiting until it has ended: scancel only delivers the request."""

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
    """Cancel a job; return its final state. Raises UserError if it has not ended in time.

    Parameters
    ----------
    wait
        Waits for a number of seconds, or less.
    impatient
        Returns True to stop waiting.
    """
    queue = Queue(TICK_S)
    complaint, deadline = queue.cancel(job_id), time.monotonic() + within_s
    while (state := queue.state(job_id)).alive or state.name == UNKNOWN:
        if time.monotonic() > deadline or impatient():
            raise UserError(
                f"job {job_id} was cancelled but has not ended ({complaint or state.name}); `scancel {job_id}` "
                "asks again"
            )
        if complaint:
            complaint = queue.cancel(job_id)
        wait(TICK_S)
    return state
