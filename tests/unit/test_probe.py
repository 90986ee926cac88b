"""Probes against scikit-learn, nothing fitted outside a fold, and the verdicts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_score
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from cellmill.evaluate.classifiers import log_normalise
from cellmill.evaluate.labelled import choose_cells
from cellmill.evaluate.tasks.probe import judge_probes, probe_table
from cellmill.runs.verdict import compare, sentence


def _problem(n: int = 120) -> tuple[np.ndarray, np.ndarray, sp.csr_matrix, np.ndarray]:
    random = np.random.default_rng(0)
    labels = np.array(["a", "b", "c"])[np.arange(n) % 3]
    centres = random.normal(size=(3, 8))
    embedding = (centres[np.arange(n) % 3] + random.normal(size=(n, 8))).astype(np.float32)
    noise = random.normal(size=(n, 8)).astype(np.float32)
    counts = random.poisson(np.exp(random.normal(size=(3, 30)))[np.arange(n) % 3])
    return embedding, noise, log_normalise(sp.csr_matrix(counts.astype(np.uint32))), labels


def _row(name: str, accuracy: list[float], f1: list[float], kind: str = "baseline") -> dict[str, object]:
    return {
        "name": name, "kind": kind, "accuracy_mean": float(np.mean(accuracy)), "accuracy_folds": accuracy,
        "macro_f1_mean": float(np.mean(f1)), "macro_f1_folds": f1,
    }  # fmt: skip


def test_rows_equal_scikit_learn_pipelines_cross_validated_over_the_same_folds() -> None:
    embedding, noise, genes, labels = _problem()
    rows = {
        row["name"]: row
        for row in probe_table(embedding, noise, genes, labels, folds=5, neighbors=7, seed=3, components=5)
    }
    folds = StratifiedKFold(5, shuffle=True, random_state=3)
    linear = LogisticRegression(max_iter=1000)
    pca = PCA(5, svd_solver="arpack", random_state=0)
    expected = {
        "embedding + logistic regression": (make_pipeline(StandardScaler(), linear), embedding),
        "embedding + kNN": (KNeighborsClassifier(7), embedding),
        "untrained + logistic regression": (make_pipeline(StandardScaler(), linear), noise),
        "untrained + kNN": (KNeighborsClassifier(7), noise),
        "PCA50 + logistic regression": (make_pipeline(pca, StandardScaler(), linear), genes),
        "PCA50 + kNN": (make_pipeline(pca, KNeighborsClassifier(7)), genes),
        "all genes + logistic regression": (make_pipeline(StandardScaler(with_mean=False), linear), genes),
    }
    assert set(rows) == {*expected, "majority"}
    for name, (pipeline, features) in expected.items():
        for metric, key in (("accuracy", "accuracy"), ("f1_macro", "macro_f1")):
            scores = cross_val_score(pipeline, features, labels, cv=folds, scoring=metric)
            assert rows[name][f"{key}_folds"] == pytest.approx(scores), name
            assert rows[name][f"{key}_mean"] == pytest.approx(scores.mean())
            assert rows[name][f"{key}_sd"] == pytest.approx(scores.std(ddof=1))
    assert rows["majority"]["accuracy_mean"] == pytest.approx(1 / 3)
    assert rows["majority"]["macro_f1_mean"] == pytest.approx(1 / 6)
    assert [row["kind"] for row in rows.values()] == 2 * ["model"] + 6 * ["baseline"]


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
    rows = probe_table(genes, genes, sp.csr_matrix(genes), labels, folds=5, neighbors=3, seed=0, components=1)
    scores = next(row for row in rows if row["name"] == "PCA50 + logistic regression")["accuracy_folds"]
    assert scores[2] == 1.0
    assert max(scores[:2] + scores[3:]) < 0.95


def test_baselines_on_real_cells_have_the_accuracies_measured_before(shared: Callable[[str], Path]) -> None:
    adata = ad.read_h5ad(shared("pbmc68k.h5ad"))
    chosen = choose_cells(adata.obs["bulk_labels"], fewest=5, seed=0)
    genes = log_normalise(sp.csr_matrix(adata.X, dtype=np.uint32))[chosen.cells]
    blank = np.zeros((len(chosen.cells), 2), np.float32)
    rows = {row["name"]: row for row in probe_table(blank, blank, genes, chosen.labels, folds=5, neighbors=15, seed=0)}
    reference = {"majority": 0.343, "PCA50 + kNN": 0.803, "PCA50 + logistic regression": 0.816}
    for name, accuracy in (reference | {"all genes + logistic regression": 0.839}).items():
        assert rows[name]["accuracy_mean"] == pytest.approx(accuracy, abs=0.015), name


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


def test_any_loss_is_a_loss_and_a_gain_within_the_spread_a_tie() -> None:
    rows = [
        _row("embedding + logistic regression", [0.80, 0.80], [0.60, 0.60], "model"),
        _row("embedding + kNN", [0.70, 0.78], [0.50, 0.50], "model"),
        _row("untrained + logistic regression", [0.70, 0.70], [0.50, 0.50]),
        _row("untrained + kNN", [0.73, 0.73], [0.50, 0.50]),
        _row("majority", [0.80, 0.80], [0.20, 0.20]),
        _row("PCA50 + logistic regression", [0.80, 0.80], [0.65, 0.65]),
        _row("PCA50 + kNN", [0.75, 0.79], [0.40, 0.40]),
        _row("all genes + logistic regression", [0.83, 0.85], [0.70, 0.70]),
    ]
    verdicts = judge_probes(rows)
    assert [sentence(verdict) for verdict in verdicts] == [
        "embedding + logistic regression loses to all genes + logistic regression by 0.040 accuracy "
        "(-0.054 to -0.026).",
        "embedding + logistic regression ties with PCA50 + logistic regression in accuracy (0.000 to 0.000).",
        "embedding + logistic regression loses to PCA50 + logistic regression by 0.050 macro-F1 (-0.050 to -0.050).",
        "embedding + logistic regression beats untrained + logistic regression by 0.100 accuracy (0.100 to 0.100).",
        "embedding + logistic regression ties with majority in accuracy (0.000 to 0.000).",
        "embedding + kNN loses to PCA50 + kNN by 0.030 accuracy (-0.058 to -0.002).",
        "embedding + kNN beats PCA50 + kNN by 0.100 macro-F1 (0.100 to 0.100).",
        "embedding + kNN is ahead of untrained + kNN by 0.010 accuracy (-0.047 to 0.067): no clear win.",
        "embedding + kNN loses to majority by 0.060 accuracy (-0.117 to -0.003).",
        "embedding + kNN beats majority by 0.300 macro-F1 (0.300 to 0.300).",
    ]
    assert [verdict.outcome for verdict in verdicts] == [
        "lost",
        "tied",
        "lost",
        "won",
        "tied",
        "lost",
        "won",
        "tied",
        "lost",
        "won",
    ]
    assert (verdicts[0].metric, verdicts[0].difference) == ("accuracy", -0.04)
    assert verdicts[0].interval == pytest.approx((-0.04 - 0.02 / 2**0.5, -0.04 + 0.02 / 2**0.5))


def test_a_lower_value_wins_where_lower_is_better() -> None:
    verdict = compare("model", "frequency", "nats cross-entropy", -0.25, lower_is_better=True)
    assert sentence(verdict) == "model beats frequency by 0.250 nats cross-entropy."
    assert (verdict.difference, verdict.interval, verdict.outcome) == (-0.25, None, "won")
