"""Tasks low_depth and missing_genes: what cells lose, what baselines know of it, and scores against
scikit-learn.
"""

from itertools import product
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.decomposition import PCA
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from cellmill import open_cells
from cellmill.config.parts.tasks import LowDepthConfig, MissingGenesConfig
from cellmill.evaluate.classifiers import newton
from cellmill.evaluate.features import cell_features as features_module
from cellmill.evaluate.features.cell_features import compute_features, read_rows
from cellmill.evaluate.labels import choose_cells
from cellmill.evaluate.methods import ALL_GENES, EMBEDDING
from cellmill.evaluate.task import Context, Skipped
from cellmill.evaluate.tasks.classification.degraded import ComponentFitter
from cellmill.evaluate.tasks.classification.low_depth import LowDepth, thin
from cellmill.evaluate.tasks.classification.missing_genes import MissingGenes, keep_genes
from cellmill.runs.results import TaskResult
from tests.unit.evaluated import regression
from tests.unit.small_corpus import shard_paths

WAYS = ("matched", "shifted", "trained on all levels")
CLASSIFIERS = ("logistic regression", "logistic regression, unscaled", "kNN")


def chosen_cells(context: Context, fewest: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices and labels of the scored cells of classes with `fewest` cells."""
    scored = np.flatnonzero(context.scored)
    chosen = choose_cells(context.reader.obs["cell_type"].iloc[scored], fewest, seed=4)
    return scored[chosen.cells], chosen.labels


def training_counts(context: Context) -> np.ndarray:
    """Counts of the cells of all training shards, `(cells, genes)`."""
    paths = shard_paths(context.model.manifest, "train")
    shards = [open_cells(path).X.toarray() for path in paths]
    return np.concatenate(shards).astype(np.float64)


def in_vocabulary(context: Context, counts: sp.csr_matrix) -> np.ndarray:
    """The counts by gene of the vocabulary, column by column."""
    dense = counts.toarray()
    by_gene = np.zeros((len(dense), context.model.vocabulary.n_genes))
    for column, gene in enumerate(context.gene_columns.target):
        if gene >= 0:
            by_gene[:, gene] += dense[:, column]
    return by_gene


def log_profiles(counts: np.ndarray, total: float) -> np.ndarray:
    """log(1 + counts per `total`)."""
    depths = np.maximum(counts.sum(1, keepdims=True), 1)
    return np.log1p(total * counts / depths)


def check_components(components: np.ndarray, training: np.ndarray, cells: np.ndarray) -> None:
    """The first components of cells are those of a PCA of training cells, but for their signs."""
    pca = PCA(30, svd_solver="full").fit(training)
    expected = np.abs(pca.transform(cells))
    first = np.abs(components[:, :5])
    np.testing.assert_allclose(first, expected[:, :5], rtol=1e-2, atol=1e-2)


def twenty_of_some_genes() -> sp.csr_matrix:
    """Counts of 200 cells and 80 genes: 20 of two genes of five, and none of the others."""
    is_expressed = np.random.default_rng(0).random((200, 80)) < 0.4
    return sp.csr_matrix(20 * is_expressed.astype(np.uint32))


def test_thinning_keeps_each_count_with_equal_probability() -> None:
    counts = twenty_of_some_genes()
    thinned = thin(0.1, counts, np.random.default_rng(1))
    assert thinned.dtype == counts.dtype
    assert thinned.data.all()
    assert (thinned.toarray() <= counts.toarray()).all()
    kept_frac = thinned.sum() / counts.sum()
    lost_genes_frac = 1 - thinned.nnz / counts.nnz
    assert kept_frac == pytest.approx(0.1, rel=0.03)
    assert lost_genes_frac == pytest.approx(0.9**20, abs=0.01)


def test_the_same_genes_are_kept_in_every_cell() -> None:
    counts = twenty_of_some_genes()
    kept = keep_genes(7, counts, np.random.default_rng(1))
    columns = np.unique(kept.indices)
    assert len(columns) == 7
    assert kept.dtype == counts.dtype
    assert (kept[:, columns] != counts[:, columns]).nnz == 0
    every = keep_genes(500, counts, np.random.default_rng(1))
    assert (every != counts).nnz == 0


def test_components_of_a_panel_are_fitted_to_its_genes(context: Context) -> None:
    fitter = ComponentFitter.read(context)
    assert fitter is not None
    counts = read_rows(context.reader, np.arange(30))
    panel = keep_genes(40, counts, np.random.default_rng(1))
    cells = in_vocabulary(context, panel)
    in_panel = cells.any(0)
    whole = training_counts(context)
    check_components(
        fitter.fit_panel(panel)(panel),
        training=log_profiles(whole[:, in_panel], 1e4),
        cells=log_profiles(cells[:, in_panel], 1e4),
    )


def test_components_of_counts_per_1000_are_fitted_on_them(context: Context) -> None:
    fitter = ComponentFitter.read(context)
    assert fitter is not None
    counts = read_rows(context.reader, np.arange(30))
    check_components(
        fitter.project_per_1k(counts),
        training=log_profiles(training_counts(context), 1e3),
        cells=log_profiles(in_vocabulary(context, counts), 1e3),
    )


def test_components_of_thinned_cells_are_fitted_on_as_few_counts(context: Context) -> None:
    fitter = ComponentFitter.read(context)
    assert fitter is not None
    sums: list[float] = []

    def halve(counts: sp.csr_matrix, generator: np.random.Generator) -> sp.csr_matrix:
        sums.append(float(counts.sum()))
        halves = counts.copy()
        halves.data //= 2
        halves.eliminate_zeros()
        return halves

    counts = read_rows(context.reader, np.arange(30))
    whole = training_counts(context)
    transform = fitter.fit_thinned(halve, np.random.default_rng(0))
    check_components(
        transform(counts),
        training=log_profiles(whole // 2, 1e4),
        cells=log_profiles(in_vocabulary(context, counts), 1e4),
    )
    assert sums == [whole.sum()]


def test_baselines_of_a_panel_are_as_good_shifted_as_matched(context: Context) -> None:
    result = MissingGenes(MissingGenesConfig(genes=[20, 9], repeats=1)).run(context)
    table = {row.method.name: row for row in result.rows}
    features = ("embedding", "PCA50", "all genes")
    expected = [f"{kind} of the panel + {name}" for kind, name in product(features, CLASSIFIERS)]
    assert [name for name in table if "of the panel" in name] == expected
    for name in expected:
        row = table[name]
        assert row.method.kind == ("model" if name.startswith("embedding") else "baseline")
        assert row.value("whole") is None
        for level in ("20 genes", "9 genes"):
            matched = row.scores[f"{level}, matched"].mean
            assert row.scores[f"{level}, shifted"].mean == matched
            assert row.scores[f"{level}, trained on all levels"].mean == matched
    column = "9 genes, matched"
    for kind, name in product(("embedding", "all genes"), CLASSIFIERS):
        of_panel = table[f"{kind} of the panel + {name}"]
        assert of_panel.value(column) == table[f"{kind} + {name}"].value(column)


def test_without_training_counts_only_components_are_missing(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = MissingGenesConfig(genes=[9], repeats=1)
    names = [row.method.name for row in MissingGenes(config).run(context).rows]
    monkeypatch.setattr(ComponentFitter, "read", lambda context: None)
    left = [row.method.name for row in MissingGenes(config).run(context).rows]
    fitted = ("PCA50 of the training cells, CP1k", "PCA50 of the panel")
    assert left == [name for name in names if not name.startswith(fitted)]


@pytest.mark.parametrize(
    ("task", "config"),
    [(LowDepth, LowDepthConfig(repeats=1)), (MissingGenes, MissingGenesConfig(repeats=1))],
    ids=["low_depth", "missing_genes"],
)
def test_a_model_that_copies_a_baseline_is_never_ahead(
    context: Context, monkeypatch: pytest.MonkeyPatch, task: Any, config: Any
) -> None:
    def copy_baseline(
        context: Context, cells: np.ndarray, counts: sp.csr_matrix, *_: Any
    ) -> np.ndarray:
        profiles = log_profiles(in_vocabulary(context, counts), 1e4)
        sparse = sp.csr_matrix(profiles.astype(np.float32))
        return context.model.components.transform(sparse).astype(np.float32)

    monkeypatch.setattr(features_module, "embed_counts", copy_baseline)
    result = task(config).run(context)
    table = {row.method.name: row for row in result.rows}
    for name in CLASSIFIERS:
        copy = table[f"embedding + {name}"]
        baseline = table[f"PCA50 of the training cells + {name}"]
        for column in copy.scores:
            assert copy.value(column) == pytest.approx(baseline.value(column), abs=0.02)
    outcomes = {verdict.outcome for verdict in result.verdicts}
    assert "ahead" not in outcomes


COLUMNS = ["whole", *(f"10 % of counts, {way}" for way in WAYS)]


@pytest.fixture(scope="module")
def low_depth(context: Context) -> TaskResult:
    with pytest.MonkeyPatch.context() as patch:
        # one of these cells is about as near to two classes
        patch.setattr(newton, "TOLERANCE", 1e-6)
        config = LowDepthConfig(count_fracs=[0.1], neighbors=5, repeats=2)
        return LowDepth(config).run(context)


@pytest.mark.parametrize("features", [ALL_GENES, EMBEDDING], ids=lambda features: features.name)
def test_classifiers_are_trained_on_whole_degraded_or_all_cells(
    context: Context, low_depth: TaskResult, features: Any
) -> None:
    cells, labels = chosen_cells(context, 3)
    counts = read_rows(context.reader, cells)
    is_sparse = features == ALL_GENES
    scaler = StandardScaler(with_mean=not is_sparse)
    stack: Any = sp.vstack if is_sparse else np.concatenate
    expected: dict[str, list[float]] = {column: [] for column in COLUMNS}
    for repeat in range(2):
        bits = np.random.Philox(key=[4, 1000 + repeat])
        thinned_counts = thin(0.1, counts, np.random.Generator(bits))
        whole = compute_features(context, cells, counts)[features]
        thinned = compute_features(context, cells, thinned_counts)[features]
        n_right = dict.fromkeys(COLUMNS, 0)
        folds = StratifiedKFold(3, shuffle=True, random_state=4 + repeat)
        for train, test in folds.split(labels, labels):
            # of each column: the cells that are trained on, and those that are tested
            runs = [
                ([whole[train]], whole[test]),
                ([thinned[train]], thinned[test]),
                ([whole[train]], thinned[test]),
                ([whole[train], thinned[train]], thinned[test]),
            ]
            for column, (training, tested) in zip(COLUMNS, runs, strict=True):
                pipeline = make_pipeline(scaler, regression(sparse=is_sparse))
                pipeline.fit(stack(training), np.tile(labels[train], len(training)))
                n_right[column] += np.count_nonzero(pipeline.predict(tested) == labels[test])
        for column in COLUMNS:
            expected[column].append(n_right[column] / len(labels))
    [row] = [
        row for row in low_depth.rows if row.method.name == f"{features.name} + logistic regression"
    ]
    for column in COLUMNS:
        score = row.scores[column]
        assert score.repetitions == pytest.approx(expected[column]), column
        assert score.mean == pytest.approx(np.mean(expected[column]))


def test_majority_is_the_largest_class_at_every_depth(
    context: Context, low_depth: TaskResult
) -> None:
    _, labels = chosen_cells(context, 3)
    _, sizes = np.unique(labels, return_counts=True)
    [row] = [row for row in low_depth.rows if row.method.name == "majority"]
    for column in COLUMNS:
        assert row.scores[column].mean == pytest.approx(sizes.max() / len(labels))


def test_only_thinned_components_have_no_score_of_whole_cells(low_depth: TaskResult) -> None:
    kinds = [row.method.kind for row in low_depth.rows]
    assert kinds == 3 * ["model"] + 16 * ["baseline"]
    without_whole = [row.method.name for row in low_depth.rows if row.value("whole") is None]
    assert without_whole == [f"PCA50 of thinned cells + {name}" for name in CLASSIFIERS]
    for row, column in product(low_depth.rows, COLUMNS[1:]):
        assert row.value(column) is not None


def test_each_depth_has_a_verdict_of_the_best_rows(low_depth: TaskResult) -> None:
    assert low_depth.metric == "10 % of counts, shifted"
    for column, verdict in zip(COLUMNS, low_depth.verdicts, strict=True):
        assert verdict.metric == f"accuracy, {column}"
        means: dict[str, list[float]] = {"model": [], "baseline": []}
        mean_by_name = {}
        for row in low_depth.rows:
            mean = row.value(column)
            if mean is not None:
                means[row.method.kind].append(mean)
                mean_by_name[row.method.name] = mean
        best_model = max(means["model"])
        best_baseline = max(means["baseline"])
        assert mean_by_name[verdict.compared] == pytest.approx(best_model)
        assert mean_by_name[verdict.against] == pytest.approx(best_baseline)
        assert verdict.difference == pytest.approx(best_model - best_baseline)


def test_columns_of_missing_genes_are_levels_in_three_ways(context: Context) -> None:
    result = MissingGenes(MissingGenesConfig(genes=[20, 9], repeats=1)).run(context)
    levels = ("20 genes", "9 genes")
    columns = [f"{level}, {way}" for level, way in product(levels, WAYS)]
    assert [*result.rows[0].scores] == ["whole", *columns]


def test_a_level_of_more_genes_than_are_expressed_is_left_out(context: Context) -> None:
    cells, _ = chosen_cells(context, 3)
    n = len(np.unique(read_rows(context.reader, cells).indices))
    result = MissingGenes(MissingGenesConfig(genes=[n + 1, 9], repeats=1)).run(context)
    assert [*result.rows[0].scores] == ["whole", *(f"9 genes, {way}" for way in WAYS)]
    assert result.metric == "9 genes, shifted"
    assert result.notes == [f"No column for {n + 1:,} genes: the cells express {n:,}."]
    more = MissingGenes(MissingGenesConfig(genes=[n + 2, n + 1], repeats=1))
    with pytest.raises(Skipped, match=f"the cells express {n:,} genes, and genes keeps {n + 1:,} "):
        more.run(context)
