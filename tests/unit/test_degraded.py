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

from cellmill.config.evaluate import LowDepthConfig, MissingGenesConfig
from cellmill.data.count_matrix import select_columns
from cellmill.evaluate.classifiers import log_normalise
from cellmill.evaluate.degraded import MIXED, classify_degraded
from cellmill.evaluate.embed import embed_cells
from cellmill.evaluate.features import Features
from cellmill.evaluate.labelled import choose_cells
from cellmill.evaluate.task import Context
from cellmill.evaluate.tasks.low_depth import LowDepth, thin
from cellmill.evaluate.tasks.missing_genes import MissingGenes, keep_genes
from cellmill.evaluate.training_cells import read_training_counts
from tests.unit.evaluated import make_context

TASKS = [
    pytest.param(
        LowDepth(LowDepthConfig(name="low_depth", count_fracs=[0.5, 0.2], repeats=1)),
        ["50 % of counts, matched", "50 % of counts, shifted", "20 % of counts, matched", "20 % of counts, shifted"],
        id="low_depth",
    ),
    pytest.param(
        MissingGenes(MissingGenesConfig(name="missing_genes", genes=[20], repeats=1)),
        ["20 genes, matched", "20 genes, shifted"],
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


def test_scores_are_those_of_classifiers_trained_on_whole_or_degraded_cells(context: Context) -> None:
    levels = {"10 % of counts": partial(thin, 0.1)}
    result = classify_degraded(context, "low_depth", levels, neighbors=5, repeats=2)
    scored = np.flatnonzero(context.scored)
    chosen = choose_cells(context.reader.obs["cell_type"].iloc[scored], 3, seed=4)
    labels, whole = chosen.labels, _counts(context, scored[chosen.cells])
    expected: dict[str, list[float]] = {"whole": [], "matched": [], "shifted": [], "mixed": []}
    for repeat in range(2):
        lost = thin(0.1, whole, np.random.Generator(np.random.Philox(key=[4, 1000 + repeat])))
        whole_genes, lost_genes = log_normalise(whole), log_normalise(lost)
        folds = StratifiedKFold(3, shuffle=True, random_state=4 + repeat)
        for train, test in folds.split(labels, labels):

            def accuracy(seen: sp.csr_matrix, of: np.ndarray, unseen: sp.csr_matrix) -> float:
                pipeline = make_pipeline(StandardScaler(with_mean=False), LogisticRegression(max_iter=1000))
                return float((pipeline.fit(seen, of).predict(unseen) == labels[test]).mean())  # noqa: B023

            seen = labels[train]
            expected["whole"].append(accuracy(whole_genes[train], seen, whole_genes[test]))
            expected["matched"].append(accuracy(lost_genes[train], seen, lost_genes[test]))
            expected["shifted"].append(accuracy(whole_genes[train], seen, lost_genes[test]))
            both = sp.vstack([whole_genes[train], lost_genes[train]])
            expected["mixed"].append(accuracy(both, np.concatenate([seen, seen]), lost_genes[test]))
    table = {row["name"]: row for row in result.rows}
    genes = table["all genes + logistic regression"]
    assert genes["whole_folds"] == pytest.approx(expected["whole"])
    assert genes["10 % of counts, matched_folds"] == pytest.approx(expected["matched"])
    assert genes["10 % of counts, shifted_folds"] == pytest.approx(expected["shifted"])
    assert table[MIXED]["10 % of counts, shifted_folds"] == pytest.approx(expected["mixed"])
    assert table[MIXED]["whole_mean"] is None
    assert genes["10 % of counts, shifted_mean"] == pytest.approx(np.mean(expected["shifted"]))
    assert genes["10 % of counts, shifted_sd"] == pytest.approx(np.std(expected["shifted"], ddof=1))
    assert [row["kind"] for row in result.rows] == 2 * ["model"] + 7 * ["baseline"]
    assert result.metric == "10 % of counts, shifted"
    json.dumps(result.to_json(), allow_nan=False)


def test_a_verdict_compares_with_the_best_baseline_under_any_classifier(context: Context) -> None:
    result = classify_degraded(context, "low_depth", {"half": partial(thin, 0.5)}, neighbors=5, repeats=1)
    for column in ("half, matched", "half, shifted"):
        means = {row["name"]: row[f"{column}_mean"] for row in result.rows if row["kind"] == "baseline"}
        best = max((value, name) for name, value in means.items() if value is not None)[0]
        verdicts = [verdict for verdict in result.verdicts if verdict.metric == f"accuracy, {column}"]
        assert [verdict.compared for verdict in verdicts] == ["embedding + logistic regression", "embedding + kNN"]
        for verdict in verdicts:
            own = next(row for row in result.rows if row["name"] == verdict.compared)[f"{column}_mean"]
            assert means[verdict.against] == pytest.approx(best)
            assert verdict.difference == pytest.approx(own - best)


def test_a_dataset_without_label_is_skipped(context: Context) -> None:
    result = LowDepth(LowDepthConfig(name="low_depth")).run(replace(context, roles={}))
    assert result.skipped == "the dataset has no label column"


@pytest.mark.parametrize(("task", "columns"), TASKS)
def test_tasks_have_a_column_for_each_level(context: Context, task: Any, columns: list[str]) -> None:
    result = task.run(context)
    assert [key.removesuffix("_mean") for key in result.rows[0] if key.endswith("_mean")] == ["whole", *columns]
