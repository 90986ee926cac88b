"""Tasks low_depth and missing_genes: what cells lose, what baselines know of it, and scores against
scikit-learn.
"""

from typing import Any

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.decomposition import PCA
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from cellmill.config.parts.tasks import LowDepthConfig, MissingGenesConfig
from cellmill.evaluate import classifiers
from cellmill.evaluate import features as features_module
from cellmill.evaluate.features import features_of_counts, read_rows
from cellmill.evaluate.labels import choose_cells
from cellmill.evaluate.methods import ALL_GENES, EMBEDDING
from cellmill.evaluate.task import Context
from cellmill.evaluate.tasks.degraded import Degraded, TrainingCounts, keep_genes, thin
from tests.unit.evaluated import regression

WAYS = ("matched", "shifted", "trained on all levels")
CLASSIFIERS = ("logistic regression", "logistic regression, unscaled", "kNN")


def chosen_cells(context: Context, fewest: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices and labels of the scored cells of classes with `fewest` cells."""
    scored = np.flatnonzero(context.scored)
    chosen = choose_cells(context.reader.obs["cell_type"].iloc[scored], fewest, seed=4)
    return scored[chosen.cells], chosen.labels


def training_counts(context: Context) -> np.ndarray:
    """Counts of the cells of all training shards, `(cells, genes)`."""
    manifest = context.model.manifest
    shards = [
        ad.read_h5ad(manifest.shard_path(shard)).X for shard in manifest.splits["train"].shards
    ]
    return np.asarray(sp.vstack(shards).todense(), np.float64)


def in_vocabulary(context: Context, counts: sp.csr_matrix) -> np.ndarray:
    """The counts by gene of the vocabulary, column by column."""
    found = np.zeros((counts.shape[0], context.model.vocabulary.n_genes))
    for column, row in enumerate(context.columns.target):
        if row >= 0:
            found[:, row] += counts[:, [column]].toarray().ravel()
    return found


def log_profiles(counts: np.ndarray, total: float) -> np.ndarray:
    """log(1 + counts per `total`)."""
    return np.log1p(total * counts / np.maximum(counts.sum(1, keepdims=True), 1))


def same_components(found: np.ndarray, expected: np.ndarray) -> None:
    """The first components are the same but for their signs."""
    np.testing.assert_allclose(np.abs(found[:, :5]), np.abs(expected[:, :5]), rtol=1e-2, atol=1e-2)


def test_thinning_keeps_each_count_with_equal_probability() -> None:
    counts = sp.random(
        200, 80, 0.4, "csr", np.uint32, np.random.default_rng(0), lambda n: np.full(n, 20)
    )
    thinned = thin(0.1, counts, np.random.default_rng(1))
    assert thinned.dtype == counts.dtype
    assert thinned.data.all()
    assert (thinned.toarray() <= counts.toarray()).all()
    assert thinned.sum() / counts.sum() == pytest.approx(0.1, rel=0.03)
    assert 1 - thinned.nnz / counts.nnz == pytest.approx(0.9**20, abs=0.01)
    kept = keep_genes(7, counts, np.random.default_rng(1))
    columns = np.unique(kept.indices)
    assert (len(columns), kept.dtype) == (7, counts.dtype)
    assert (kept[:, columns] != counts[:, columns]).nnz == 0
    assert (keep_genes(500, counts, np.random.default_rng(1)) != counts).nnz == 0


def test_components_of_a_panel_are_fitted_to_its_genes(context: Context) -> None:
    training = TrainingCounts.of(context)
    assert training is not None
    panel = keep_genes(40, read_rows(context.reader, np.arange(30)), np.random.default_rng(1))
    kept = in_vocabulary(context, panel).any(0)
    whole = training_counts(context)
    components = PCA(30, svd_solver="full").fit(log_profiles(whole[:, kept], 1e4))
    cells = in_vocabulary(context, panel)[:, kept]
    same_components(training.over_panel(panel), components.transform(log_profiles(cells, 1e4)))


def test_components_of_counts_per_1000_are_fitted_on_them(context: Context) -> None:
    training = TrainingCounts.of(context)
    assert training is not None
    counts = read_rows(context.reader, np.arange(30))
    components = PCA(30, svd_solver="full").fit(log_profiles(training_counts(context), 1e3))
    expected = components.transform(log_profiles(in_vocabulary(context, counts), 1e3))
    same_components(training.per_1k(counts), expected)


def test_components_of_thinned_cells_are_fitted_on_as_few_counts(context: Context) -> None:
    training = TrainingCounts.of(context)
    assert training is not None
    given: list[float] = []

    def half(counts: sp.csr_matrix, generator: np.random.Generator) -> sp.csr_matrix:
        given.append(float(counts.sum()))
        lost = counts.copy()
        lost.data //= 2
        lost.eliminate_zeros()
        return lost

    counts = read_rows(context.reader, np.arange(30))
    whole = training_counts(context)
    components = PCA(30, svd_solver="full").fit(log_profiles(whole // 2, 1e4))
    found = training.thinned(half, np.random.default_rng(0))(counts)
    same_components(found, components.transform(log_profiles(in_vocabulary(context, counts), 1e4)))
    assert given == [whole.sum()]


def test_baselines_of_a_panel_are_as_good_shifted_as_matched(context: Context) -> None:
    result = Degraded(MissingGenesConfig(genes=[20, 9], repeats=1)).run(context)
    table = {row.method.name: row for row in result.rows}
    of_panel = [name for name in table if "of the panel" in name]
    kinds = ("embedding", "PCA50", "all genes")
    assert of_panel == [f"{kind} of the panel + {one}" for kind in kinds for one in CLASSIFIERS]
    assert {table[name].method.kind for name in of_panel[:3]} == {"model"}
    for name in of_panel:
        assert table[name].value("whole") is None
        for level in ("20 genes", "9 genes"):
            assert len({table[name].scores[f"{level}, {way}"].mean for way in WAYS}) == 1
    column = "9 genes, matched"
    for kind in ("embedding", "all genes"):
        for one in CLASSIFIERS:
            of_panel_row = table[f"{kind} of the panel + {one}"]
            assert of_panel_row.value(column) == table[f"{kind} + {one}"].value(column)


@pytest.mark.parametrize(
    "config", [LowDepthConfig(repeats=1), MissingGenesConfig(repeats=1)], ids=lambda c: c.name
)
def test_a_model_that_copies_a_baseline_is_never_ahead(
    context: Context, monkeypatch: pytest.MonkeyPatch, config: Any
) -> None:
    def copied(context: Context, counts: sp.csr_matrix, *_: Any) -> np.ndarray:
        return context.model.components.transform(
            sp.csr_matrix(log_profiles(in_vocabulary(context, counts), 1e4).astype(np.float32))
        ).astype(np.float32)

    monkeypatch.setattr(features_module, "embed_counts", copied)
    result = Degraded(config).run(context)
    table = {row.method.name: row for row in result.rows}
    for one in CLASSIFIERS:
        copy, baseline = (
            table[f"{kind} + {one}"] for kind in ("embedding", "PCA50 of the training cells")
        )
        for column in copy.scores:
            assert copy.value(column) == pytest.approx(baseline.value(column), abs=0.02)
    assert all(verdict.outcome != "ahead" for verdict in result.verdicts)


def test_classifiers_are_trained_on_whole_degraded_or_all_cells(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a cell of these is about as near to two classes
    monkeypatch.setattr(classifiers, "TOLERANCE", 1e-6)
    result = Degraded(LowDepthConfig(count_fracs=[0.1], neighbors=5, repeats=2)).run(context)
    chosen, labels = chosen_cells(context, 3)
    whole = read_rows(context.reader, chosen)
    scaler = {ALL_GENES: StandardScaler(with_mean=False), EMBEDDING: StandardScaler()}
    table = {row.method.name: row for row in result.rows}
    columns = ["whole", *(f"10 % of counts, {way}" for way in WAYS)]
    for kind in scaler:
        expected: dict[str, list[float]] = {column: [] for column in columns}
        for repeat in range(2):
            lost = thin(0.1, whole, np.random.Generator(np.random.Philox(key=[4, 1000 + repeat])))
            cells = [features_of_counts(context, counts)[kind] for counts in (whole, lost)]
            right: dict[str, int] = dict.fromkeys(columns, 0)
            folds = StratifiedKFold(3, shuffle=True, random_state=4 + repeat)
            for train, test in folds.split(labels, labels):
                a, b = (
                    sp.csr_matrix(values[train]) if kind == ALL_GENES else values[train]
                    for values in cells
                )
                both = sp.vstack([a, b]) if kind == ALL_GENES else np.concatenate([a, b])
                for column, seen, tested in zip(columns, (a, b, a, both), (0, 1, 1, 1)):
                    of = np.tile(labels[train], seen.shape[0] // len(train))
                    pipeline = make_pipeline(scaler[kind], regression(sparse=kind == ALL_GENES))
                    right[column] += (
                        pipeline.fit(seen, of).predict(cells[tested][test]) == labels[test]
                    ).sum()
            for column in columns:
                expected[column].append(right[column] / len(labels))
        row = table[f"{kind.name} + logistic regression"]
        for column in columns:
            assert row.scores[column].repetitions == pytest.approx(expected[column]), column
            assert row.scores[column].mean == pytest.approx(np.mean(expected[column]))
    largest = max((labels == name).mean() for name in labels)
    assert [table["majority"].scores[column].mean for column in columns] == pytest.approx(
        len(columns) * [largest]
    )
    assert [row.method.kind for row in result.rows] == 3 * ["model"] + 16 * ["baseline"]
    made = [row.method.name for row in result.rows if row.value("whole") is None]
    assert made == [f"PCA50 of thinned cells + {name}" for name in CLASSIFIERS]
    assert all(row.value(column) is not None for row in result.rows for column in columns[1:])
    assert result.metric == "10 % of counts, shifted"
    assert [verdict.metric for verdict in result.verdicts] == [
        f"accuracy, {column}" for column in columns
    ]
    for column, verdict in zip(columns, result.verdicts):
        means = {row.method.name: row.value(column) for row in result.rows}
        best = [
            max(
                means[row.method.name]
                for row in result.rows
                if row.method.kind == kind and means[row.method.name] is not None
            )
            for kind in ("model", "baseline")
        ]
        assert [means[verdict.compared], means[verdict.against]] == pytest.approx(best)
        assert verdict.difference == pytest.approx(best[0] - best[1])
    genes = Degraded(MissingGenesConfig(genes=[20, 9], repeats=1)).run(context)
    expected_columns = [
        "whole",
        *(f"{level}, {way}" for level in ("20 genes", "9 genes") for way in WAYS),
    ]
    assert [*genes.rows[0].scores] == expected_columns
