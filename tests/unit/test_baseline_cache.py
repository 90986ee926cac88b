"""Predictions of baselines are kept by all they depend on."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import scipy.sparse as sp

from cellmill.config.evaluate import Evaluate
from cellmill.evaluate.baselines import MAX_BYTES, BaselineCache
from cellmill.evaluate.features import fit_all, predict_all
from cellmill.evaluate.tasks.classify import _components

RNG = np.random.default_rng(0)
LABELS = np.repeat(["a", "b", "c"], 10)
DENSE = RNG.normal(size=(30, 4)) + np.repeat(np.arange(3), 10)[:, None]
FEATURES = {"embedding": DENSE, "PCA50": DENSE + 1, "all genes": sp.csr_matrix(np.maximum(DENSE, 0))}


def predicted(
    cache: BaselineCache, features: dict[str, object] = FEATURES, labels: np.ndarray = LABELS
) -> dict[str, np.ndarray]:
    context: Any = SimpleNamespace(baselines=cache, options=Evaluate())
    return predict_all(fit_all(features, labels, 5, context), features)


def test_a_second_evaluation_reads_what_the_first_predicted(tmp_path: Path) -> None:
    file = tmp_path / "baselines" / "pbmc.npz"
    expected, first = predicted(BaselineCache()), BaselineCache(file)
    predicted(first)
    first.save()
    second = BaselineCache(file)
    known = dict(second.known)
    assert len(known) == 6, "two kinds of features, three classifiers, and none of the model's"
    for name, classes in predicted(second).items():
        np.testing.assert_array_equal(classes, expected[name])
    assert second.known.keys() == known.keys()
    content = file.read_bytes()
    second.save()
    assert file.read_bytes() == content


def test_other_features_labels_or_cells_are_other_predictions(tmp_path: Path) -> None:
    cache = BaselineCache()
    predicted(cache)
    predicted(cache, labels=np.roll(LABELS, 1))
    predicted(cache, {"PCA50": DENSE + 1.5})
    predicted(cache, {"all genes": sp.csr_matrix((DENSE > 0).astype(float))})
    wider = sp.csr_matrix(np.pad(np.maximum(DENSE, 0), ((0, 0), (0, 1))))
    predicted(cache, {"all genes": wider})
    assert len(cache.known) == 6 + 6 + 3 * 3


def test_a_damaged_file_is_computed_again(tmp_path: Path) -> None:
    file = tmp_path / "pbmc.npz"
    cache = BaselineCache(file)
    predicted(cache)
    cache.save()
    file.write_bytes(file.read_bytes()[:-50])
    again = BaselineCache(file)
    assert again.known == {}
    predicted(again)
    again.save()
    assert BaselineCache(file).known.keys() == cache.known.keys()


def test_components_are_kept_by_cells_and_folds(tmp_path: Path) -> None:
    file, genes, train = tmp_path / "pbmc.npz", sp.csr_matrix(np.maximum(DENSE, 0)), np.arange(0, 30, 2)
    first = BaselineCache(file)
    expected = _components(genes, train, 3, first)["PCA3"]
    first.save()
    again = BaselineCache(file)
    np.testing.assert_array_equal(_components(genes, train, 3, again)["PCA3"], expected)
    assert len(again.known) == 1
    others = [(genes, train + 1, 3), (genes, train, 2), (genes * 2, train, 3)]
    for other in others:
        assert len(_components(*other, again)) == 1
    assert len(again.known) == 1 + len(others)
    wide = again.features("zeros", genes, lambda: np.zeros((30, MAX_BYTES)))
    assert wide.shape == (30, MAX_BYTES)
    assert len(again.known) == 1 + len(others), "large arrays would make every evaluation read them"
