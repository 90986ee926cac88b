"""Verdicts: a comparison of two results as data, and the sentence that states it.

A result is ahead or behind only where the 95 % interval of the difference leaves out 0; otherwise the two are level.
"""

from dataclasses import dataclass
from typing import Literal

TOLERANCE = 5e-4
"""Differences below this print as 0.000: the two are level."""
Outcome = Literal["ahead", "level", "behind"]


@dataclass(frozen=True)
class Verdict:
    compared: str
    against: str
    metric: str
    difference: float
    """`compared` minus `against`, in the metric."""
    interval: tuple[float, float] | None
    """95 % interval of the difference; None where none was estimated, and the difference alone decides."""
    outcome: Outcome


def compare(
    compared: str,
    against: str,
    metric: str,
    difference: float,
    interval: tuple[float, float] | None = None,
    lower_is_better: bool = False,
) -> Verdict:
    """Verdict on `difference`."""
    low, high = interval or (difference, difference)
    outcome: Outcome = "level"
    if abs(difference) >= TOLERANCE and not low <= 0 <= high:
        outcome = "ahead" if (difference > 0) != lower_is_better else "behind"
    return Verdict(compared, against, metric, difference, interval, outcome)


def sentence(verdict: Verdict) -> str:
    """The verdict in words, with the difference and its interval."""
    over = "" if verdict.interval is None else " ({:+.3f} to {:+.3f})".format(*verdict.interval)
    relation = {"ahead": "is ahead of", "level": "is level with", "behind": "is behind"}[verdict.outcome]
    if verdict.outcome == "level":
        return f"{verdict.compared} {relation} {verdict.against}: {verdict.difference:+.3f} {verdict.metric}{over}."
    return f"{verdict.compared} {relation} {verdict.against} by {abs(verdict.difference):.3f} {verdict.metric}{over}."
