"""Notices that jobs at their time limit spent most or all of it starting: the limit is too short."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from cellmill.errors import DataError
from cellmill.runs.jobs import JobRecord

SHARE = 0.5
"""From this part of its time on, a job was mostly start-up."""
IN_A_ROW = 2
EARLY_S = 90.0
"""SLURM may announce the limit a minute early."""


@dataclass
class ShortJobs:
    """Follows the jobs of one run. `training_s` is the time of all steps of its curve; None if unknown."""

    training_s: Callable[[], float | None]
    _before_s: float = 0.0
    _shares: list[float] = field(default_factory=list)
    _steps: list[int] = field(default_factory=list)
    _told: bool = False

    def begin(self) -> None:
        """A job begins."""
        self._before_s = self.training_s() or 0.0

    def start_up(self, ended: JobRecord, steps: int, was_to_save: bool) -> str:
        """One line if this job ended at its limit before its first step; otherwise empty.

        `was_to_save`: SLURM announced the job's end, which it does before a preemption too.
        """
        limit_s, elapsed_s = 60.0 * ended.runtime, _elapsed_s(ended)
        timeout = ended.state == "TIMEOUT"
        announced = was_to_save and ended.state != "PREEMPTED" and elapsed_s >= limit_s - ended.save_within_s - EARLY_S
        if steps or (self.training_s() or 0.0) > self._before_s or not (timeout or announced):
            return ""
        took_s = limit_s if timeout else elapsed_s
        return (
            f"start-up took {took_s:.0f} s of the limit's {limit_s:.0f} s, and no step was made: raise runtime to at "
            f"least {math.ceil((2 * took_s + ended.save_within_s) / 60)} (min) in the profile"
        )

    def line(self, ended: JobRecord, steps: int) -> str:
        """One line, once, if this job and the one before it were mostly start-up; otherwise empty.

        `steps` is what the job has added to the newest checkpoint.
        """
        elapsed_s, after_s = _elapsed_s(ended), self.training_s()
        if after_s is None or elapsed_s < 60 * ended.runtime - ended.save_within_s - EARLY_S:
            self._shares.clear()  # it did not end at its limit
            self._steps.clear()
            return ""
        self._shares.append(1 - min(1.0, max(0.0, after_s - self._before_s) / max(elapsed_s, 1e-9)))
        self._steps.append(steps)
        last, made = self._shares[-IN_A_ROW:], self._steps[-IN_A_ROW:]
        if self._told or len(last) < IN_A_ROW or min(last) < SHARE:
            return ""
        self._told = True
        return (
            f"warning: the last {IN_A_ROW} jobs spent {sum(last) / IN_A_ROW:.0%} of their time on starting and saving, "
            f"and made {' and '.join(map(str, made))} steps: raise runtime ({ended.runtime} min) in the profile"
        )


def _elapsed_s(record: JobRecord) -> float:
    """Seconds that a job ran, by the files that it wrote itself; 0 if it left none."""
    try:
        attempts = record.attempts()
    except DataError:
        return 0.0
    return sum(float(each["ended_at"] or each["seen_at"]) - float(each["started_at"]) for each in attempts[-1:])
