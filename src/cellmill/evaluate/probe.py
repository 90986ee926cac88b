"""Probes of an embedding, and the baselines that it has to beat.

A logistic regression and a kNN classifier predict a label of held-out cells from their embedding in stratified
cross-validation. The same folds judge: the most frequent class, 50 principal components and **all genes** of the
cell (log(1 + counts per 10,000), library size from the cell alone), and the same architecture untrained. Whatever is
fitted, scalers and components included, is fitted on the training cells of a fold. All-genes logistic regression is
hard to beat: a table without it flatters a model.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp
from sklearn.decomposition import PCA
from sklearn.dummy import DummyClassifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score
from sklearn.model_selection import StratifiedKFold
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from cellmill.data.counts_reader import row_sums
from cellmill.runs.verdict import Verdict, compare

MAX_CELLS = 10_000
"""Cells a probe uses at most: all-genes regression over more takes hours, and moves accuracy by less than 0.01."""

LINEAR, KNN = "embedding + logistic regression", "embedding + kNN"
UNTRAINED_LINEAR, UNTRAINED_KNN = "untrained + logistic regression", "untrained + kNN"
PCA_LINEAR, PCA_KNN = "PCA50 + logistic regression", "PCA50 + kNN"
MAJORITY, ALL_GENES = "majority", "all genes + logistic regression"

COMPARED = (
    (LINEAR, (ALL_GENES, PCA_LINEAR, UNTRAINED_LINEAR, MAJORITY)),
    (KNN, (PCA_KNN, UNTRAINED_KNN)),
)


@dataclass(frozen=True)
class Labelled:
    """The cells of a probe."""

    cells: np.ndarray
    """Their positions, ascending; int64."""
    labels: np.ndarray
    """Class of each; text."""
    classes: dict[str, int]
    """Cells of each class that is probed, the largest first."""
    dropped: dict[str, int]
    """Cells of each class that is left out, having fewer of them than there are folds."""
    n_unlabelled: int
    """Cells without a label, left out."""
    n_left_out: int
    """Cells beyond MAX_CELLS, left out by a seeded draw."""


def choose_cells(labels: pd.Series, folds: int, seed: int, max_cells: int = MAX_CELLS) -> Labelled:
    """The cells that can be probed: labelled, of a class with at least one cell for each fold."""
    missing = labels.isna().to_numpy()
    text = labels.astype(str).to_numpy(dtype=object)
    known = np.flatnonzero(~missing)
    drawn = known
    if len(known) > max_cells:
        generator = np.random.Generator(np.random.Philox(key=[seed, 0]))
        drawn = np.sort(generator.permutation(known)[:max_cells])
    counts = _tally(text[drawn])
    kept = np.array([cell for cell in drawn if counts[text[cell]] >= folds], dtype=np.int64)
    return Labelled(
        cells=kept,
        labels=text[kept].astype(str),
        classes={name: n for name, n in counts.items() if n >= folds},
        dropped={name: n for name, n in counts.items() if n < folds},
        n_unlabelled=int(missing.sum()),
        n_left_out=len(known) - len(drawn),
    )


def log_normalise(counts: sp.csr_matrix) -> sp.csr_matrix:
    """log(1 + counts per 10,000 of the cell), float32; a cell without counts stays zero."""
    scale = 1e4 / np.maximum(row_sums(counts), 1)
    values = np.log1p(counts.data * np.repeat(scale, np.diff(counts.indptr))).astype(np.float32)
    return sp.csr_matrix((values, counts.indices, counts.indptr), shape=counts.shape)


def probe(
    embedding: np.ndarray,
    untrained: np.ndarray,
    genes: sp.csr_matrix,
    labels: np.ndarray,
    *,
    folds: int,
    neighbors: int,
    seed: int,
    components: int = 50,
) -> list[dict[str, Any]]:
    """The probe table: one row for each pair of features and classifier.

    Parameters
    ----------
    embedding, untrained
        `(cells, hidden)`, of the model and of its architecture with random weights.
    genes
        `log_normalise`d counts, `(cells, genes)`.
    labels
        Class of each cell; each class has at least `folds` cells.

    Returns rows with `name`, `kind` (linear or knn for the model's own, else baseline), `accuracy_mean` and `_sd`
    (of a sample, over folds), `macro_f1_mean` and `_sd`, `accuracy_folds`, `macro_f1_folds`, and `not_converged`,
    the number of folds in which a regression ended before it converged.
    """
    scores: dict[str, list[tuple[float, float, bool]]] = {}
    splitter = StratifiedKFold(folds, shuffle=True, random_state=seed)
    for train, test in splitter.split(np.zeros(len(labels)), labels):
        for name, classifier, seen, unseen in _fold(embedding, untrained, genes, train, test, neighbors, components):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", ConvergenceWarning)
                predicted = classifier.fit(seen, labels[train]).predict(unseen)
            unfinished = any(issubclass(w.category, ConvergenceWarning) for w in caught)
            f1 = f1_score(labels[test], predicted, average="macro", zero_division=0)
            scores.setdefault(name, []).append((accuracy_score(labels[test], predicted), f1, unfinished))
    return [_row(name, values) for name, values in scores.items()]


def _fold(
    embedding: np.ndarray,
    untrained: np.ndarray,
    genes: sp.csr_matrix,
    train: np.ndarray,
    test: np.ndarray,
    neighbors: int,
    components: int,
) -> Iterator[tuple[str, Any, Any, Any]]:
    """Row name, unfitted classifier, features of the training cells, of the test cells."""
    yield LINEAR, _linear(), embedding[train], embedding[test]
    yield KNN, _knn(neighbors, train), embedding[train], embedding[test]
    yield UNTRAINED_LINEAR, _linear(), untrained[train], untrained[test]
    yield UNTRAINED_KNN, _knn(neighbors, train), untrained[train], untrained[test]
    yield MAJORITY, DummyClassifier(strategy="most_frequent"), embedding[train], embedding[test]
    fewest = min(components, len(train) - 1, genes.shape[1] - 1)
    if fewest >= 1:
        pca = PCA(fewest, svd_solver="arpack", random_state=0).fit(genes[train])
        seen, unseen = pca.transform(genes[train]), pca.transform(genes[test])
        yield PCA_LINEAR, _linear(), seen, unseen
        yield PCA_KNN, _knn(neighbors, train), seen, unseen
    # genes stay sparse: without centring the optimum is the same, since the intercept has no penalty
    yield ALL_GENES, _linear(with_mean=False), genes[train], genes[test]


def _linear(with_mean: bool = True) -> Any:
    return make_pipeline(StandardScaler(with_mean=with_mean), LogisticRegression(max_iter=1000))


def _knn(neighbors: int, train: np.ndarray) -> Any:
    return KNeighborsClassifier(min(neighbors, len(train)))


def _row(name: str, values: list[tuple[float, float, bool]]) -> dict[str, Any]:
    accuracy, f1 = [float(v[0]) for v in values], [float(v[1]) for v in values]
    return {
        "name": name,
        "kind": {LINEAR: "linear", KNN: "knn"}.get(name, "baseline"),
        "accuracy_mean": float(np.mean(accuracy)),
        "accuracy_sd": float(np.std(accuracy, ddof=1)),
        "macro_f1_mean": float(np.mean(f1)),
        "macro_f1_sd": float(np.std(f1, ddof=1)),
        "accuracy_folds": accuracy,
        "macro_f1_folds": f1,
        "not_converged": sum(v[2] for v in values),
    }


def judge_probes(rows: Iterable[dict[str, Any]]) -> list[Verdict]:
    """Verdicts on the embedding against its baselines, from the rows of `probe`.

    Accuracy decides, to the three digits that tables print. Macro-F1 follows where only one of the two is lost.
    """
    table = {row["name"]: row for row in rows}
    verdicts = []
    for own, baselines in COMPARED:
        for baseline in baselines:
            if own in table and baseline in table:
                accuracy, f1 = (_compare(table[own], table[baseline], metric) for metric in ("accuracy", "macro_f1"))
                verdicts += [accuracy, f1] if (accuracy.outcome == "lost") != (f1.outcome == "lost") else [accuracy]
    return verdicts


def _compare(own: dict[str, Any], baseline: dict[str, Any], metric: str) -> Verdict:
    ours, theirs = (round(row[f"{metric}_mean"], 3) for row in (own, baseline))
    spread = float(np.std(np.subtract(own[f"{metric}_folds"], baseline[f"{metric}_folds"]), ddof=1))
    return compare(own["name"], baseline["name"], metric.replace("_f1", "-F1"), round(ours - theirs, 3), spread)


def _tally(values: np.ndarray) -> dict[str, int]:
    names, counts = np.unique(values.astype(str), return_counts=True)
    order = sorted(range(len(names)), key=lambda i: (-counts[i], names[i]))
    return {str(names[i]): int(counts[i]) for i in order}
