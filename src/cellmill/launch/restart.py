"""Restarting all processes after one was lost: killed, or gone with its agent, without an error message.

Agents are started afresh and torchrun's own --max-restarts stays 0: it would also retry what a process refused, and
under static rendezvous its second start reads the keys of the first. This level restarts first, in seconds and on the
same machines; where it gives up, a chain of SLURM jobs goes on.
"""

from pathlib import Path

from cellmill.errors import DataError
from cellmill.files import read_json
from cellmill.launch.job import Job


class Restarts:
    """Restarts of one job."""

    def __init__(self, job: Job) -> None:
        self.job, self.done = job, 0
        self._from: int | None = None

    def again(self, code: int) -> bool:
        """True if the job is to be restarted after an agent ended with exit `code`; prints the decision.

        Not if a process left an error message, since the error would come again, and not if the last start resumed
        from the same step: a loss that comes twice is no accident.
        """
        job = self.job
        if self.done == job.max_restarts or Path(job.error_file).exists():
            return False
        step, before = self._step(), self._from
        self._from = step
        if step == before:
            print(f"a process was lost again without a new checkpoint after step {step}: not started again", flush=True)
            return False
        self.done += 1
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        print(
            f"a process was lost (its agent ended with {ended}): starting all again from the last checkpoint, restart "
            f"{self.done} of {job.max_restarts}",
            flush=True,
        )
        return True

    def _step(self) -> int:
        """Step that the latest start resumed from, by its rank 0."""
        try:
            return int(read_json(Path(self.job.state_file))["step"])
        except (DataError, KeyError, TypeError):
            return 0
