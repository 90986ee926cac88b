"""Whether processes are started again after one was lost: killed, or gone with its agent, without a word.

Agents are started afresh and torchrun's own --max-restarts stays 0: it would try what a process refused once more,
and under static rendezvous its second start reads the keys of the first. This is the level that restarts first, in
seconds and on the same machines; a chain of SLURM jobs goes on where it gives up.
"""

from __future__ import annotations

from pathlib import Path

from cellmill.errors import DataError
from cellmill.files import read_json
from cellmill.launch.job import Job


class Restarts:
    """Counts the starts of one job."""

    def __init__(self, job: Job) -> None:
        self.job, self.done = job, 0
        self._from: int | None = None

    def again(self, code: int) -> bool:
        """Whether to start once more after an agent ended with `code`; says so.

        Not where a process left the line that says why, since it would again, and not when the start before went on
        from the same step: what comes twice is no accident.
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
        """Where the newest start went on, as its rank 0 noted."""
        try:
            return int(read_json(Path(self.job.state_file))["step"])
        except (DataError, KeyError, TypeError):
            return 0
