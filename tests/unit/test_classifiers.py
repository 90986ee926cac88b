"""Logistic regression has scikit-learn's optimum; predictions of baselines are kept by all they
depend on.
"""

import warnings
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.linear_model import LogisticRegression as Reference
from sklearn.neighbors import NearestCentroid
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from cellmill.config import plugin
from cellmill.config.evaluate import Evaluate
from cellmill.errors import DataError
from cellmill.evaluate.classifiers import logistic, newton
from cellmill.evaluate.classifiers.fitted import make_cached_classifiers, predict_all
from cellmill.evaluate.classifiers.logistic import LogisticRegression
from cellmill.evaluate.features import components, products
from cellmill.evaluate.features.components import pca
from cellmill.evaluate.features.products import FeatureCache
from cellmill.evaluate.methods import ALL_GENES, EMBEDDING
from cellmill.evaluate.prediction_cache import MAX_BYTES, PredictionCache, fit
from cellmill.evaluate.tasks.classification.fold_predictions import fit_components
from cellmill.runs.results import ScoredMethod
from tests.unit.evaluated import regression


def _cells(n: int, width: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Features of unlike scales, the first one constant, and labels that depend on them."""
    random = np.random.default_rng(n + width)
    of_cell = random.integers(classes, size=n)
    features = random.normal(size=(classes, width))[of_cell] + 2 * random.normal(size=(n, width))
    features = features * np.geomspace(0.1, 10, width) + 3
    features[:, 0] = 7
    return features, np.array(["b", "a", "d", "c"])[of_cell]


@pytest.mark.parametrize("standardised", [True, False])
@pytest.mark.parametrize(
    ("n", "width", "classes"),
    [(90, 12, 4), (90, 12, 2), (30, 80, 3)],
    ids=["many", "two", "fewer cells than features"],
)
def test_coefficients_equal_scikit_learn(
    n: int, width: int, classes: int, standardised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(newton, "TOLERANCE", 1e-9)
    features, labels = _cells(n, width, classes)
    ours = LogisticRegression(standardised=standardised).fit(features, labels)
    scaler = StandardScaler().fit(features)
    values = scaler.transform(features) if standardised else features
    reference = Reference(solver="newton-cg", tol=1e-12, max_iter=1000).fit(values, labels)
    assert ours.classes.tolist() == reference.classes_.tolist()
    logits = features @ ours.coefficients + ours.intercepts
    expected = reference.decision_function(values)
    if classes == 2:
        np.testing.assert_allclose(logits[:, 1] - logits[:, 0], expected, atol=1e-5)
    else:
        np.testing.assert_allclose(
            logits - logits.mean(1, keepdims=True),
            expected - expected.mean(1, keepdims=True),
            atol=1e-5,
        )
    assert ours.predict(features).tolist() == reference.predict(values).tolist()


@pytest.mark.parametrize("standardised", [True, False])
def test_sparse_features_have_the_same_predictions_as_dense(
    standardised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    features, labels = _cells(60, 20, 3)
    features = np.maximum(features, 0)
    tested = features[::-1]
    scaler: list[Any] = [StandardScaler(with_mean=False)] if standardised else []
    pipeline = make_pipeline(*scaler, regression(sparse=True))
    expected = pipeline.fit(sp.csr_matrix(features), labels).predict(sp.csr_matrix(tested))
    assert len(set(expected)) == 3
    for kept in (slice(None), labels != "d"):  # two classes have one logit in scikit-learn
        a = LogisticRegression(standardised=standardised).fit(
            sp.csr_matrix(features[kept]), labels[kept]
        )
        with monkeypatch.context() as patch:
            patch.setattr(logistic, "MAX_DENSE_SIDE", 19)
            patch.setattr(newton, "whiten", None)
            b = LogisticRegression(standardised=standardised).fit(
                sp.csr_matrix(features[kept]), labels[kept]
            )
        predicted = [fitted.predict(sp.csr_matrix(tested)).tolist() for fitted in (a, b)]
        assert predicted[0] == predicted[1]
        assert len(set(predicted[0])) == len(set(labels[kept]))
        if len(a.classes) == 3:
            assert predicted[0] == expected.tolist()


@pytest.mark.filterwarnings("ignore:Line Search failed")
def test_singular_scales_are_left_to_scikit_learn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    features, labels = _cells(90, 12, 3)
    features[:, 1:3] = 1e12 * features[:, 3:4]
    monkeypatch.setattr(newton, "run_search", None)
    fitted = LogisticRegression(standardised=False).fit(features, labels)
    assert set(fitted.predict(features)) <= set(labels)


@pytest.mark.parametrize("is_sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_feature_that_is_not_finite_is_refused(is_sparse: bool, value: float) -> None:
    features, labels = _cells(60, 8, 3)
    features = features.astype(np.float64)
    features[3, 2] = value
    values = sp.csr_matrix(features) if is_sparse else features
    with (
        np.errstate(invalid="ignore"),
        pytest.raises(DataError, match=r"^a classifier cannot be fitted: a feature of a cell is"),
    ):
        LogisticRegression(standardised=False).fit(values, labels)


def test_a_fit_that_stops_early_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(newton, "MAX_STEPS", 2)
    fit("logistic regression", LogisticRegression(standardised=False), *_cells(90, 12, 4))
    assert (
        capsys.readouterr().out
        == "logistic regression on 12 features stopped before it converged\n"
    )


class WarningNetwork(MLPClassifier):
    def fit(self, features: Any, labels: Any) -> Any:
        warnings.warn("features are few", UserWarning, stacklevel=1)
        return super().fit(features, labels)


def test_a_packages_classifier_is_named_and_its_warnings_kept(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        for _ in range(2):
            fit("network", WarningNetwork(max_iter=2), *_cells(90, 12, 4))
    texts = [str(warning.message) for warning in caught]
    assert texts == ["features are few"], "the warning of the next fold is not repeated"
    assert capsys.readouterr().out == ("network on 12 features stopped before it converged\n" * 2)


RNG = np.random.default_rng(0)
LABELS = np.repeat(["a", "b", "c"], 10)
DENSE = RNG.normal(size=(30, 4)) + np.repeat(np.arange(3), 10)[:, None]
PCA = ScoredMethod("PCA50")
FEATURES = {
    EMBEDDING: DENSE,
    PCA: DENSE + 1,
    ALL_GENES: sp.csr_matrix(np.maximum(DENSE, 0)),
}


def predicted(
    cache: PredictionCache,
    features: dict[ScoredMethod, Any] = FEATURES,
    labels: np.ndarray = LABELS,
    **options: Any,
) -> dict[ScoredMethod, np.ndarray]:
    context: Any = SimpleNamespace(prediction_cache=cache, options=Evaluate(**options))
    return predict_all(make_cached_classifiers(features, labels, 5, context), features)


def test_a_second_evaluation_reads_stored_predictions(
    tmp_path: Path,
) -> None:
    file = tmp_path / "baselines" / "pbmc.npz"
    expected = predicted(PredictionCache())
    first = PredictionCache(file)
    predicted(first)
    first.save()
    content = file.read_bytes()
    second = PredictionCache(file)
    known = dict(second.predictions)
    assert len(known) == 6, "two kinds of features, three classifiers, and none of the model's"
    for name, classes in predicted(second).items():
        np.testing.assert_array_equal(classes, expected[name])
    assert second.predictions.keys() == known.keys()
    second.save()
    assert file.read_bytes() == content
    file.write_bytes(content[:-50])
    again = PredictionCache(file)
    assert again.predictions == {}
    predicted(again)
    again.save()
    assert PredictionCache(file).predictions.keys() == known.keys()


def test_no_prediction_of_an_installed_classifier_is_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    point = EntryPoint(
        "toy", "tests.plugin.cellmill_toy.classifier:toy_centroid", "cellmill.classifier"
    )
    monkeypatch.setattr(
        plugin, "entry_points", lambda group: [point] if group == point.group else []
    )
    plain = PredictionCache()
    predicted(plain)
    cache = PredictionCache()
    expected = NearestCentroid().fit(DENSE, LABELS).predict(DENSE)
    shown = predicted(cache, classifiers=["toy"])
    assert shown[replace(EMBEDDING, classifier="toy")].tolist() == expected.tolist()
    assert cache.predictions.keys() == plain.predictions.keys()
    assert len(cache.unsaved_predictions) == 4 + 2, "four by features of the model, two by the toy"


def test_changed_inputs_change_the_key_of_predictions(tmp_path: Path) -> None:
    cache = PredictionCache()
    predicted(cache)
    predicted(cache, labels=np.roll(LABELS, 1))
    predicted(cache, {PCA: DENSE + 1.5})
    predicted(cache, {ALL_GENES: sp.csr_matrix((DENSE > 0).astype(float))})
    wider = sp.csr_matrix(np.pad(np.maximum(DENSE, 0), ((0, 0), (0, 1))))
    predicted(cache, {ALL_GENES: wider})
    assert len(cache.predictions) == 6 + 6 + 3 * 3


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (newton, "TOLERANCE"),
        (newton, "MAX_KERNEL_CELLS"),
        (logistic, "MAX_DENSE_SIDE"),
        (products, "MAX_DOUBLE"),
        (components, "MIN_SINGULAR_RATIO"),
    ],
)
def test_a_constant_of_the_algorithm_changes_the_key(
    module: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = PredictionCache()
    predicted(cache)
    predicted(cache)
    assert len(cache.predictions) == 6
    monkeypatch.setattr(module, name, 2 * vars(module)[name])
    predicted(cache)
    assert len(cache.predictions) == 12


def test_components_are_stored_by_their_fitted_cells(tmp_path: Path) -> None:
    file = tmp_path / "pbmc.npz"
    genes = sp.csr_matrix(np.maximum(DENSE, 0))
    train = np.arange(0, 30, 2)
    first = PredictionCache(file)
    shared = FeatureCache().share(genes)
    expected = fit_components(shared, train, 3, first)[ScoredMethod("PCA3")]
    first.save()
    again = PredictionCache(file)
    np.testing.assert_array_equal(
        fit_components(shared, train, 3, again)[ScoredMethod("PCA3")], expected
    )
    assert len(again.predictions) == 1
    others = [
        (shared, train + 1, 3),
        (shared, train, 2),
        (FeatureCache().share(genes * 2), train, 3),
    ]
    for other in others:
        assert len(fit_components(*other, again)) == 1
    assert len(again.predictions) == 1 + len(others)
    wide = again.get_or_compute("zeros", genes, lambda: np.zeros((30, MAX_BYTES)))
    assert wide.shape == (30, MAX_BYTES)
    assert len(again.predictions) == 1 + len(others), (
        "large arrays would make every evaluation read them"
    )


def test_components_never_exceed_the_rank_of_the_cells() -> None:
    random = np.random.default_rng(1)
    copies = sp.csr_matrix(
        np.log1p(random.poisson(0.5, (20, 2000)))[random.integers(0, 20, 800)].astype(np.float32)
    )
    first, second = (pca(copies.shape).fit(copies).transform(copies) for _ in range(2))
    assert first.shape == (800, 19)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(pca(copies.shape).fit_transform(copies), first, atol=1e-4)
    gene = copies[:, :1]
    empty = sp.csr_matrix((30, 9), dtype=np.float32)
    centred = gene.toarray() - gene.mean()
    np.testing.assert_allclose(pca(gene.shape).fit_transform(gene), centred, atol=1e-6)
    assert not pca(empty.shape).fit_transform(empty).any()
