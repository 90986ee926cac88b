"""Fits, neighbours and components from shared products of cells equal those of the features of a
fold, and nothing of the tested cells is in them.
"""

import tracemalloc
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.decomposition import PCA
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from cellmill.evaluate.classifiers import dual, logistic, newton
from cellmill.evaluate.classifiers.dual import FoldRegression, fit_folds
from cellmill.evaluate.classifiers.fitted import NearestCells, make_classifiers, precompute_folds
from cellmill.evaluate.features import products as products_module
from cellmill.evaluate.features.products import (
    CellProducts,
    FeatureCache,
    SharedCells,
    compute_scales,
)
from cellmill.evaluate.methods import REGRESSION, UNSCALED_REGRESSION
from cellmill.evaluate.prediction_cache import CachedClassifiers, PredictionCache
from cellmill.evaluate.splits import Fold
from cellmill.evaluate.tasks.classification.fold_predictions import fit_components
from cellmill.runs.results import ScoredMethod
from tests.unit.evaluated import regression

SHAPES = pytest.mark.parametrize(
    ("n", "width", "classes"),
    [(60, 200, 3), (60, 200, 2), (150, 40, 3)],
    ids=["more genes than cells", "two classes", "fewer genes than cells"],
)


def _cells(n: int, width: int, classes: int) -> tuple[sp.csr_matrix, np.ndarray, np.ndarray]:
    """Log counts, labels, and a mask of fitted cells.

    One gene is in no cell, one is constant, one is in a tested cell only, one in a single fitted
    cell. The last class has one fitted cell.
    """
    random = np.random.default_rng(n + width)
    number = np.arange(n) % classes
    number[(number == classes - 1) & (np.arange(n) > classes)] = 0
    rates = np.exp(random.normal(size=(classes, width)))
    counts = np.log1p(random.poisson(rates[number] * random.uniform(0.3, 3, n)[:, None]))
    is_fitted = np.arange(n) % 4 != 3
    counts[:, :4] = 0
    counts[:, 1] = 2
    counts[3, 2] = 1
    counts[4, 3] = 1
    return sp.csr_matrix(counts.astype(np.float32)), np.array(["a", "b", "c"])[number], is_fitted


def _components(genes: sp.csr_matrix, train: np.ndarray, components: int) -> np.ndarray:
    cache = PredictionCache()
    found = fit_components(FeatureCache().share(genes), train, components, cache)
    return found[ScoredMethod(f"PCA{components}")]


def _centre(logits: np.ndarray) -> np.ndarray:
    return logits - logits.mean(1, keepdims=True)


def _folds(labels: np.ndarray) -> tuple[list[FoldRegression], list[np.ndarray]]:
    """Fits on three fourths of the cells each, and the cells that they test."""
    fits = []
    tests = []
    for part in (3, 2):
        is_fitted = np.arange(len(labels)) % 4 != part
        cells = np.flatnonzero(is_fitted)
        _, class_of_cell = np.unique(labels[cells], return_inverse=True)
        fits.append(FoldRegression(cells, np.eye(class_of_cell.max() + 1)[:, class_of_cell]))
        tests.append(np.flatnonzero(~is_fitted))
    return fits, tests


@pytest.mark.parametrize("standardised", [True, False])
@pytest.mark.parametrize("single", [True, False], ids=["float32", "float64"])
@pytest.mark.parametrize("columns", [1, dual.MAX_STACKED_CLASSES], ids=["one by one", "together"])
@SHAPES
def test_regression_of_shared_products_equals_scikit_learn(
    n: int,
    width: int,
    classes: int,
    columns: int,
    single: bool,
    standardised: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dual, "MAX_STACKED_CLASSES", columns)
    if single:  # as of many cells
        monkeypatch.setattr(products_module, "MAX_DOUBLE", 0)
    genes, labels, _ = _cells(n, width, classes)
    fits, tests = _folds(labels)
    found = fit_folds(FeatureCache().share(genes).source, fits, standardised)
    assert sorted(found) == [0, 1]
    scaler: list[Any] = [StandardScaler(with_mean=False)] if standardised else []
    for number, (fit, test) in enumerate(zip(fits, tests)):
        reference = make_pipeline(*scaler, regression(sparse=True))
        reference.fit(genes[fit.cells], labels[fit.cells])
        expected = reference.decision_function(genes[test])
        logits = found[number][:, test].T
        if len(fit.targets) == 2:
            np.testing.assert_allclose(logits[:, 1] - logits[:, 0], expected, atol=5e-3)
        else:
            np.testing.assert_allclose(_centre(logits), _centre(expected), atol=5e-3)


def test_folds_fitted_together_predict_as_single_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logistic, "MAX_DENSE_SIDE", 5)
    genes, labels, _ = _cells(60, 200, 3)
    fits, tests = _folds(labels)
    splits = [Fold(0, fit.cells, test) for fit, test in zip(fits, tests)]
    shared = FeatureCache().share(genes)
    known: dict[str, np.ndarray] = {}
    precompute_folds(shared, labels, splits, known)
    assert len(known) == 4, "two folds, two regressions"
    classifiers = make_classifiers(5)
    for split in splits:
        train, test = split.fitted, split.tested
        caches = {name: dict(known) for name in classifiers}
        cached = CachedClassifiers(caches, classifiers, shared[train], labels[train])
        keys = cached.keys(shared[test])
        for name in (REGRESSION, UNSCALED_REGRESSION):
            alone = classifiers[name].fit(genes[train], labels[train]).predict(genes[test])
            assert known[keys[name]].tolist() == alone.tolist()
    monkeypatch.setattr(dual, "MAX_ROUNDS", 1)
    monkeypatch.setattr(dual, "OFFSET_TOLERANCE", 0)
    unfinished: dict[str, np.ndarray] = {}
    precompute_folds(shared, labels, splits, unfinished)
    assert len(unfinished) == 2, "a scaled fit that does not settle is left to be fitted alone"


def test_nothing_to_fit_computes_no_products(monkeypatch: pytest.MonkeyPatch) -> None:
    genes, labels, _ = _cells(60, 200, 3)
    fits, tests = _folds(labels)
    splits = [Fold(0, fit.cells, test) for fit, test in zip(fits, tests)]
    small = FeatureCache().share(genes)
    known: dict[str, np.ndarray] = {}
    precompute_folds(small, labels, splits, known)
    assert not known
    assert "plain" not in vars(small.source)
    monkeypatch.setattr(logistic, "MAX_DENSE_SIDE", 5)
    precompute_folds(small, labels, splits, known)
    again = FeatureCache().share(genes)
    monkeypatch.setattr(products_module.CellProducts, "forget_scaled", lambda _products: None)
    precompute_folds(again, labels, splits, known)
    assert not {"plain", "scaled"} & {*vars(again.source)}, "all predictions are known"


def test_tested_cells_leave_no_trace_in_a_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newton, "TOLERANCE", 1e-7)
    monkeypatch.setattr(dual, "OFFSET_TOLERANCE", 1e-7)
    monkeypatch.setattr(dual, "MAX_ROUNDS", 200)
    genes, labels, is_fitted = _cells(60, 200, 3)
    train = np.flatnonzero(is_fitted)
    changed = genes.toarray()
    changed[~is_fitted] = 1.5 * changed[~is_fitted][::-1]
    fits, _ = _folds(labels)
    assert fits[0].cells.tolist() == train.tolist()
    for standardised in (True, False):
        first, second = (
            fit_folds(FeatureCache().share(cells).source, fits[:1], standardised)[0][:, train]
            for cells in (genes, sp.csr_matrix(changed))
        )
        np.testing.assert_allclose(first, second, atol=1e-4)
    first, second = (
        _components(cells, train, 5)[train] for cells in (genes, sp.csr_matrix(changed))
    )
    np.testing.assert_allclose(np.abs(first), np.abs(second), atol=1e-4)


@pytest.mark.parametrize("share", [0, 0.3, 2], ids=["dense", "both", "sparse"])
def test_products_of_rare_and_common_genes_are_those_of_all(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products_module, "RARE_FRAC", share)
    monkeypatch.setattr(products_module, "CELL_BLOCK", 25)
    monkeypatch.setattr(products_module, "GENE_BLOCK", 30)
    genes, _, _ = _cells(60, 200, 3)
    dense = genes.toarray().astype(np.float64)
    source = FeatureCache().share(genes).source
    np.testing.assert_allclose(source.plain, dense @ dense.T, rtol=1e-5)


@pytest.mark.parametrize("single", [True, False], ids=["float32", "float64"])
def test_components_of_shared_products_equal_scikit_learn(
    single: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if single:
        monkeypatch.setattr(products_module, "MAX_DOUBLE", 0)
    genes, _, is_fitted = _cells(60, 200, 3)
    train = np.flatnonzero(is_fitted)
    found = _components(genes, train, 7)
    dense = genes.toarray().astype(np.float64)
    expected = PCA(7, svd_solver="full").fit(dense[train]).transform(dense)
    # the sign of a component is that of all cells
    signs = np.sign((found * expected).sum(0))
    np.testing.assert_allclose(found * signs, expected, atol=2e-3)
    copies = genes[np.arange(120) % 6]
    assert _components(copies, np.arange(100), 50).shape == (120, 5)
    empty = sp.csr_matrix((30, 40), dtype=np.float32)
    assert not _components(empty, np.arange(20), 5).any()


@SHAPES
def test_neighbours_of_shared_products_equal_scikit_learn(n: int, width: int, classes: int) -> None:
    genes, labels, is_fitted = _cells(n, width, classes)
    shared = FeatureCache().share(genes)
    ours = NearestCells(5).fit(shared[is_fitted], labels[is_fitted]).predict(shared[~is_fitted])
    reference = KNeighborsClassifier(5).fit(genes[is_fitted], labels[is_fitted])
    assert ours.tolist() == reference.predict(genes[~is_fitted]).tolist()


def test_cells_of_equal_content_share_products() -> None:
    genes, _, _ = _cells(60, 200, 3)
    feature_cache = FeatureCache()
    shared = feature_cache.share(genes)
    assert feature_cache.share(genes.copy()).source is shared.source
    assert feature_cache.share(genes * 2).source is not shared.source
    whole = SharedCells(shared.source, np.arange(60))
    dense = genes.toarray().astype(np.float64)
    np.testing.assert_allclose(whole.products(whole), dense @ dense.T, rtol=1e-5)


@pytest.mark.parametrize("single", [True, False], ids=["float32", "float64"])
def test_products_equal_those_of_dense_cells(single: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if single:
        monkeypatch.setattr(products_module, "MAX_DOUBLE", 0)
    monkeypatch.setattr(products_module, "GENE_BLOCK", 32)
    monkeypatch.setattr(products_module, "CELL_BLOCK", 25)
    genes, _, _ = _cells(150, 200, 3)
    genes[:, 100:] = genes[:, 100:].multiply(np.arange(150)[:, None] % 50 == 0)  # rare genes
    genes.eliminate_zeros()
    shared = CellProducts(genes, "")
    dense = genes.toarray().astype(np.float64)
    np.testing.assert_allclose(shared.plain, dense @ dense.T, rtol=1e-5, atol=1e-5)
    scaled = StandardScaler(with_mean=False).fit_transform(dense)
    np.testing.assert_allclose(shared.scaled, scaled @ scaled.T, rtol=1e-5, atol=1e-4)


def test_deviations_of_groups_are_of_their_members_alone() -> None:
    genes, _, is_fitted = _cells(60, 200, 3)
    groups = np.stack([is_fitted, ~is_fitted]).astype(float)
    found = compute_scales(genes, groups)
    for scale, members in zip(found, groups):
        scaler = StandardScaler(with_mean=False).fit(genes[members == 1].astype(np.float64))
        np.testing.assert_allclose(scale, scaler.scale_, rtol=1e-9)
    assert found[0, 1] == 1, "a constant gene is not divided by a rounding error"


def test_products_take_little_more_memory_than_their_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products_module, "MAX_DOUBLE", 0)
    monkeypatch.setattr(products_module, "GENE_BLOCK", 64)
    monkeypatch.setattr(products_module, "CELL_BLOCK", 64)
    genes = sp.random_array((1500, 400), density=0.05, format="csr", dtype=np.float32, rng=0)
    shared = CellProducts(genes, "")
    tracemalloc.start()
    size = shared.plain.nbytes
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.5 * size, f"{peak:,} bytes for {size:,}"
