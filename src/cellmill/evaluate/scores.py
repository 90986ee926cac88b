"""Scores of several methods on the same units: the table, paired differences, gaps and verdicts.

A method is a row of the table, a metric under one condition a column. `intervals.py` has the
statistics.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import chain, product
from typing import Any

import numpy as np

from cellmill.evaluate.intervals import paired_difference, share_closed
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
    metric_name: str  # in words, as verdicts have it
    scores: ByMethod  # (repetitions, units) float64, NaN for units that are not tested
    lower_is_better: bool = False
    # number of independent units; None if each column of `scores` is one
    n_units: int | None = None
    # scores of trivial methods; the best of them closes 0 % of the gap, the ceiling 100 %
    trivial: ByMethod = field(default_factory=dict)
    ceiling: tuple[ScoredMethod, np.ndarray] | None = None

    def mean(self, method: ScoredMethod) -> float:
        """Mean over repetitions and units."""
        return float(np.nanmean(self.scores[method]))

    def best(self, among: Iterable[ScoredMethod]) -> ScoredMethod:
        """The method with the best mean."""
        choose: Callable[..., ScoredMethod] = min if self.lower_is_better else max
        return choose(among, key=self.mean)

    def select_kind(self, kind: str) -> list[ScoredMethod]:
        """Methods of a kind, such as `baseline`."""
        return [method for method in self.scores if method.kind == kind]

    def best_model(self) -> ScoredMethod:
        """The best method of kind `model`."""
        return self.best(self.select_kind("model"))

    def verdict(self, method: ScoredMethod, other: ScoredMethod) -> Verdict:
        """Verdict on `method` against `other`, over the units that both have scores of."""
        return self.difference(method, other).judge(self.metric_name, self.lower_is_better)

    def best_verdict(self) -> Verdict:
        """Verdict on the best method of the model against the best baseline of all.

        Both are chosen by their scores on the tested cells. This favours the baselines, because
        there are more of them.
        """
        return self.verdict(self.best_model(), self.best(self.select_kind("baseline")))

    def difference(self, method: ScoredMethod, other: ScoredMethod) -> Difference:
        """Paired difference `method` minus `other`, with its interval."""
        scores = self.scores[method]
        other_scores = self.scores[other]
        estimate = paired_difference(scores, other_scores)
        n = self._count_units(scores - other_scores)  # NaN for units that either lacks
        return Difference(
            self.heading,
            method.name,
            other.name,
            estimate.mean,
            estimate.low,
            estimate.high,
            cells_se=estimate.units_se,  # the name in metrics.json
            n=n,
        )

    def differences(self) -> list[Difference]:
        """Difference of every method on the trained model's features to every other method."""
        trained = [method for method in self.scores if method.network == "trained"]
        others = [method for method in self.scores if method.network != "trained"]
        return [self.difference(*pair) for pair in product(trained, others)]

    def _count_units(self, scores: np.ndarray) -> int:
        return self.n_units or int(np.isfinite(scores).any(axis=0).sum())

    def gap(self) -> Gap | None:
        """Gap between the best trivial method and the ceiling, with the shares of it that the best method
        of the model and the best baseline close.

        There are no shares if fewer than MIN_UNITS units are tested, or if the gap may be 0 or less.
        None without a trivial method, a ceiling or a unit that both test.
        """
        if not self.trivial or self.ceiling is None:
            return None
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
        baselines = self.select_kind("baseline")
        if self.best_verdict().outcome == "ahead":
            # an untrained network is no baseline to be ahead of (`TaskResult.best_verdicts`)
            baselines = [
                method for method in baselines if method.network != "untrained"
            ] or baselines
        closed = []
        for method in (self.best_model(), self.best(baselines)):
            scores = self.scores[method]
            n = self._count_units(scores + trivial + ceiling)
            if n < MIN_UNITS:
                return replace(gap, n=n)
            closed_share = share_closed(sign * scores, sign * trivial, sign * ceiling)
            if closed_share is None:
                return gap
            share, low, high = closed_share
            closed.append(Closed(method.name, 100 * share, 100 * low, 100 * high))
        return replace(gap, model=closed[0], baseline=closed[1])


def table_rows(columns: Iterable[ScoreColumn]) -> list[Row]:
    """A row for each method: mean, sd and single values over tested repetitions in each column that
    has the method.
    """
    scores: dict[ScoredMethod, dict[str, Score]] = {}
    for column in columns:
        for method, values in column.scores.items():
            # a repetition may test no unit of a column
            is_tested = np.isfinite(values).any(axis=1)
            if not is_tested.any():
                continue
            tested = np.nanmean(values[is_tested], axis=1)
            sd = float(tested.std(ddof=1)) if len(tested) > 1 else None
            by_repetition = np.full(len(values), None, object)
            by_repetition[is_tested] = tested
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
    """Result with the table, verdicts, differences and gaps of `columns`.

    `rows`, `verdicts` and `differences` replace those of the columns. `metric`, by default the
    heading of the first column, ranks the rows, so its highest value must be the best one. Verdicts,
    differences and gaps are made for the columns `judged` (default: all); the others are only in the
    table.
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
