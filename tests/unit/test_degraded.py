"""Tasks low_depth and missing_genes: what is lost, what classifiers see, and scores by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from cellmill.config.parts.tasks import LowDepthConfig, MissingGenesConfig
from cellmill.data.arrays import log_normalise, select_columns
from cellmill.evaluate.embed import embed_cells
from cellmill.evaluate.features import Features
from cellmill.evaluate.labels import choose_cells
from cellmill.evaluate.task import Context, read_training_counts
from cellmill.evaluate.tasks.degraded import LowDepth, MissingGenes, classify_degraded, keep_genes, thin
from tests.unit.evaluated import make_context

KINDS = ("model", "baseline")
WAYS = ("matched", "shifted", "trained on all levels")
TASKS = [
    pytest.param(
        LowDepth(LowDepthConfig(name="low_depth", count_fracs=[0.5, 0.2], repeats=1)),
        [f"{level} % of counts, {how}" for level in (50, 20) for how in WAYS],
        id="low_depth",
    ),
    pytest.param(
        MissingGenes(MissingGenesConfig(name="missing_genes", genes=[20], repeats=1)),
        [f"20 genes, {how}" for how in WAYS],
        id="missing_genes",
    ),
]


@pytest.fixture(scope="module")
def counts() -> sp.csr_matrix:
    return sp.random(200, 80, 0.4, "csr", np.uint32, np.random.default_rng(0), lambda n: np.full(n, 20))


def _generator() -> np.random.Generator:
    return np.random.default_rng(1)


def test_thinning_keeps_each_count_with_the_same_probability(counts: sp.csr_matrix) -> None:
    thinned = thin(0.1, counts, _generator())
    assert thinned.dtype == counts.dtype
    assert thinned.data.all()
    assert (thinned.toarray() <= counts.toarray()).all()
    assert thinned.sum() / counts.sum() == pytest.approx(0.1, rel=0.03)
    lost = 1 - thinned.nnz / counts.nnz
    assert lost == pytest.approx(0.9**20, abs=0.01)


def test_the_kept_genes_are_the_same_for_all_cells_and_whole(counts: sp.csr_matrix) -> None:
    kept = keep_genes(7, counts, _generator())
    columns = np.unique(kept.indices)
    assert len(columns) == 7
    assert (kept[:, columns] != counts[:, columns]).nnz == 0
    assert (keep_genes(500, counts, _generator()) != counts).nnz == 0


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory, simulated: Path) -> Context:
    return make_context(tmp_path_factory.mktemp("degraded"), simulated)


def _counts(context: Context, cells: np.ndarray) -> sp.csr_matrix:
    return sp.vstack(list(context.reader.rows()), format="csr")[cells]


def test_features_are_those_of_embed_and_of_the_models_training_cells(context: Context) -> None:
    model, features = context.model, Features(context)
    counts = _counts(context, np.arange(30))
    made = features.of(counts)
    whole = embed_cells(context.reader, model.network, model.vocabulary, model.tokens, 4096).vectors
    np.testing.assert_allclose(made["embedding"], whole[:30], atol=1e-5)
    assert (made["all genes"] != log_normalise(counts)).nnz == 0
    training = read_training_counts(model.manifest, 10_000)
    assert training.shape == (model.manifest.splits["train"].n_obs, model.vocabulary.n_genes)
    profiles = log_normalise(training).toarray()
    centred = made["PCA50 of the training cells"]
    basis = np.linalg.svd(profiles - profiles.mean(0), full_matrices=False)[2][: centred.shape[1]]
    columns = select_columns(counts, features.columns.target, model.vocabulary.n_genes)
    expected = (log_normalise(columns).toarray() - profiles.mean(0)) @ basis.T
    np.testing.assert_allclose(np.abs(centred[:, :5]), np.abs(expected[:, :5]), rtol=1e-3, atol=1e-3)


def test_cells_without_a_known_gene_have_zero_features(context: Context) -> None:
    made = Features(context).of(sp.csr_matrix((5, context.reader.n_vars), dtype=np.uint32))
    assert not made["embedding"].any()


def test_scores_are_those_of_classifiers_trained_on_whole_degraded_or_all_cells(context: Context) -> None:
    levels = {"10 % of counts": partial(thin, 0.1)}
    result = classify_degraded(context, "low_depth", levels, neighbors=5, repeats=2)
    scored = np.flatnonzero(context.scored)
    chosen = choose_cells(context.reader.obs["cell_type"].iloc[scored], 3, seed=4)
    labels, whole = chosen.labels, _counts(context, scored[chosen.cells])
    scaler = {"all genes": StandardScaler(with_mean=False), "embedding": StandardScaler()}
    table = {row["name"]: row for row in result.rows}
    columns = ["whole", *(f"10 % of counts, {how}" for how in ("matched", "shifted", "trained on all levels"))]
    for kind in scaler:
        expected: dict[str, list[float]] = {column: [] for column in columns}
        for repeat in range(2):
            lost = thin(0.1, whole, np.random.Generator(np.random.Philox(key=[4, 1000 + repeat])))
            cells = [Features(context).of(counts)[kind] for counts in (whole, lost)]
            right: dict[str, int] = dict.fromkeys(columns, 0)
            folds = StratifiedKFold(3, shuffle=True, random_state=4 + repeat)
            for train, test in folds.split(labels, labels):
                a, b = (sp.csr_matrix(values[train]) if kind == "all genes" else values[train] for values in cells)
                both = sp.vstack([a, b]) if kind == "all genes" else np.concatenate([a, b])
                for column, seen, tested in zip(columns, (a, b, a, both), (0, 1, 1, 1)):
                    of = np.tile(labels[train], seen.shape[0] // len(train))
                    pipeline = make_pipeline(scaler[kind], LogisticRegression(solver="newton-cg", max_iter=1000))
                    right[column] += (pipeline.fit(seen, of).predict(cells[tested][test]) == labels[test]).sum()
            for column in columns:
                expected[column].append(right[column] / len(labels))
        row = table[f"{kind} + logistic regression"]
        for column in columns:
            assert row[f"{column}_repetitions"] == pytest.approx(expected[column]), column
            assert row[f"{column}_mean"] == pytest.approx(np.mean(expected[column]))
    assert [row["kind"] for row in result.rows] == 3 * ["model"] + 9 * ["baseline"]
    assert all(row[f"{column}_mean"] is not None for row in result.rows for column in columns)
    assert result.metric == "10 % of counts, shifted"
    json.dumps(result.to_json(), allow_nan=False)


def test_a_verdict_compares_the_best_of_the_embedding_with_the_best_baseline(context: Context) -> None:
    result = classify_degraded(context, "low_depth", {"half": partial(thin, 0.5)}, neighbors=5, repeats=1)
    columns = ("whole", "half, matched", "half, shifted", "half, trained on all levels")
    assert [verdict.metric for verdict in result.verdicts] == [f"accuracy, {column}" for column in columns]
    for column, verdict in zip(columns, result.verdicts):
        means = {row["name"]: row[f"{column}_mean"] for row in result.rows}
        best = {kind: max(means[row["name"]] for row in result.rows if row["kind"] == kind) for kind in KINDS}
        assert means[verdict.compared] == pytest.approx(best["model"])
        assert means[verdict.against] == pytest.approx(best["baseline"])
        assert verdict.difference == pytest.approx(best["model"] - best["baseline"])


def test_a_dataset_without_label_is_skipped(context: Context) -> None:
    result = LowDepth(LowDepthConfig(name="low_depth")).run(replace(context, roles={}))
    assert result.skipped == "the dataset has no label column"


@pytest.mark.parametrize(("task", "columns"), TASKS)
def test_tasks_have_a_column_for_each_level(context: Context, task: Any, columns: list[str]) -> None:
    result = task.run(context)
    assert [key.removesuffix("_mean") for key in result.rows[0] if key.endswith("_mean")] == ["whole", *columns]
