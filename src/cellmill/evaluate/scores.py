"""Scores of several methods on the same units, with their table, differences, gaps and verdicts.

A row of the table is a method. A column of the table is a metric under one condition, such as accuracy
with 10 labelled cells. `intervals.py` has the statistics.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import chain, product
from typing import Any

import numpy as np

from cellmill.evaluate.intervals import estimate_closed_share, estimate_difference
from cellmill.evaluate.methods import ByMethod
from cellmill.runs.results import (
    MIN_UNITS,
    Closed,
    Confusion,
    Difference,
    Gap,
    Row,
    Score,
    ScoredMethod,
    TaskResult,
    Verdict,
)


@dataclass
class ScoreColumn:
    """Scores of all methods by one metric under one condition."""

    heading: str
    metric_name: str  # name of the metric in words, for verdicts
    scores: ByMethod  # (repetitions, units) float64; NaN for units that are not tested
    lower_is_better: bool = False
    # number of independent units; None if every unit of `scores` is independent
    n_units: int | None = None
    # Scores of trivial methods. The gap runs from the best of these to the ceiling.
    trivial: ByMethod = field(default_factory=dict)
    ceiling: tuple[ScoredMethod, np.ndarray] | None = None

    def mean(self, method: ScoredMethod) -> float:
        """Mean score of a method over repetitions and units."""
        return float(np.nanmean(self.scores[method]))

    def best(self, among: Iterable[ScoredMethod]) -> ScoredMethod:
        """Return the method with the best mean score."""
        choose_best: Callable[..., ScoredMethod] = min if self.lower_is_better else max
        return choose_best(among, key=self.mean)

    def select_kind(self, kind: str) -> list[ScoredMethod]:
        """Return the methods of a kind, such as `baseline`."""
        return [method for method in self.scores if method.kind == kind]

    def best_model(self) -> ScoredMethod:
        """Return the best method of kind `model`."""
        return self.best(self.select_kind("model"))

    def verdict(self, method: ScoredMethod, other: ScoredMethod) -> Verdict:
        """Judge `method` against `other`, over the units for which both have scores."""
        return self.difference(method, other).judge(self.metric_name, self.lower_is_better)

    def best_verdict(self) -> Verdict:
        """Judge the best method of kind `model` against the best method of kind `baseline`.

        Both are chosen by their scores on the tested cells. This favours the baselines, because there are
        more baselines than methods of the model.
        """
        return self.verdict(self.best_model(), self.best(self.select_kind("baseline")))

    def difference(self, method: ScoredMethod, other: ScoredMethod) -> Difference:
        """Estimate the paired difference `method` minus `other`, with its interval."""
        scores = self.scores[method]
        other_scores = self.scores[other]
        estimate = estimate_difference(scores, other_scores)
        n_units = self._count_units(scores - other_scores)  # NaN if either method lacks a score
        return Difference(
            self.heading,
            method.name,
            other.name,
            estimate.mean,
            estimate.low,
            estimate.high,
            cells_se=estimate.units_se,  # metrics.json calls the standard error over units so
            n=n_units,
        )

    def differences(self) -> list[Difference]:
        """Estimate the difference of each method that uses the trained network to each other method."""
        trained = [method for method in self.scores if method.network == "trained"]
        others = [method for method in self.scores if method.network != "trained"]
        return [self.difference(*pair) for pair in product(trained, others)]

    def _count_units(self, scores: np.ndarray) -> int:
        """Count the independent units that have a score in any repetition."""
        return self.n_units or int(np.isfinite(scores).any(axis=0).sum())

    def gap(self) -> Gap | None:
        """Compute the gap between the best trivial method and the ceiling.

        The gap also has the shares that the best method of the model and the best baseline close. There
        are no shares if fewer than MIN_UNITS units are tested, or if the gap may be 0 or less.

        Returns None if the column has no trivial method or no ceiling, or if no unit has both scores.
        """
        if not self.trivial or self.ceiling is None:
            return None

        # the gap itself
        sign = -1 if self.lower_is_better else 1
        ceiling_method, ceiling = self.ceiling
        trivial_method, trivial = max(
            self.trivial.items(), key=lambda item: sign * float(np.nanmean(item[1]))
        )
        is_tested = np.isfinite(trivial + ceiling)
        if not is_tested.any():
            return None
        gap = Gap(
            self.heading,
            (trivial_method.name, float(trivial[is_tested].mean())),
            (ceiling_method.name, float(ceiling[is_tested].mean())),
        )

        # The best baseline. If the model is ahead, an untrained network does not count as a baseline,
        # unless it is the only one (`TaskResult.best_verdicts`).
        baselines = self.select_kind("baseline")
        if self.best_verdict().outcome == "ahead":
            baselines = [
                method for method in baselines if method.network != "untrained"
            ] or baselines

        # the shares of the gap that the best method of the model and the best baseline close
        closed = []
        for method in (self.best_model(), self.best(baselines)):
            scores = self.scores[method]
            n_units = self._count_units(scores + trivial + ceiling)
            if n_units < MIN_UNITS:
                return replace(gap, n=n_units)
            closed_share = estimate_closed_share(sign * scores, sign * trivial, sign * ceiling)
            if closed_share is None:
                return gap
            share, low, high = closed_share
            closed.append(Closed(method.name, 100 * share, 100 * low, 100 * high))
        return replace(gap, model=closed[0], baseline=closed[1])


def table_rows(columns: Iterable[ScoreColumn]) -> list[Row]:
    """Make a row of the table for each method.

    For each column that has the method, the row has the mean score, the standard deviation over
    repetitions, and the score of each repetition. A repetition that tests no unit has no score.
    """
    scores: dict[ScoredMethod, dict[str, Score]] = {}
    for column in columns:
        for method, values in column.scores.items():
            # a repetition may test no unit of a column
            is_tested = np.isfinite(values).any(axis=1)
            if not is_tested.any():
                continue
            means = np.nanmean(values[is_tested], axis=1)
            sd = float(means.std(ddof=1)) if len(means) > 1 else None
            by_repetition = np.full(len(values), None, object)
            by_repetition[is_tested] = means
            score = Score(column.mean(method), sd, by_repetition.tolist())
            scores.setdefault(method, {})[column.heading] = score
    return [Row(method, by_column) for method, by_column in scores.items()]


def tabulate(
    columns: list[ScoreColumn],
    figures: dict[str, Any],
    judged: list[ScoreColumn] | None = None,
    *,
    metric: str | None = None,
    rows: list[Row] | None = None,
    verdicts: list[Verdict] | None = None,
    differences: list[Difference] | None = None,
    confusion: Confusion | None = None,
    notes: Iterable[str] = (),
) -> TaskResult:
    """Make the result of a task: the table, verdicts, differences and gaps of `columns`.

    Verdicts, differences and gaps are made for the columns `judged`, by default for all columns. Other
    columns are only in the table. `metric` is the heading of the column that ranks the rows, by default
    the first column. Higher values of that column must be better.

    `rows`, `verdicts` and `differences` are made from the columns unless they are given.
    """
    judged = columns if judged is None else judged
    if rows is None:
        rows = table_rows(columns)
    if verdicts is None:
        verdicts = [column.best_verdict() for column in judged]
    if differences is None:
        differences = list(chain.from_iterable(map(ScoreColumn.differences, judged)))
    if metric is None:
        metric = columns[0].heading
    ranking = [column for column in columns if column.heading == metric]
    assert not any(column.lower_is_better for column in ranking), (
        f"{metric} ranks rows by the highest"
    )
    gaps = [column.gap() for column in judged]
    return TaskResult(
        rows,
        metric,
        verdicts,
        figures,
        differences=differences,
        confusion=confusion,
        gaps=[gap for gap in gaps if gap is not None],
        lower_is_better=[column.heading for column in columns if column.lower_is_better],
        notes=list(notes),
    )
