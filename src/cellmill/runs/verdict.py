"""Verdicts: a comparison of two results as data, and the sentence that states it; shares of a gap,
likewise.

A result is ahead or behind only where the 95 % interval of the difference leaves out 0; otherwise
the two are level. With fewer than `FEWEST` independent units (perturbations, donors), or where all
of them differ by the same, the interval says nothing, and the comparison is undecided.
"""

from dataclasses import dataclass
from typing import Literal

TOLERANCE = 5e-4  # differences below this print as 0.000: the two are level
# independent units from which an interval is of use: with two, the quantile of Student's t is 12.7
FEWEST = 3
Outcome = Literal["ahead", "level", "behind", "undecided"]


@dataclass(frozen=True)
class Verdict:
    compared: str
    against: str
    metric: str
    difference: float  # `compared` minus `against`, in the metric
    interval: tuple[float, float] | None
    """95 % interval of the difference; None where none was estimated, and the difference alone
    decides.
    """
    outcome: Outcome
    n: int | None = None  # number of independent units of a comparison that they leave undecided


def compare(
    compared: str,
    against: str,
    metric: str,
    difference: float,
    interval: tuple[float, float] | None = None,
    lower_is_better: bool = False,
    n: int | None = None,
) -> Verdict:
    """Verdict on `difference`, which `n` independent units give; None for a difference without an
    interval.
    """
    if n is not None and interval is not None and abs(difference) >= TOLERANCE:
        shown = interval if interval[0] < interval[1] else None
        if n < FEWEST or shown is None:
            return Verdict(compared, against, metric, difference, shown, "undecided", n)
    low, high = interval or (difference, difference)
    outcome: Outcome = "level"
    if abs(difference) >= TOLERANCE and not low <= 0 <= high:
        outcome = "ahead" if (difference > 0) != lower_is_better else "behind"
    return Verdict(compared, against, metric, difference, interval, outcome)


def sentence(verdict: Verdict) -> str:
    """The verdict in words, with the difference and its interval."""
    over = "" if verdict.interval is None else " ({:+.3f} to {:+.3f})".format(*verdict.interval)
    names = (verdict.compared, verdict.against)
    signed = f"{verdict.difference:+.3f} {verdict.metric}{over}"
    if verdict.outcome == "undecided":
        few = (
            f"n = {verdict.n}"
            if (verdict.n or 0) < FEWEST
            else f"all {verdict.n:,} differ by the same"
        )
        return "{} against {}: ".format(*names) + f"{signed}, undecided, {few}."
    if verdict.outcome == "level":
        return "{} is level with {}: ".format(*names) + f"{signed}."
    relation = "is ahead of" if verdict.outcome == "ahead" else "is behind"
    return (
        f"{names[0]} {relation} {names[1]} by {abs(verdict.difference):.3f} {verdict.metric}{over}."
    )


@dataclass(frozen=True)
class Closed:
    """Percent of a gap that a method closes, with its 95 % interval; over 100 where it is better
    than the ceiling.
    """

    name: str
    percent: float
    low: float
    high: float


@dataclass(frozen=True)
class Gap:
    """Gap of a column between the best trivial method and a ceiling, each by name and score, and
    who closes how much.

    `model` and `baseline`, the best of each, are None where the ceiling is not clearly better:
    there is no scale.
    """

    column: str
    zero: tuple[str, float]
    ceiling: tuple[str, float]
    model: Closed | None = None
    baseline: Closed | None = None


def gap_words(gap: Gap) -> str:
    """The gap in words that follow the name of the model's row, if there is a scale."""
    zero, ceiling = (f"{name} ({score:.3f})" for name, score in (gap.zero, gap.ceiling))
    if gap.model is None or gap.baseline is None:
        return f"no scale: {ceiling} is not clearly better than {zero}"
    percent, low, high = (
        round(number) for number in (gap.model.percent, gap.model.low, gap.model.high)
    )
    return (
        f"closes {percent} % ({low} to {high}) of the gap from {zero} to {ceiling}; the best baseline, "
        f"{gap.baseline.name}, closes {round(gap.baseline.percent)} %"
    )
