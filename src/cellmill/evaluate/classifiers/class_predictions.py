"""Predicted classes of cells by several methods, and the scores of these predictions.

A method is a classifier on features of cells, and a row of the table. A condition is a column of the
table, such as a number of fitted cells or a level of degradation. All methods classify the same cells in
the same repetitions.

Scores are means over cells, but F1 is not such a mean. So the terms of a linear approximation of F1 are
used as scores of cells (infinitesimal jackknife, Efron 1981). The approximation is coarse for classes of
a few cells.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from cellmill.evaluate.methods import HALF_LABELS, MAJORITY, ByMethod
from cellmill.evaluate.scores import ScoreColumn
from cellmill.runs.results import Confusion, ScoredMethod

# metrics of predicted classes, with the names that verdicts use
CLASS_METRICS = {"accuracy": "accuracy", "macro_f1": "macro-F1", "weighted_f1": "weighted F1"}
NOT_TESTED = -1  # class id of a cell that a repetition does not test
# A trivial method that predicts the largest class of the tested cells. (MAJORITY predicts the largest
# class of the fitted cells.)
LARGEST_CLASS = ScoredMethod("largest class")


def score_cells(metric: str, labels: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Score each cell by `metric`, one of CLASS_METRICS: `(repetitions, cells)` float64.

    The mean of the scores over the tested cells of a repetition is the metric of that repetition. Cells
    that are not tested have NaN. `labels`, `(cells,)`, and `predicted`, `(repetitions, cells)`, are class
    ids.
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
    """Compute the linear terms of F1, `(cells,)`. Their mean over cells is F1.

    The term of cell i is `F1 + n * dF1/dw_i`, where `n` is the number of cells and `w_i` is the weight of
    the cell in F1. `true` and `predicted` are class ids. With `is_weighted`, F1 is the mean over classes
    weighted by their shares of the cells, otherwise the plain mean.
    """
    n_cells = len(true)
    present_ids = np.union1d(true, predicted)
    # these masks are (cells, classes)
    is_class = true[:, None] == present_ids
    is_predicted = predicted[:, None] == present_ids
    is_hit = is_class & is_predicted

    # F1 of a class is twice its hits, divided by the sum of its true cells and its predicted cells
    n_true_and_predicted = is_class.sum(0) + is_predicted.sum(0)
    f1 = 2 * is_hit.sum(0) / n_true_and_predicted
    share = is_class.mean(0) if is_weighted else np.full(len(present_ids), 1 / len(present_ids))

    # dF1/dw_i of each class, (cells, classes), by the quotient rule: hits and numbers are both sums of
    # the weights
    derivatives = 2.0 * is_hit - f1 * (is_class.astype(float) + is_predicted)
    derivatives /= n_true_and_predicted
    terms: np.ndarray = n_cells * derivatives @ share + share @ f1
    if is_weighted:
        # the share of a class depends on the weights too: n * dshare/dw_i = is_class - share
        terms = terms + is_class @ f1 - share @ f1
    return terms


@dataclass
class ClassPredictions:
    """Predicted classes of the same cells, by condition, method and repetition."""

    labels: np.ndarray  # (cells,) text: true class of each cell
    repetitions: int  # number of repetitions
    other_classes: tuple[str, ...] = ()  # classes that methods may predict, but that no cell has
    # (cells,) text: classes that the ceiling predicts (`ceiling.predict_ceiling_labels`), "" for none
    ceiling_labels: np.ndarray | None = None
    # class ids of each condition and method, (repetitions, cells) int64; NOT_TESTED for cells that a
    # repetition does not test
    by_condition: dict[str, ByMethod] = field(default_factory=dict)

    @cached_property
    def class_names(self) -> np.ndarray:
        """Names of all classes that cells have or methods may predict, sorted.

        A class id is an index of this array.
        """
        return np.union1d(self.labels, np.array(self.other_classes, dtype=self.labels.dtype.type))

    def record(
        self, condition: str, repetition: int, cells: np.ndarray, predicted: ByMethod
    ) -> None:
        """Keep the `predicted` classes (text) of `cells` (indices). All must be in `class_names`."""
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
        """True class id of each cell, `(cells,)` int64."""
        return np.searchsorted(self.class_names, self.labels)

    def column(self, condition: str, metric: str, heading: str, metric_name: str) -> ScoreColumn:
        """Make the column of a condition by `metric`, one of CLASS_METRICS.

        `heading` is the heading of the column. Verdicts call the metric `metric_name`.
        """
        class_ids_by_method = self.by_condition[condition]
        scores = {
            method: score_cells(metric, self.true_ids, class_ids)
            for method, class_ids in class_ids_by_method.items()
        }
        is_tested = next(iter(class_ids_by_method.values())) != NOT_TESTED
        return self._add_references(ScoreColumn(heading, metric_name, scores), metric, is_tested)

    def _add_references(
        self, column: ScoreColumn, metric: str, is_tested: np.ndarray
    ) -> ScoreColumn:
        """Return the column with trivial methods and a ceiling, if the metric has a ceiling.

        `is_tested`, `(repetitions, cells)` bool, marks the tested cells.
        """
        if self.ceiling_labels is None:
            return column
        if metric != "accuracy" and (is_tested & (self.ceiling_labels == "")).any():
            # the ceiling has no label for some tested cells, and an F1 over fewer cells differs
            return column
        id_of_class = {name: number for number, name in enumerate(self.class_names)}
        id_of_class[""] = NOT_TESTED
        # the ceiling may predict a class that is not in `class_names`: its new id is never right
        for name in self.ceiling_labels:
            id_of_class.setdefault(name, len(id_of_class))
        ceiling = np.array([id_of_class[name] for name in self.ceiling_labels])
        largest = np.bincount(self.true_ids[is_tested.any(0)]).argmax()

        def score_tested(predicted: Any) -> np.ndarray:
            return score_cells(metric, self.true_ids, np.where(is_tested, predicted, NOT_TESTED))

        trivial = {LARGEST_CLASS: score_tested(largest)}
        if MAJORITY in column.scores:
            trivial = {MAJORITY: column.scores[MAJORITY], **trivial}
        return replace(column, trivial=trivial, ceiling=(HALF_LABELS, score_tested(ceiling)))

    def look_up(self, condition: str, table: np.ndarray) -> ByMethod:
        """Score each prediction by an entry of `table`, `(classes, classes)`.

        The row of the entry is the true class, and its column is the predicted class. Returns scores by
        method, `(repetitions, cells)`. Cells that are not tested have NaN.
        """
        scores = {}
        for method, class_ids in self.by_condition[condition].items():
            entries = table[self.true_ids, class_ids]
            scores[method] = np.where(class_ids == NOT_TESTED, np.nan, entries)
        return scores

    def confusion(self, condition: str, method: ScoredMethod) -> Confusion:
        """Count the predictions of a method by true and predicted class, over all repetitions."""
        n_classes = len(self.class_names)
        counts = np.zeros((n_classes, n_classes), np.int64)
        for class_ids in self.by_condition[condition][method]:
            is_tested = class_ids != NOT_TESTED
            np.add.at(counts, (self.true_ids[is_tested], class_ids[is_tested]), 1)
        return Confusion(method.name, self.class_names.tolist(), counts.tolist())

    def metric_columns(self, condition: str) -> list[ScoreColumn]:
        """Make a column of a condition for each of CLASS_METRICS."""
        return [
            self.column(condition, metric, metric, name) for metric, name in CLASS_METRICS.items()
        ]

    def accuracies(self) -> list[ScoreColumn]:
        """Make a column of accuracies for each condition."""
        return [
            self.column(name, "accuracy", name, f"accuracy, {name}") for name in self.by_condition
        ]
