"""Predictions of several methods under several conditions: the table, its paired differences and its verdicts.

A method is features and a classifier (a row); a condition is a number of training cells, or what cells lost (a
column). All methods classify the same cells in the same repetitions.
"""

from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from cellmill.evaluate.paired import NOT_TESTED, cell_scores, paired_difference
from cellmill.runs.verdict import Verdict, compare

EMBEDDING = "embedding"
"""Name of the model's features; other names are baselines, but for those of `EXTERNAL`."""
UNTRAINED = "untrained"
"""Name of the features of the same architecture with initial weights, a baseline."""

EXTERNAL = "external: "
"""Beginning of the names of features by models of other packages: shown beside baselines, and none of them."""


@dataclass
class ScoreColumn:
    """One metric under one condition."""

    heading: str
    metric: str  # in words, as verdicts say it
    scores: dict[str, np.ndarray]  # of each method, as `cell_scores` returns them
    lower_is_better: bool = False
    n_units: int | None = None  # independent units, where these are not the columns of `scores`

    def mean(self, name: str) -> float:
        return float(np.nanmean(self.scores[name]))

    def best(self, own: bool, among: Collection[str] | None = None) -> str:
        """Method with the best mean: of the embedding, or of the baselines."""
        kind = "model" if own else "baseline"
        names = [name for name in self.scores if kind_of(name) == kind and (among is None or name in among)]
        return (min if self.lower_is_better else max)(names, key=self.mean)

    def compare(self, own: str, other: str) -> Verdict:
        found = paired_difference(self.scores[own], self.scores[other])
        tested = np.isfinite(self.scores[own] - self.scores[other]).any(axis=0)
        n = int(tested.sum()) if self.n_units is None else self.n_units
        interval = found.low, found.high
        return compare(own, other, self.metric, found.mean, interval, self.lower_is_better, n)


@dataclass
class Predictions:
    """Predicted classes of the same cells by method, condition and repetition."""

    labels: np.ndarray  # class of each cell; text
    repetitions: int
    others: tuple[str, ...] = ()  # classes that no cell has and a method may predict
    by_condition: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    """Class numbers `(repetitions, cells)` int64 of each method, NOT_TESTED where a repetition does not test a cell."""

    @cached_property
    def classes(self) -> np.ndarray:
        """Classes of cells and of predictions, sorted: a class number is a place in it."""
        return np.union1d(self.labels, np.array(self.others, dtype=self.labels.dtype.type))

    def record(self, condition: str, name: str, repetition: int, cells: np.ndarray, classes: np.ndarray) -> None:
        """Keep the predicted `classes` (text) of `cells` (indices)."""
        methods = self.by_condition.setdefault(condition, {})
        if name not in methods:
            methods[name] = np.full((self.repetitions, len(self.labels)), NOT_TESTED)
        methods[name][repetition, cells] = np.searchsorted(self.classes, classes)

    def column(self, condition: str, metric: str, heading: str, words: str) -> ScoreColumn:
        """Scores by `metric`: accuracy, macro_f1 or weighted_f1."""
        numbers = np.searchsorted(self.classes, self.labels)
        methods = self.by_condition[condition]
        return ScoreColumn(heading, words, {name: cell_scores(metric, numbers, of) for name, of in methods.items()})

    def confusion(self, condition: str, name: str) -> dict[str, Any]:
        """Predictions of a method by class, all repetitions together, as `TaskResult.confusion`."""
        classes, truth = self.classes, np.searchsorted(self.classes, self.labels)
        counts = np.zeros((len(classes), len(classes)), np.int64)
        for of_cells in self.by_condition[condition][name]:
            tested = of_cells != NOT_TESTED
            np.add.at(counts, (truth[tested], of_cells[tested]), 1)
        return {"row": name, "classes": classes.tolist(), "counts": counts.tolist()}

    def accuracies(self) -> list[ScoreColumn]:
        """A column for each condition."""
        return [self.column(name, "accuracy", name, f"accuracy, {name}") for name in self.by_condition]


def is_own(name: str) -> bool:
    return name.startswith(EMBEDDING)


def kind_of(name: str) -> str:
    """Kind of a method's row: model, external or baseline."""
    return "model" if is_own(name) else "external" if name.startswith(EXTERNAL) else "baseline"


def table_rows(columns: Iterable[ScoreColumn]) -> list[dict[str, Any]]:
    """A row for each method: of each column its mean over repetitions, their standard deviation and single values.

    With one repetition the standard deviation is 0. None where a row lacks a column.
    """
    columns = list(columns)
    rows = []
    for name in dict.fromkeys(name for column in columns for name in column.scores):
        row: dict[str, Any] = {"name": name, "kind": kind_of(name)}
        for column in columns:
            values = np.nanmean(column.scores[name], axis=1) if name in column.scores else None
            row[f"{column.heading}_mean"] = None if values is None else column.mean(name)
            row[f"{column.heading}_sd"] = None if values is None else float(values.std(ddof=len(values) > 1))
            row[f"{column.heading}_repetitions"] = None if values is None else values.tolist()
        rows.append(row)
    return rows


def differences(columns: Iterable[ScoreColumn]) -> list[dict[str, Any]]:
    """Every method of the embedding minus every other, in each column."""
    return [
        {"column": column.heading, "compared": own, "against": other}
        | asdict(paired_difference(column.scores[own], column.scores[other]))
        for column in columns
        for own in filter(is_own, column.scores)
        for other in column.scores
        if not is_own(other)
    ]


def against_best(columns: Iterable[ScoreColumn]) -> list[Verdict]:
    """The best method of the embedding against the best baseline, in each column.

    Both are chosen by their scores on the tested cells; the baselines, which are more, gain more by it.
    """
    return [column.compare(column.best(own=True), column.best(own=False)) for column in columns]
