"""Fits, neighbours and components from shared products of cells equal those of the features of a
fold, and nothing of the tested cells is in them.
"""

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.decomposition import PCA
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from cellmill.evaluate import products as products_module
from cellmill.evaluate.baselines import BaselineCache
from cellmill.evaluate.classifiers import dual, logistic, newton
from cellmill.evaluate.classifiers.fitted import NearestCells
from cellmill.evaluate.classifiers.logistic import LogisticRegression
from cellmill.evaluate.products import SharedCells
from cellmill.evaluate.tasks.classify import _fit_components
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
    cache = BaselineCache()
    found = _fit_components(cache.share(genes), train, components, cache)
    return found[ScoredMethod(f"PCA{components}")]


def _centre(logits: np.ndarray) -> np.ndarray:
    return logits - logits.mean(1, keepdims=True)


@pytest.mark.parametrize("standardised", [True, False])
@pytest.mark.parametrize("single", [True, False], ids=["float32", "float64"])
@SHAPES
def test_regression_of_shared_products_equals_scikit_learn(
    n: int,
    width: int,
    classes: int,
    single: bool,
    standardised: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if single:  # as of many cells and genes
        monkeypatch.setattr(products_module, "MAX_DOUBLE", 0)
        monkeypatch.setattr(logistic, "MAX_SIDE", 5)
    else:  # whitened features are fitted less closely
        monkeypatch.setattr(newton, "TOLERANCE", 1e-6)
    genes, labels, is_fitted = _cells(n, width, classes)
    shared = BaselineCache().share(genes)
    train = np.flatnonzero(is_fitted)
    test = np.flatnonzero(~is_fitted)
    ours = LogisticRegression(standardised=standardised).fit(shared[train], labels[train])
    scaler: list[Any] = [StandardScaler(with_mean=False)] if standardised else []
    reference = make_pipeline(*scaler, regression(sparse=True)).fit(genes[train], labels[train])
    logits = genes[test] @ ours.coefficients + ours.intercepts
    expected = reference.decision_function(genes[test])
    if classes == 2:
        np.testing.assert_allclose(logits[:, 1] - logits[:, 0], expected, atol=5e-3)
    else:
        np.testing.assert_allclose(_centre(logits), _centre(expected), atol=5e-3)
    assert ours.predict(shared[test]).tolist() == reference.predict(genes[test]).tolist()


@pytest.mark.parametrize("rounds", [0, dual.MAX_ROUNDS], ids=["no stand-in", "stand-in"])
def test_tested_cells_leave_no_trace_in_a_fit(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logistic, "MAX_SIDE", 5)
    monkeypatch.setattr(newton, "TOLERANCE", 1e-7)
    monkeypatch.setattr(dual, "LOGIT_TOLERANCE", 1e-7)
    monkeypatch.setattr(dual, "MAX_ROUNDS", rounds)
    genes, labels, is_fitted = _cells(60, 200, 3)
    train = np.flatnonzero(is_fitted)
    changed = genes.toarray()
    changed[~is_fitted] = 4 * np.random.default_rng(0).random(changed[~is_fitted].shape)
    for standardised in (True, False):
        fits = []
        for cells in (genes, sp.csr_matrix(changed)):
            shared = BaselineCache().share(cells)
            model = LogisticRegression(standardised=standardised)
            fits.append(model.fit(shared[train], labels[train]))
        np.testing.assert_allclose(fits[0].coefficients, fits[1].coefficients, atol=1e-5)
        np.testing.assert_allclose(fits[0].intercepts, fits[1].intercepts, atol=1e-5)
    first, second = (
        _components(cells, train, 5)[train] for cells in (genes, sp.csr_matrix(changed))
    )
    np.testing.assert_allclose(np.abs(first), np.abs(second), atol=1e-4)


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
    shared = BaselineCache().share(genes)
    ours = NearestCells(5).fit(shared[is_fitted], labels[is_fitted]).predict(shared[~is_fitted])
    reference = KNeighborsClassifier(5).fit(genes[is_fitted], labels[is_fitted])
    assert ours.tolist() == reference.predict(genes[~is_fitted]).tolist()


def test_cells_of_equal_content_share_products() -> None:
    genes, _, _ = _cells(60, 200, 3)
    cache = BaselineCache()
    shared = cache.share(genes)
    assert cache.share(genes.copy()).source is shared.source
    assert cache.share(genes * 2).source is not shared.source
    whole = SharedCells(shared.source, np.arange(60))
    dense = genes.toarray().astype(np.float64)
    np.testing.assert_allclose(whole.products(whole), dense @ dense.T, rtol=1e-5)
