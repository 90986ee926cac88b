"""Scores of several methods on the same cells: tables, paired differences with 95 % intervals, and
verdicts.

A method is features plus a classifier (a row of the table). A condition is a number of training
cells, or what the cells have lost (a column). All methods classify the same cells in the same
repetitions, which differ in the seeds of folds, the draws of training cells, or the draws of what
cells lose.

The classified cells and the repetitions vary, as in a crossed design. The variance of the mean
difference is the sum of both parts, each from its own clusters (two-way clustering: Cameron,
Gelbach & Miller 2011, J. Bus. Econ. Stat. 29:238). The part common to both is not subtracted, so
intervals are too wide rather than too narrow. The quantile is Student's with Satterthwaite's
degrees of freedom. Cells of different folds count as independent (Bayle, Bayle, Janson & Mackey
2020, "Cross-validation confidence intervals for test error"). The interval does not cover other
pretraining seeds, training cells, donors or batches.

The share p of a gap that a method closes is a ratio of two such differences. Its interval is the
one of the linear combination score - p * ceiling - (1 - p) * zero over the same cells and
repetitions, divided by the gap (delta method).

F1 is not a mean over cells. Its linear terms by cell are used instead (infinitesimal jackknife,
Efron 1981), which is coarse for classes of a few cells.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, product
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit

from cellmill.evaluate.methods import HALF_LABELS, MAJORITY, ByMethod
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
    compare,
)

# names in words of the metrics of classes
CLASS_METRICS = {"accuracy": "accuracy", "macro_f1": "macro-F1", "weighted_f1": "weighted F1"}
NOT_TESTED = -1  # predicted class of a cell that a repetition does not test
LEVEL = 0.95  # of the intervals
MIN_VARIANCE = 1e-20  # below it the methods differ by the same in every cell
LARGEST_CLASS = ScoredMethod("largest class")


class Estimate(NamedTuple):
    """Mean of paired differences with its 95 % interval."""

    mean: float
    low: float
    high: float
    cells_se: float  # standard error over cells only


class ClosedShare(NamedTuple):
    """Share of a gap that a method closes, with its 95 % interval."""

    share: float
    low: float
    high: float


def cell_scores(metric: str, labels: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Scores whose mean over the tested cells of a repetition is its `metric`, one of CLASS_METRICS.

    `labels`, `(cells,)`, and `predicted`, `(repetitions, cells)`, are class ids. Returns
    float64 of the shape of `predicted`, NaN for cells that are not tested.
    """
    scores = np.full(predicted.shape, np.nan)
    for row, classes in zip(scores, predicted):
        is_tested = classes != NOT_TESTED
        true = labels[is_tested]
        guessed = classes[is_tested]
        if metric == "accuracy":
            row[is_tested] = true == guessed
        else:
            row[is_tested] = _compute_f1_terms(true, guessed, is_weighted=metric == "weighted_f1")
    return scores


def _compute_f1_terms(true: np.ndarray, guessed: np.ndarray, is_weighted: bool) -> np.ndarray:
    """Linear terms of F1: `F1 + n * dF1/dw_i`, whose mean over cells is F1.

    `n` is the number of cells, `w_i` the weight of cell i in F1.
    """
    n = len(true)
    classes = np.union1d(true, guessed)
    is_class = true[:, None] == classes  # (cells, classes), as are is_guess and scaled_derivatives
    is_guess = guessed[:, None] == classes
    is_hit = is_class & is_guess
    sizes = is_class.sum(0) + is_guess.sum(0)
    f1 = 2 * is_hit.sum(0) / sizes
    share = is_class.mean(0) if is_weighted else np.full(len(classes), 1 / len(classes))
    # dF1/dw_i of each class, times its size: F1 is 2 hits / size, sums over the weighted cells
    scaled_derivatives = 2.0 * is_hit - f1 * (is_class.astype(float) + is_guess)
    terms: np.ndarray = n * (scaled_derivatives / sizes) @ share + share @ f1
    if is_weighted:  # n dshare/dw_i = is_class - share: shares depend on the weights, too
        terms = terms + is_class @ f1 - share @ f1
    return terms


def paired_difference(scores: np.ndarray, other_scores: np.ndarray) -> Estimate:
    """Mean of `scores` minus `other_scores`, two results of `cell_scores` of the same metric."""
    differences = scores - other_scores
    is_tested = np.isfinite(differences)
    mean = float(differences[is_tested].mean())
    # what each cell and repetition adds to the mean; cells and repetitions are the clusters
    shares = np.where(is_tested, differences - mean, 0) / is_tested.sum()
    cells_variance, n_cells = _cluster_variance(shares.sum(0)[is_tested.any(0)])
    repetitions_variance, n_repetitions = _cluster_variance(shares.sum(1))
    variance = cells_variance + repetitions_variance
    if variance <= MIN_VARIANCE:
        return Estimate(mean, mean, mean, 0.0)
    parts = ((cells_variance, n_cells), (repetitions_variance, n_repetitions))
    freedom = variance**2 / sum(part**2 / max(n - 1, 1) for part, n in parts)
    half_width = float(stdtrit(freedom, (1 + LEVEL) / 2) * variance**0.5)
    return Estimate(mean, mean - half_width, mean + half_width, cells_variance**0.5)


def _cluster_variance(sums: np.ndarray) -> tuple[float, int]:
    """Variance from the sums of clusters, and the number of clusters; 0 with one cluster."""
    n = len(sums)
    variance = float(n / (n - 1) * (sums**2).sum()) if n > 1 else 0.0
    return variance, n


def share_closed(scores: np.ndarray, zero: np.ndarray, ceiling: np.ndarray) -> ClosedShare | None:
    """Share of the gap from `zero` to `ceiling` that `scores` close, and its interval; None if the
    gap may be 0 or less.

    All are results of `cell_scores` of the same metric; a cell counts if all of them test it.
    """
    is_tested = np.isfinite(scores + zero + ceiling)
    scores, zero, ceiling = (
        np.where(is_tested, values, np.nan) for values in (scores, zero, ceiling)
    )
    gap = paired_difference(ceiling, zero)
    if gap.low <= 0:
        return None
    share = paired_difference(scores, zero).mean / gap.mean
    # 0 on average; its interval is the one of the share, times the gap
    rest = paired_difference(scores - zero, share * (ceiling - zero))
    return ClosedShare(share, share + rest.low / gap.mean, share + rest.high / gap.mean)


@dataclass
class ScoreColumn:
    """Scores of all methods by one metric under one condition."""

    heading: str
    metric_name: str  # in words, as verdicts have it
    scores: ByMethod  # as `cell_scores` returns them
    lower_is_better: bool = False
    n_units: int | None = None  # independent units, unless these are the columns of `scores`
    # scores of methods, the best of which closes 0 % of the gap
    trivial: ByMethod = field(default_factory=dict)
    ceiling: tuple[ScoredMethod, np.ndarray] | None = None  # closes 100 %

    def mean(self, method: ScoredMethod) -> float:
        """Mean over repetitions and cells."""
        return float(np.nanmean(self.scores[method]))

    def best(self, among: Iterable[ScoredMethod]) -> ScoredMethod:
        """The method with the best mean."""
        choose: Callable[..., ScoredMethod] = min if self.lower_is_better else max
        return choose(among, key=self.mean)

    def select_kind(self, kind: str) -> list[ScoredMethod]:
        return [method for method in self.scores if method.kind == kind]

    def best_model(self) -> ScoredMethod:
        return self.best(self.select_kind("model"))

    def compare(self, method: ScoredMethod, other: ScoredMethod) -> Verdict:
        """Verdict on `method` against `other` over the cells that both have scores of."""
        difference = self.difference(method, other)
        return compare(
            method.name,
            other.name,
            self.metric_name,
            difference.mean,
            (difference.low, difference.high),
            self.lower_is_better,
            difference.n,
        )

    def compare_best(self) -> Verdict:
        """The best method of the model against the best baseline.

        Both are chosen by their scores on the tested cells. This favours the baselines, because
        there are more of them.
        """
        return self.compare(self.best_model(), self.best(self.select_kind("baseline")))

    def difference(self, method: ScoredMethod, other: ScoredMethod) -> Difference:
        """Paired difference `method` minus `other`, with its interval."""
        scores = self.scores[method]
        other_scores = self.scores[other]
        estimate = paired_difference(scores, other_scores)
        n = self._count_units(scores - other_scores)
        return Difference(self.heading, method.name, other.name, *estimate, n)

    def differences(self) -> list[Difference]:
        """Every method on the model's own features minus every other."""
        trained = [method for method in self.scores if method.network == "trained"]
        others = [method for method in self.scores if method.network != "trained"]
        return [self.difference(*pair) for pair in product(trained, others)]

    def _count_units(self, scores: np.ndarray) -> int:
        return self.n_units or int(np.isfinite(scores).any(axis=0).sum())

    def gap(self) -> Gap | None:
        """What the best methods close of the gap between the best trivial method and the ceiling;
        None without these.
        """
        if not self.trivial or self.ceiling is None:
            return None
        sign = -1 if self.lower_is_better else 1
        ceiling_method, ceiling = self.ceiling
        zero_method, zero = max(
            self.trivial.items(), key=lambda item: sign * float(np.nanmean(item[1]))
        )
        is_tested = np.isfinite(zero + ceiling)
        if not is_tested.any():
            return None
        gap = Gap(
            self.heading,
            (zero_method.name, float(zero[is_tested].mean())),
            (ceiling_method.name, float(ceiling[is_tested].mean())),
        )
        closed = []
        for method in (self.best_model(), self.best(self.select_kind("baseline"))):
            scores = self.scores[method]
            if self._count_units(scores + zero + ceiling) < MIN_UNITS:
                return gap
            part = share_closed(sign * scores, sign * zero, sign * ceiling)
            if part is None:
                return gap
            closed.append(Closed(method.name, 100 * part.share, 100 * part.low, 100 * part.high))
        return replace(gap, model=closed[0], baseline=closed[1])


@dataclass
class ClassPredictions:
    """Predicted classes of the same cells by method, condition and repetition."""

    labels: np.ndarray  # class of each cell; text
    repetitions: int
    other_classes: tuple[str, ...] = ()  # classes that no cell has and a method may predict
    # class of each cell, text, by `labels.predict_from_other_half`; "" for none
    ceiling_labels: np.ndarray | None = None
    by_condition: dict[str, ByMethod] = field(default_factory=dict)
    """Class ids `(repetitions, cells)` int64 of each method, NOT_TESTED for cells that a
    repetition does not test.
    """

    @cached_property
    def classes(self) -> np.ndarray:
        """Classes of cells and of predictions, sorted: a class id is an index into it."""
        return np.union1d(self.labels, np.array(self.other_classes, dtype=self.labels.dtype.type))

    def record(self, condition: str, repetition: int, cells: np.ndarray, classes: ByMethod) -> None:
        """Keep the predicted `classes` (text) of `cells` (indices)."""
        by_method = self.by_condition.setdefault(condition, {})
        for method, predicted in classes.items():
            if method not in by_method:
                by_method[method] = np.full((self.repetitions, len(self.labels)), NOT_TESTED)
            by_method[method][repetition, cells] = np.searchsorted(self.classes, predicted)

    @cached_property
    def true_ids(self) -> np.ndarray:
        """Class id of each cell, `(cells,)` int64."""
        return np.searchsorted(self.classes, self.labels)

    def column(self, condition: str, metric: str, heading: str, metric_name: str) -> ScoreColumn:
        """Scores by `metric`, one of CLASS_METRICS; verdicts call it `metric_name`."""
        class_ids_by_method = self.by_condition[condition]
        scores = {
            method: cell_scores(metric, self.true_ids, class_ids)
            for method, class_ids in class_ids_by_method.items()
        }
        is_tested = next(iter(class_ids_by_method.values())) != NOT_TESTED
        return self._add_gap(ScoreColumn(heading, metric_name, scores), metric, is_tested)

    def _add_gap(self, column: ScoreColumn, metric: str, is_tested: np.ndarray) -> ScoreColumn:
        """The column with the trivial methods and the ceiling, if the metric has a ceiling.

        `is_tested` is bool, `(repetitions, cells)`.
        """
        if self.ceiling_labels is None:
            return column
        if metric != "accuracy" and (is_tested & (self.ceiling_labels == "")).any():
            return column  # an F1 over only some of the cells is not comparable
        id_of_class = dict(zip(self.classes, range(len(self.classes)))) | {"": NOT_TESTED}
        unknown = len(id_of_class)  # the id of no class, so never right
        ceiling = np.array([id_of_class.get(name, unknown) for name in self.ceiling_labels])
        largest = np.bincount(self.true_ids).argmax()

        def score_tested(predicted: Any) -> np.ndarray:
            return cell_scores(metric, self.true_ids, np.where(is_tested, predicted, NOT_TESTED))

        largest_scores = score_tested(largest)
        majority_scores = column.scores.get(MAJORITY, largest_scores)
        trivial = {MAJORITY: majority_scores, LARGEST_CLASS: largest_scores}
        return replace(column, trivial=trivial, ceiling=(HALF_LABELS, score_tested(ceiling)))

    def confusion(self, condition: str, method: ScoredMethod) -> Confusion:
        """Predictions of a method by class, all repetitions together."""
        n = len(self.classes)
        counts = np.zeros((n, n), np.int64)
        for class_ids in self.by_condition[condition][method]:
            is_tested = class_ids != NOT_TESTED
            np.add.at(counts, (self.true_ids[is_tested], class_ids[is_tested]), 1)
        return Confusion(method.name, self.classes.tolist(), counts.tolist())

    def metric_columns(self, condition: str) -> list[ScoreColumn]:
        """A column for each of CLASS_METRICS."""
        return [
            self.column(condition, metric, metric, name) for metric, name in CLASS_METRICS.items()
        ]

    def accuracies(self) -> list[ScoreColumn]:
        """A column of accuracies for each condition."""
        return [
            self.column(name, "accuracy", name, f"accuracy, {name}") for name in self.by_condition
        ]


def table_rows(columns: Iterable[ScoreColumn]) -> list[Row]:
    """A row for each method: mean, sd and single values over repetitions in each column that has
    the method.
    """
    scores: dict[ScoredMethod, dict[str, Score]] = {}
    for column in columns:
        for method, values in column.scores.items():
            by_repetition = np.nanmean(values, axis=1)
            sd = float(by_repetition.std(ddof=len(by_repetition) > 1))
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
    heading of the first column, ranks the rows, so its highest value must be the best one. Columns
    that are not `judged`, by default all, are only in the table.
    """
    judged = columns if judged is None else judged
    if rows is None:
        rows = table_rows(columns)
    if verdicts is None:
        verdicts = [column.compare_best() for column in judged]
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
