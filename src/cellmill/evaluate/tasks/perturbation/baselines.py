"""Baselines that predict the changes of held-out units from the changes of fitted units.

Legend: U units, G genes, F features of a unit.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from sklearn.linear_model import RidgeCV
from sklearn.preprocessing import StandardScaler

from cellmill.evaluate.features.expression import ALPHAS
from cellmill.evaluate.methods import KNN, ByMethod
from cellmill.runs.results import ScoredMethod

MIN_FITTED = 3  # fitted units with features that a linear prediction needs
ChangesByMethod = dict[ScoredMethod, np.ndarray]
"""Predicted changes `(test units, G)` of each method."""
NO_CHANGE = ScoredMethod("no change")
MEAN = ScoredMethod("mean")
SAME_MEAN = ScoredMethod("same perturbation", "mean")
SAME_LINEAR = ScoredMethod("same perturbation", "linear")
SAME_NEAREST = ScoredMethod("same perturbation", "nearest")
CONTEXT_MEAN = ScoredMethod("mean of the context")
ADDITIVE = ScoredMethod("additive")


def predict_new_perturbations(
    changes: np.ndarray, fitted: np.ndarray, tested: np.ndarray, features: ByMethod, neighbors: int
) -> ChangesByMethod:
    """Predict changes under perturbations that no fitted unit has.

    `changes` are `(U, G)`, `fitted` and `tested` units, and `features` `(U, F)`. Units with NaN rows
    have no features and get the mean of the fitted units.
    """
    no_change = np.zeros((len(tested), changes.shape[1]))
    mean = no_change + changes[fitted].mean(0)
    predicted = {NO_CHANGE: no_change, MEAN: mean}
    for source, vectors in features.items():
        by_classifier = {name: mean.copy() for name in ("linear", "nearest", KNN)}
        has_features = np.isfinite(vectors.sum(1))
        known = fitted[has_features[fitted]]  # units that predictions are fitted on
        rows = np.flatnonzero(has_features[tested])  # rows of the prediction
        if len(known) >= MIN_FITTED and len(rows):
            scaler = StandardScaler().fit(vectors[known])
            keys = scaler.transform(vectors[known])
            queries = scaler.transform(vectors[tested[rows]])
            for name, values in _predict_from_features(
                keys, queries, changes[known], neighbors
            ).items():
                by_classifier[name][rows] = values
        for name, values in by_classifier.items():
            predicted[replace(source, classifier=name)] = values
    return predicted


def _predict_from_features(
    keys: np.ndarray, queries: np.ndarray, changes: np.ndarray, neighbors: int
) -> dict[str, np.ndarray]:
    """(queries, G) by classifier: ridge regression, the most similar fitted unit, and the mean of
    the `neighbors` most similar fitted units.

    `keys` and `queries` are standardised features of fitted and test units, `changes` the changes
    of the fitted units.
    """
    ridge = RidgeCV(ALPHAS).fit(keys, changes)
    # (queries, keys): fitted units by falling cosine similarity
    cosine = _scale_to_unit(queries) @ _scale_to_unit(keys).T
    similar = np.argsort(-cosine, axis=1, kind="stable")
    return {
        "linear": ridge.predict(queries),
        "nearest": changes[similar[:, 0]],
        KNN: changes[similar[:, :neighbors]].mean(1),
    }


def _scale_to_unit(vectors: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / lengths.clip(1e-12)


def predict_new_contexts(
    changes: np.ndarray,
    fitted: np.ndarray,
    tested: np.ndarray,
    perturbation: np.ndarray,
    dose: np.ndarray,
    controls: np.ndarray,
) -> ChangesByMethod:
    """Predict changes in contexts, such as donors, that no fitted unit has.

    A test unit is predicted from the fitted units of its perturbation and dose, or of all doses of
    the perturbation if its own was not fitted. A perturbation without a fitted unit gets the mean
    of the fitted units. `perturbation` and `dose`, `(U,)`, name those of each unit; `controls`,
    `(U, G)`, are its mean controls.
    """
    no_change = np.zeros((len(tested), changes.shape[1]))
    mean = no_change + changes[fitted].mean(0)
    same_mean = mean.copy()
    nearest = mean.copy()
    names = np.stack([perturbation, dose])
    number = np.unique(names, axis=1, return_inverse=True)[1].ravel()
    # (U, perturbations and doses of fitted units)
    one_hot = (number[:, None] == np.unique(number[fitted])).astype(float)
    queries = np.zeros((len(tested), one_hot.shape[1]))
    for row, unit in enumerate(tested):
        same = fitted[perturbation[fitted] == perturbation[unit]]
        same = _prefer(same, dose[same] == dose[unit])
        if len(same):
            same_mean[row] = changes[same].mean(0)
            distances = np.abs(controls[same] - controls[unit]).mean(1)
            nearest[row] = changes[same[distances.argmin()]]
            queries[row] = one_hot[same].mean(0)
    linear = mean
    if len(fitted) > 1:
        ridge = RidgeCV(ALPHAS).fit(one_hot[fitted], changes[fitted])
        linear = ridge.predict(queries)
    return {
        NO_CHANGE: no_change,
        MEAN: mean,
        SAME_MEAN: same_mean,
        SAME_LINEAR: linear,
        SAME_NEAREST: nearest,
    }


def _prefer(units: np.ndarray, is_preferred: np.ndarray) -> np.ndarray:
    """The preferred ones of `units`, or all if none is."""
    return units[is_preferred] if is_preferred.any() else units


def sum_changes_of_parts(
    changes: np.ndarray,
    fitted: np.ndarray,
    tested: np.ndarray,
    perturbation: np.ndarray,
    dose: np.ndarray,
    unit_context: np.ndarray,
    parts: Sequence[Sequence[str]],
) -> np.ndarray:
    """(test units, G): sum of the changes under the single parts of a combination.

    The change under a part is the mean over its fitted units of the same dose, or of all doses if
    that one has none; of these, over the units of the same context, or of all contexts. A part
    without fitted units adds nothing. A test unit without any such part has NaN. `perturbation`,
    `dose` and `unit_context`, `(U,)`, name those of each unit, `parts` its parts.
    """
    sums = np.full((len(tested), changes.shape[1]), np.nan)
    for row, unit in enumerate(tested):
        part_changes = []
        for part in parts[unit]:
            single = fitted[perturbation[fitted] == part]
            if not len(single):
                continue
            units = _prefer(single, dose[single] == dose[unit])
            units = _prefer(units, unit_context[units] == unit_context[unit])
            part_changes.append(changes[units].mean(0))
        if part_changes:
            sums[row] = np.sum(part_changes, axis=0)
    return sums
