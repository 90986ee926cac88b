"""Task `probe`: classifiers of a label on embeddings, against baselines.

A logistic regression and a kNN classifier predict the label of scored cells from their embedding in stratified
cross-validation. The same folds are given to: the most frequent class; 50 principal components and **all genes** of the
cell (log(1 + counts per 10,000), library size from the cell alone); and the same architecture untrained. Everything
fitted, scalers and components included, is fitted on the training cells of a fold. All-genes logistic regression is
hard to beat: a table without it flatters a model. Classes with fewer cells than folds are left out by name; folds are
never lowered, so that runs stay comparable.
"""

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
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

from cellmill.config.evaluate import ProbeConfig
from cellmill.data.count_matrix import counts_per_10k
from cellmill.data.counts_reader import CountsReader
from cellmill.errors import DataError
from cellmill.evaluate.embed import embed_cells
from cellmill.evaluate.task import TOKEN_BUDGET, Context, TaskResult
from cellmill.runs.verdict import Verdict, compare

MAX_CELLS = 10_000
"""Cells used at most: all-genes regression over more takes hours and moves accuracy by less than 0.01."""
ROW_BLOCK = 4096  # cells read at once

EMBEDDING, MAJORITY = "embedding", "majority"
BASELINES = ("all genes", "PCA50", "untrained")
"""Features that the embedding is compared with, under the same classifier."""


class Probe:
    def __init__(self, config: ProbeConfig) -> None:
        self.config = config

    def run(self, context: Context) -> TaskResult:
        """Rows of `probe_table` and verdicts on them; skipped without a label or with fewer than two large classes."""
        if "label" not in context.roles:
            return TaskResult(skipped="the dataset has no label column")
        column, options = context.roles["label"], context.options
        _check_classes(context.reader.path, column)
        scored = np.flatnonzero(context.scored)
        chosen = choose_cells(column.iloc[scored], options.folds, options.seed)
        print(f"{context.dataset}: probe: {column.name}: {_counts_of(chosen.classes)}", flush=True)
        if chosen.dropped:
            dropped = _counts_of(chosen.dropped)
            print(f"{context.dataset}: probe: left out, too few for the folds: {dropped}", flush=True)
        figures = chosen.figures | {"folds": options.folds, "neighbors": self.config.neighbors}
        if len(chosen.classes) < 2:
            return TaskResult(
                figures=figures,
                skipped=f"{len(chosen.classes)} classes of {column.name} have at least {options.folds} scored cells "
                "(evaluate.folds), expected two or more; raise shard.test_frac or lower evaluate.folds",
            )
        cells = scored[chosen.cells]
        mask = np.isin(np.arange(context.reader.n_obs), cells)
        model = context.model
        untrained = embed_cells(context.reader, model.untrained, model.vocabulary, model.tokens, TOKEN_BUDGET, mask)
        rows = probe_table(
            context.vectors[cells],
            untrained.vectors,
            log_normalise(_read_counts(context.reader, mask)),
            chosen.labels,
            folds=options.folds,
            neighbors=self.config.neighbors,
            seed=options.seed,
        )
        return TaskResult(rows=rows, metric="accuracy", verdicts=judge_probes(rows), figures=figures)


@dataclass(frozen=True)
class Labelled:
    cells: np.ndarray  # their indices, ascending; int64
    labels: np.ndarray  # class of each; text
    classes: dict[str, int]  # cells of each class used, the largest first
    dropped: dict[str, int]  # cells of each class left out for having fewer cells than there are folds
    n_unlabelled: int  # cells without a label, left out
    n_left_out: int  # cells beyond MAX_CELLS, left out by a seeded draw

    @property
    def figures(self) -> dict[str, Any]:
        """Numbers of cells, for metrics.json."""
        used = {"n_cells": len(self.cells), "classes": self.classes, "dropped_classes": self.dropped}
        return used | {"n_unlabelled": self.n_unlabelled, "n_left_out": self.n_left_out}


def choose_cells(labels: pd.Series, folds: int, seed: int, max_cells: int = MAX_CELLS) -> Labelled:
    """The labelled cells of classes with at least one cell per fold."""
    missing = labels.isna().to_numpy()
    text = labels.astype(str).to_numpy(dtype=object)
    drawn = known = np.flatnonzero(~missing)
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
    values = np.log1p(counts_per_10k(counts.data, counts.indptr)).astype(np.float32)
    return sp.csr_matrix((values, counts.indices, counts.indptr), shape=counts.shape)


def probe_table(
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
    """Cross-validated scores: one row for each pair of features and classifier.

    `embedding` and `untrained`, `(cells, hidden)`, are of the model and of its architecture with random weights;
    `genes`, `(cells, genes)`, are `log_normalise`d counts; each class of `labels` has at least `folds` cells. Each row
    has `name`, `kind` (model or baseline), `accuracy_mean`, `accuracy_sd` (sample standard deviation over folds),
    `macro_f1_mean`, `macro_f1_sd`, `accuracy_folds`, `macro_f1_folds`, and `not_converged`, the number of folds in
    which a regression stopped before it converged.
    """
    scores: dict[str, list[tuple[float, float, bool]]] = {}
    splitter = StratifiedKFold(folds, shuffle=True, random_state=seed)
    for train, test in splitter.split(np.zeros(len(labels)), labels):
        for name, classifier, seen, unseen in _fold(embedding, untrained, genes, train, test, neighbors, components):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", ConvergenceWarning)
                predicted = classifier.fit(seen, labels[train]).predict(unseen)
            not_converged = any(issubclass(w.category, ConvergenceWarning) for w in caught)
            f1 = f1_score(labels[test], predicted, average="macro", zero_division=0)
            scores.setdefault(name, []).append((accuracy_score(labels[test], predicted), f1, not_converged))
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
    """Row name, unfitted classifier, features of the training cells and of the test cells."""

    def dense(name: str, seen: np.ndarray, unseen: np.ndarray) -> Iterator[tuple[str, Any, Any, Any]]:
        for classifier, unfitted in _classifiers(neighbors, len(train)).items():
            yield f"{name} + {classifier}", unfitted, seen, unseen

    yield from dense(EMBEDDING, embedding[train], embedding[test])
    yield from dense("untrained", untrained[train], untrained[test])
    yield MAJORITY, DummyClassifier(strategy="most_frequent"), embedding[train], embedding[test]
    n_components = min(components, len(train) - 1, genes.shape[1] - 1)
    if n_components >= 1:
        pca = PCA(n_components, svd_solver="arpack", random_state=0).fit(genes[train])
        yield from dense("PCA50", pca.transform(genes[train]), pca.transform(genes[test]))
    # genes stay sparse: the optimum is the same without centring, since the intercept has no penalty
    yield "all genes + logistic regression", _logistic(with_mean=False), genes[train], genes[test]


def _classifiers(neighbors: int, n_train: int) -> dict[str, Any]:
    """Unfitted classifiers of dense features, by name; a new one is one line here."""
    return {"logistic regression": _logistic(), "kNN": KNeighborsClassifier(min(neighbors, n_train))}


def _logistic(with_mean: bool = True) -> Any:
    return make_pipeline(StandardScaler(with_mean=with_mean), LogisticRegression(max_iter=1000))


def _row(name: str, values: list[tuple[float, float, bool]]) -> dict[str, Any]:
    accuracy, f1 = [float(v[0]) for v in values], [float(v[1]) for v in values]
    return {
        "name": name,
        "kind": "model" if name.startswith(EMBEDDING) else "baseline",
        "accuracy_mean": float(np.mean(accuracy)),
        "accuracy_sd": float(np.std(accuracy, ddof=1)),
        "macro_f1_mean": float(np.mean(f1)),
        "macro_f1_sd": float(np.std(f1, ddof=1)),
        "accuracy_folds": accuracy,
        "macro_f1_folds": f1,
        "not_converged": sum(v[2] for v in values),
    }


def judge_probes(rows: Iterable[dict[str, Any]]) -> list[Verdict]:
    """Verdicts on the embedding under each classifier against the baselines, from the rows of `probe_table`.

    Accuracy decides, to the three digits that tables print. Macro-F1 follows where only one of the two is lost.
    """
    table = {row["name"]: row for row in rows}
    verdicts = []
    for name in (name for name in table if name.startswith(EMBEDDING)):
        baselines = [features + name.removeprefix(EMBEDDING) for features in BASELINES]
        for baseline in (baseline for baseline in (*baselines, MAJORITY) if baseline in table):
            accuracy, f1 = (_compare(table[name], table[baseline], metric) for metric in ("accuracy", "macro_f1"))
            verdicts += [accuracy, f1] if (accuracy.outcome == "lost") != (f1.outcome == "lost") else [accuracy]
    return verdicts


def _compare(own: dict[str, Any], baseline: dict[str, Any], metric: str) -> Verdict:
    ours, theirs = (round(row[f"{metric}_mean"], 3) for row in (own, baseline))
    spread = float(np.std(np.subtract(own[f"{metric}_folds"], baseline[f"{metric}_folds"]), ddof=1))
    return compare(own["name"], baseline["name"], metric.replace("_f1", "-F1"), round(ours - theirs, 3), spread)


def _check_classes(path: Path, column: pd.Series) -> None:
    values = column.dropna().astype(str).unique()
    if len(values) < 2:
        content = f"one class, {values[0]!r}" if len(values) else "no values"
        raise DataError(
            f"{path}: obs column {column.name!r} has {content}; expected two classes or more for task probe: "
            "name another label column, or leave it empty"
        )


def _read_counts(reader: CountsReader, mask: np.ndarray) -> sp.csr_matrix:
    blocks, first = [], 0
    for block in reader.rows(ROW_BLOCK):
        blocks.append(block[np.flatnonzero(mask[first : first + block.shape[0]])])
        first += block.shape[0]
    return sp.vstack(blocks, format="csr")


def _counts_of(classes: dict[str, int]) -> str:
    return ", ".join(f"{name} {n:,}" for name, n in classes.items()) or "no class"


def _tally(values: np.ndarray) -> dict[str, int]:
    return dict(sorted(Counter(values.tolist()).items(), key=lambda item: (-item[1], item[0])))
