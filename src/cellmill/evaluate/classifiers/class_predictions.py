"""Predicted classes of cells by several methods, and their scores by class metrics.

A method is features plus a classifier: a row of the table. A condition is a number of fitted cells, or
a level of degradation: a column. All methods classify the same cells in the same repetitions.

F1 is not a mean over cells. Its linear terms by cell are used instead (infinitesimal jackknife,
Efron 1981), which is coarse for classes of a few cells.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from cellmill.evaluate.methods import HALF_LABELS, MAJORITY, ByMethod
from cellmill.evaluate.scores import ScoreColumn
from cellmill.runs.results import Confusion, ScoredMethod

# names in words of the metrics of classes
CLASS_METRICS = {"accuracy": "accuracy", "macro_f1": "macro-F1", "weighted_f1": "weighted F1"}
NOT_TESTED = -1  # class id for a cell that a repetition does not test
# largest class of the cells that a column tests; MAJORITY is the largest class of the fitted cells
LARGEST_CLASS = ScoredMethod("largest class")


def cell_scores(metric: str, labels: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Scores whose mean over the tested cells of a repetition is its `metric`, one of CLASS_METRICS.

    `labels`, `(cells,)`, and `predicted`, `(repetitions, cells)`, are class ids. Returns
    float64 of the shape of `predicted`, NaN for cells that are not tested.
    """
    scores = np.full(predicted.shape, np.nan)
    for row, predicted_ids in zip(scores, predicted):
        is_tested = predicted_ids != NOT_TESTED
        true = labels[is_tested]
        tested = predicted_ids[is_tested]
        if metric == "accuracy":
            row[is_tested] = true == tested
        else:
            row[is_tested] = _compute_f1_terms(true, tested, is_weighted=metric == "weighted_f1")
    return scores


def _compute_f1_terms(true: np.ndarray, predicted: np.ndarray, is_weighted: bool) -> np.ndarray:
    """Linear terms of F1: `F1 + n * dF1/dw_i`, whose mean over cells is F1.

    `n` is the number of cells, `w_i` the weight of cell i in F1.
    """
    n = len(true)
    present_ids = np.union1d(true, predicted)
    # (cells, classes)
    is_class = true[:, None] == present_ids
    is_predicted = predicted[:, None] == present_ids
    is_hit = is_class & is_predicted
    # F1 of a class is twice its hits by its true and predicted cells together
    n_true_and_predicted = is_class.sum(0) + is_predicted.sum(0)
    f1 = 2 * is_hit.sum(0) / n_true_and_predicted
    share = is_class.mean(0) if is_weighted else np.full(len(present_ids), 1 / len(present_ids))
    # (cells, classes): dF1/dw_i of each class, by the quotient rule, as both counts are weighted sums
    derivatives = 2.0 * is_hit - f1 * (is_class.astype(float) + is_predicted)
    derivatives /= n_true_and_predicted
    terms: np.ndarray = n * derivatives @ share + share @ f1
    if is_weighted:  # n dshare/dw_i = is_class - share: shares depend on the weights, too
        terms = terms + is_class @ f1 - share @ f1
    return terms


@dataclass
class ClassPredictions:
    """Predicted classes of the same cells by method, condition and repetition."""

    labels: np.ndarray  # class of each cell; text
    repetitions: int
    other_classes: tuple[str, ...] = ()  # classes that no cell has and a method may predict
    # class of each cell, text, by `ceiling.predict_ceiling_labels`; "" for none
    ceiling_labels: np.ndarray | None = None
    # class ids `(repetitions, cells)` int64 of each method; NOT_TESTED for cells that a repetition
    # does not test
    by_condition: dict[str, ByMethod] = field(default_factory=dict)

    @cached_property
    def class_names(self) -> np.ndarray:
        """Classes of cells and of predictions, sorted: a class id is an index into it."""
        return np.union1d(self.labels, np.array(self.other_classes, dtype=self.labels.dtype.type))

    def record(
        self, condition: str, repetition: int, cells: np.ndarray, predicted: ByMethod
    ) -> None:
        """Keep the `predicted` classes (text) of `cells` (indices); all are in `class_names`."""
        by_method = self.by_condition.setdefault(condition, {})
        for method, names in predicted.items():
            if method not in by_method:
                by_method[method] = np.full((self.repetitions, len(self.labels)), NOT_TESTED)
            assert np.isin(names, self.class_names).all(), (
                "a predicted class is neither a label nor in other_classes"
            )
            by_method[method][repetition, cells] = np.searchsorted(self.class_names, names)

    @cached_property
    def true_ids(self) -> np.ndarray:
        """Class id of each cell, `(cells,)` int64."""
        return np.searchsorted(self.class_names, self.labels)

    def column(self, condition: str, metric: str, heading: str, metric_name: str) -> ScoreColumn:
        """Scores by `metric`, one of CLASS_METRICS; verdicts call it `metric_name`."""
        class_ids_by_method = self.by_condition[condition]
        scores = {
            method: cell_scores(metric, self.true_ids, class_ids)
            for method, class_ids in class_ids_by_method.items()
        }
        is_tested = next(iter(class_ids_by_method.values())) != NOT_TESTED
        return self._add_references(ScoreColumn(heading, metric_name, scores), metric, is_tested)

    def _add_references(
        self, column: ScoreColumn, metric: str, is_tested: np.ndarray
    ) -> ScoreColumn:
        """The column with the trivial methods and the ceiling, if the metric has a ceiling.

        `is_tested` is bool, `(repetitions, cells)`.
        """
        if self.ceiling_labels is None:
            return column
        if metric != "accuracy" and (is_tested & (self.ceiling_labels == "")).any():
            return column  # an F1 over only some of the cells is not comparable
        id_of_class = {name: number for number, name in enumerate(self.class_names)}
        id_of_class[""] = NOT_TESTED
        for name in self.ceiling_labels:  # a class that no cell has: its id is never right
            id_of_class.setdefault(name, len(id_of_class))
        ceiling = np.array([id_of_class[name] for name in self.ceiling_labels])
        largest = np.bincount(self.true_ids[is_tested.any(0)]).argmax()

        def score_tested(predicted: Any) -> np.ndarray:
            return cell_scores(metric, self.true_ids, np.where(is_tested, predicted, NOT_TESTED))

        trivial = {LARGEST_CLASS: score_tested(largest)}
        if MAJORITY in column.scores:
            trivial = {MAJORITY: column.scores[MAJORITY], **trivial}
        return replace(column, trivial=trivial, ceiling=(HALF_LABELS, score_tested(ceiling)))

    def look_up(self, condition: str, table: np.ndarray) -> ByMethod:
        """Scores `(repetitions, cells)` by method: the entry of `table`, `(classes, classes)`, in the row of
        the true and the column of the predicted class; NaN for cells that are not tested.
        """
        scores = {}
        for method, class_ids in self.by_condition[condition].items():
            entries = table[self.true_ids, class_ids]
            scores[method] = np.where(class_ids == NOT_TESTED, np.nan, entries)
        return scores

    def confusion(self, condition: str, method: ScoredMethod) -> Confusion:
        """Predictions of a method by class, all repetitions together."""
        n = len(self.class_names)
        counts = np.zeros((n, n), np.int64)
        for class_ids in self.by_condition[condition][method]:
            is_tested = class_ids != NOT_TESTED
            np.add.at(counts, (self.true_ids[is_tested], class_ids[is_tested]), 1)
        return Confusion(method.name, self.class_names.tolist(), counts.tolist())

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
