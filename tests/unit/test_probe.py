"""Probes against scikit-learn, nothing fitted outside a fold, and the verdicts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from sklearn.decomposition import PCA
from sklearn.dummy import DummyClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import confusion_matrix, f1_score
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from cellmill.data.arrays import log_normalise
from cellmill.evaluate.baselines import BaselineCache
from cellmill.evaluate.labels import choose_cells
from cellmill.evaluate.scores import Predictions, ScoreColumn, table_rows
from cellmill.evaluate.tasks.classify import METRICS, judge, predict_splits, stratified


def _problem(n: int = 120) -> tuple[np.ndarray, np.ndarray, sp.csr_matrix, np.ndarray]:
    random = np.random.default_rng(0)
    labels = np.array(["a", "b", "c"])[np.arange(n) % 3]
    centres = random.normal(size=(3, 8))
    embedding = (centres[np.arange(n) % 3] + random.normal(size=(n, 8))).astype(np.float32)
    noise = random.normal(size=(n, 8)).astype(np.float32)
    counts = random.poisson(np.exp(random.normal(size=(3, 30)))[np.arange(n) % 3])
    return embedding, noise, log_normalise(sp.csr_matrix(counts.astype(np.uint32))), labels


def _features(embedding: np.ndarray, untrained: np.ndarray, genes: sp.csr_matrix) -> dict[str, Any]:
    return {"embedding": embedding, "untrained": untrained, "all genes": genes}


def _predicted(
    features: dict[str, Any], labels: np.ndarray, *, seeds: int = 1, seed: int = 0, neighbors: int, components: int
) -> Predictions:
    """Predictions in five folds."""
    made = Predictions(labels, seeds)
    splits = stratified(labels, 5, seeds, seed)
    predict_splits(made, features, splits, neighbors, BaselineCache(), components=components)
    return made


def _columns(predictions: Predictions) -> list[ScoreColumn]:
    return [predictions.column("", metric, metric, words) for metric, words in METRICS.items()]


def test_rows_equal_scikit_learn_pipelines_cross_validated_over_the_same_folds_of_each_seed() -> None:
    embedding, noise, genes, labels = _problem()
    features = _features(embedding, noise, genes)
    made = _predicted(features, labels, seeds=2, seed=3, neighbors=7, components=5)
    rows = {row["name"]: row for row in table_rows(_columns(made))}
    linear = LogisticRegression(max_iter=10_000, tol=1e-6)
    pca = PCA(5, svd_solver="arpack", random_state=0)
    dense, sparse = StandardScaler(), StandardScaler(with_mean=False)
    expected = {"majority": (DummyClassifier(strategy="most_frequent"), embedding)}
    for kind, values, first, scaler in (
        ("embedding", embedding, (), dense),
        ("untrained", noise, (), dense),
        ("all genes", genes, (), sparse),
        ("PCA5", genes, (pca,), dense),
    ):
        expected[f"{kind} + logistic regression"] = (make_pipeline(*first, scaler, linear), values)
        expected[f"{kind} + logistic regression, unscaled"] = (make_pipeline(*first, linear), values)
        expected[f"{kind} + kNN"] = (make_pipeline(*first, KNeighborsClassifier(7)), values)
    assert set(rows) == set(expected)
    for name, (pipeline, values) in expected.items():
        confusion = np.zeros((3, 3), np.int64)
        for repetition in range(2):
            folds = StratifiedKFold(5, shuffle=True, random_state=3 + repetition)
            predicted = cross_val_predict(pipeline, values, labels, cv=folds)
            of_row = {key: rows[name][f"{key}_repetitions"][repetition] for key in METRICS}
            f1 = {kind: f1_score(labels, predicted, average=kind, zero_division=0) for kind in ("macro", "weighted")}
            assert of_row["accuracy"] == pytest.approx((predicted == labels).mean()), name
            assert of_row["macro_f1"] == pytest.approx(f1["macro"]), name
            assert of_row["weighted_f1"] == pytest.approx(f1["weighted"]), name
            confusion += confusion_matrix(labels, predicted)
        assert made.confusion("", name)["counts"] == confusion.tolist(), name
    assert rows["majority"]["accuracy_mean"] == pytest.approx(1 / 3)
    assert sorted(row["kind"] for row in rows.values()) == 10 * ["baseline"] + 3 * ["model"]


def test_components_are_fitted_on_the_training_cells_of_a_fold_only() -> None:
    # gene 1 tells the classes apart; gene 0 varies far more, but only in the cells of one fold. Components fitted
    # over all cells would follow gene 0 in every fold; fitted inside, the fold that tests those cells is perfect
    labels = np.array(["a", "b"] * 50)
    random = np.random.default_rng(0)
    genes = random.normal(scale=0.01, size=(100, 3))
    genes[:, 0] = 0
    genes[:, 1] += labels == "a"
    folds = list(StratifiedKFold(5, shuffle=True, random_state=0).split(genes, labels))
    planted = folds[2][1]
    genes[planted, 0] += 1000 * random.normal(size=len(planted))
    features = _features(genes, genes, sp.csr_matrix(genes))
    made = _predicted(features, labels, neighbors=3, components=1)
    [right] = made.column("", "accuracy", "accuracy", "accuracy").scores["PCA1 + logistic regression"]
    scores = [right[test].mean() for _, test in folds]
    assert scores[2] == 1.0
    assert max(scores[:2] + scores[3:]) < 0.95


def test_baselines_on_real_cells_have_the_accuracies_measured_before(shared: Callable[[str], Path]) -> None:
    adata = ad.read_h5ad(shared("pbmc68k.h5ad"))
    chosen = choose_cells(adata.obs["bulk_labels"], fewest=5, seed=0)
    genes = log_normalise(sp.csr_matrix(adata.X, dtype=np.uint32))[chosen.cells]
    made = _predicted({"all genes": genes}, chosen.labels, neighbors=15, components=50)
    accuracy = made.column("", "accuracy", "accuracy", "accuracy")
    reference = {"majority": 0.343, "PCA50 + kNN": 0.803, "PCA50 + logistic regression": 0.816}
    for name, value in (reference | {"all genes + logistic regression": 0.839}).items():
        assert accuracy.mean(name) == pytest.approx(value, abs=0.015), name


def test_normalised_counts_sum_to_ten_thousand_in_each_cell_independently_of_other_cells() -> None:
    counts = sp.csr_matrix(np.array([[3, 0, 1], [0, 0, 0], [70_000, 1, 0]], np.uint32))
    whole = log_normalise(counts)
    assert np.expm1(whole.toarray()).sum(axis=1) == pytest.approx([1e4, 0, 1e4], rel=1e-5)
    assert (log_normalise(counts[2:]) != whole[2:]).nnz == 0


def test_classes_with_fewer_cells_than_folds_and_missing_labels_are_left_out_with_their_count() -> None:
    labels = pd.Series(pd.Categorical(["a"] * 6 + ["b"] * 5 + ["rare"] * 4 + [None] * 2, ["unused", "a", "b", "rare"]))
    chosen = choose_cells(labels, fewest=5, seed=0)
    assert chosen.classes == {"a": 6, "b": 5}
    assert chosen.dropped == {"rare": 4}
    assert (chosen.n_unlabelled, chosen.n_left_out) == (2, 0)
    assert chosen.cells.tolist() == list(range(11))
    assert chosen.labels.tolist() == ["a"] * 6 + ["b"] * 5


def test_above_the_limit_the_same_cells_are_drawn_in_every_run() -> None:
    labels = pd.Series(["a", "b"] * 500)
    chosen = choose_cells(labels, fewest=5, seed=4, max_cells=100)
    assert len(chosen.cells) == 100
    assert chosen.n_left_out == 900
    assert (np.diff(chosen.cells) > 0).all()
    assert (chosen.cells == choose_cells(labels, fewest=5, seed=4, max_cells=100).cells).all()
    assert (chosen.cells != choose_cells(labels, fewest=5, seed=5, max_cells=100).cells).any()


def test_verdicts_are_best_against_best_and_the_same_classifier_on_each_features() -> None:
    labels = np.array(["a", "b"] * 10)
    wrong = {
        "embedding + logistic regression": 4,
        "embedding + logistic regression, unscaled": 2,
        "embedding + kNN": 3,
        "all genes + logistic regression": 1,
        "all genes + logistic regression, unscaled": 2,
        "all genes + kNN": 3,
        "untrained + logistic regression": 20,
        "untrained + kNN": 8,
        "majority": 10,
    }
    made = Predictions(labels, 1)
    for name, n in wrong.items():
        made.record("", 0, np.arange(20), {name: np.where(np.arange(20) < n, np.roll(labels, 1), labels)})
    verdicts = judge(_columns(made))
    linear = "embedding + logistic regression, unscaled"
    assert [(verdict.compared, verdict.against, verdict.metric) for verdict in verdicts] == [
        (linear, "all genes + logistic regression", "accuracy"),
        (linear, "all genes + logistic regression", "macro-F1"),
        (linear, "all genes + logistic regression", "weighted F1"),
        (linear, "untrained + logistic regression", "accuracy"),
        ("embedding + kNN", "all genes + kNN", "accuracy"),
        ("embedding + kNN", "untrained + kNN", "accuracy"),
    ]
    assert [verdict.outcome for verdict in verdicts] == ["level", "level", "level", "ahead", "level", "ahead"]
    assert [verdict.difference for verdict in verdicts][3:] == pytest.approx([0.9, 0.0, 0.25])
