"""Verdicts: a comparison of two results as data, and the sentence that states it.

Any loss is called a loss. A win counts only beyond the spread of the difference, for instance over folds.
"""

from dataclasses import dataclass
from typing import Literal

TOLERANCE = 5e-4
"""Differences below this print as 0.000 and are ties."""
Outcome = Literal["won", "tied", "lost"]


@dataclass(frozen=True)
class Verdict:
    compared: str
    against: str
    metric: str
    difference: float
    """`compared` minus `against`, in the metric."""
    interval: tuple[float, float] | None
    """Low and high end of the difference; None where no spread was measured."""
    outcome: Outcome


def compare(
    compared: str,
    against: str,
    metric: str,
    difference: float,
    spread: float | None = None,
    lower_is_better: bool = False,
) -> Verdict:
    """Verdict on `difference`, whose standard deviation is `spread`."""
    gain = -difference if lower_is_better else difference
    outcome: Outcome = "won"
    if gain < -TOLERANCE:
        outcome = "lost"
    elif gain < TOLERANCE or gain <= (spread or 0.0):
        outcome = "tied"
    interval = None if spread is None else (difference - spread, difference + spread)
    return Verdict(compared, against, metric, difference, interval, outcome)


def sentence(verdict: Verdict) -> str:
    """The verdict in words, with the difference and its interval."""
    by = f"{abs(verdict.difference):.3f} {verdict.metric}"
    over = "" if verdict.interval is None else " ({:.3f} to {:.3f})".format(*verdict.interval)
    if verdict.outcome == "won":
        return f"{verdict.compared} beats {verdict.against} by {by}{over}."
    if verdict.outcome == "lost":
        return f"{verdict.compared} loses to {verdict.against} by {by}{over}."
    if abs(verdict.difference) < TOLERANCE:
        return f"{verdict.compared} ties with {verdict.against} in {verdict.metric}{over}."
    return f"{verdict.compared} is ahead of {verdict.against} by {by}{over}: no clear win."
