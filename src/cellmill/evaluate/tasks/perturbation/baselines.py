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
    controls: np.ndarray,
) -> ChangesByMethod:
    """Predict changes in contexts, such as donors, that no fitted unit has.

    `perturbation`, `(U,)`, names each unit's perturbation; `controls`, `(U, G)`, are the mean
    controls of each unit. A perturbation without a fitted unit gets the mean of the fitted
    units.
    """
    no_change = np.zeros((len(tested), changes.shape[1]))
    mean = no_change + changes[fitted].mean(0)
    same_mean = mean.copy()
    nearest = mean.copy()
    for row, unit in enumerate(tested):
        same = fitted[perturbation[fitted] == perturbation[unit]]
        if len(same):
            same_mean[row] = changes[same].mean(0)
            distances = np.abs(controls[same] - controls[unit]).mean(1)
            nearest[row] = changes[same[distances.argmin()]]
    # (U, perturbations of fitted units)
    names = np.unique(perturbation[fitted])
    one_hot = (perturbation[:, None] == names).astype(float)
    linear = mean
    if len(fitted) > 1:
        ridge = RidgeCV(ALPHAS).fit(one_hot[fitted], changes[fitted])
        linear = ridge.predict(one_hot[tested])
    return {
        NO_CHANGE: no_change,
        MEAN: mean,
        SAME_MEAN: same_mean,
        SAME_LINEAR: linear,
        SAME_NEAREST: nearest,
    }


def sum_changes_of_parts(
    changes: np.ndarray,
    fitted: np.ndarray,
    tested: np.ndarray,
    perturbation: np.ndarray,
    unit_context: np.ndarray,
    parts: Sequence[Sequence[str]],
) -> np.ndarray:
    """(test units, G): sum of the changes under the single parts of a combination.

    The change under a part is the mean over its fitted units of the same context, or of all
    contexts if this one has none. A part without fitted units adds nothing. A test unit without
    any such part has NaN. `perturbation` and `unit_context`, `(U,)`, name each unit's perturbation
    and context, `parts` its parts.
    """
    sums = np.full((len(tested), changes.shape[1]), np.nan)
    for row, unit in enumerate(tested):
        part_changes = []
        for part in parts[unit]:
            single = fitted[perturbation[fitted] == part]
            if not len(single):
                continue
            in_context = single[unit_context[single] == unit_context[unit]]
            units = in_context if len(in_context) else single
            part_changes.append(changes[units].mean(0))
        if part_changes:
            sums[row] = np.sum(part_changes, axis=0)
    return sums
