"""Classification of cells that lost counts or genes: how well features keep what a cell is.

Each level degrades the counts of the scored cells. Classifiers are trained on degraded cells (matched), or on whole
cells and tested on degraded ones (shifted), in stratified cross-validation, and get the same folds and the same
degraded counts with every kind of features: the embedding; the same architecture untrained; 50 principal components of
the model's training cells; all genes. Shifted, all-genes regression is also trained on whole and degraded cells of all
levels together, the remedy that needs no model.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn.metrics import accuracy_score
from sklearn.model_selection import StratifiedKFold

from cellmill.evaluate.classifiers import classifiers, fit, logistic, read_rows
from cellmill.evaluate.features import Features
from cellmill.evaluate.labelled import labelled_cells
from cellmill.evaluate.score_table import Scores, against_best, table_rows
from cellmill.evaluate.task import Context, TaskResult

MAX_CELLS = 2_000  # cells used at most: each level is embedded and classified again
MIXED = "all genes, trained on all levels + logistic regression"

Degrade = Callable[[sp.csr_matrix, np.random.Generator], sp.csr_matrix]
"""Counts `(cells, genes of the file)` and a generator -> fewer counts."""


def classify_degraded(
    context: Context, task: str, levels: Mapping[str, Degrade], neighbors: int, repeats: int
) -> TaskResult:
    """A row for each features and classifier, a column for whole cells and for each level, matched and shifted.

    Repeats draw both folds and what is lost again.
    """
    if context.reader.ordered:
        return TaskResult(skipped="sequences have no counts or genes to lose")
    options = context.options
    chosen = labelled_cells(context, task, options.folds, "evaluate.folds", MAX_CELLS)
    if isinstance(chosen, TaskResult):
        return chosen
    features = Features(context)
    whole = read_rows(context.reader, np.isin(np.arange(context.reader.n_obs), chosen.cells))
    scores: Scores = {}
    for repeat in range(repeats):
        generator = np.random.Generator(np.random.Philox(key=[options.seed, 1000 + repeat]))
        cells = {"whole": features.of(whole)}
        cells |= {name: features.of(degrade(whole, generator)) for name, degrade in levels.items()}
        splitter = StratifiedKFold(options.folds, shuffle=True, random_state=options.seed + repeat)
        for train, test in splitter.split(np.zeros(len(chosen.labels)), chosen.labels):
            for column, name, accuracy in _fold(cells, chosen.labels, train, test, neighbors):
                scores.setdefault(column, {}).setdefault(name, []).append(accuracy)
    figures = chosen.figures | {"folds": options.folds, "repeats": repeats, "neighbors": neighbors}
    degraded = [column for column in scores if column != "whole"]
    return TaskResult(table_rows(scores), degraded[-1], against_best(scores, degraded), figures)


def _fold(
    cells: Mapping[str, Mapping[str, Any]], labels: np.ndarray, train: np.ndarray, test: np.ndarray, neighbors: int
) -> Iterator[tuple[str, str, float]]:
    """(column, features and classifier, accuracy) of one fold."""
    levels = [level for level in cells if level != "whole"]
    seen, unseen = labels[train], labels[test]
    for kind in cells["whole"]:
        for classifier in classifiers(neighbors, len(train)):
            name = f"{kind} + {classifier}"
            fitted = {}
            for level, features in cells.items():
                fitted[level] = _classifier(classifier, kind, neighbors, len(train))
                fit(fitted[level], features[kind][train], seen)
            yield "whole", name, _accuracy(fitted["whole"], cells["whole"][kind][test], unseen)
            for level in levels:
                yield f"{level}, matched", name, _accuracy(fitted[level], cells[level][kind][test], unseen)
                yield f"{level}, shifted", name, _accuracy(fitted["whole"], cells[level][kind][test], unseen)
    mixed = logistic(with_mean=False)
    profiles = [features["all genes"][train] for features in cells.values()]
    fit(mixed, sp.vstack(profiles, format="csr"), np.tile(seen, len(profiles)))
    for level in levels:
        yield f"{level}, shifted", MIXED, _accuracy(mixed, cells[level]["all genes"][test], unseen)


def _accuracy(classifier: Any, features: Any, labels: np.ndarray) -> float:
    return float(accuracy_score(labels, classifier.predict(features)))


def _classifier(name: str, kind: str, neighbors: int, n_train: int) -> Any:
    if kind == "all genes" and name == "logistic regression":
        return logistic(with_mean=False)  # genes stay sparse
    return classifiers(neighbors, n_train)[name]
