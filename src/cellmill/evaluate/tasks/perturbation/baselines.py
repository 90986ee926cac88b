"""Baselines that predict the changes of held-out units from the changes of fitted units.

The public functions get the `changes` of all units, (U, G), and the indices of the `fitted` and of the
`tested` units. They read the changes of the fitted units only.

Legend: U units (see `profiles.py`), G genes, F features of a unit.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from sklearn.linear_model import RidgeCV
from sklearn.preprocessing import StandardScaler

from cellmill.evaluate.features.expression import ALPHAS
from cellmill.evaluate.methods import KNN, ByMethod
from cellmill.runs.results import ScoredMethod

MIN_LENGTH = 1e-12  # vectors that are shorter are divided by this length, so that zeros stay zeros
# predictions from features need at least this many fitted units with features; otherwise they are the mean
MIN_FITTED = 3
ChangesByMethod = dict[ScoredMethod, np.ndarray]
"""Predicted changes of the tested units, (tested units, G), by method."""

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
    """Predict the changes under perturbations that no fitted unit has.

    `features` are (U, F) by source. The row of a unit without features is NaN. If a tested unit has
    no features, its prediction is the mean change of the fitted units. `neighbors` is the k of the
    kNN prediction.
    """
    no_change = np.zeros((len(tested), changes.shape[1]))
    mean = no_change + changes[fitted].mean(0)
    predicted = {NO_CHANGE: no_change, MEAN: mean}
    for source, vectors in features.items():
        by_classifier = {name: mean.copy() for name in ("linear", "nearest", KNN)}
        has_features = np.isfinite(vectors.sum(1))
        usable = fitted[has_features[fitted]]  # fitted units with features
        rows = np.flatnonzero(has_features[tested])  # rows of the tested units with features
        if len(usable) >= MIN_FITTED and len(rows):
            scaler = StandardScaler().fit(vectors[usable])
            from_features = _predict_from_features(
                scaler.transform(vectors[usable]),
                scaler.transform(vectors[tested[rows]]),
                changes[usable],
                neighbors,
            )
            for name, values in from_features.items():
                by_classifier[name][rows] = values
        for name, values in by_classifier.items():
            predicted[replace(source, classifier=name)] = values
    return predicted


def _predict_from_features(
    fitted_features: np.ndarray,
    tested_features: np.ndarray,
    fitted_changes: np.ndarray,
    neighbors: int,
) -> dict[str, np.ndarray]:
    """Predicted changes of the tested units, (tested units, G) by classifier: by ridge regression, by the
    change of the most similar fitted unit, and by the mean change of the `neighbors` most similar
    fitted units.

    Features are standardised, (fitted units, F) and (tested units, F).
    """
    ridge = RidgeCV(ALPHAS).fit(fitted_features, fitted_changes)
    # (tested units, fitted units): indices of the fitted units, the most similar one first
    cosine = _scale_to_length_1(tested_features) @ _scale_to_length_1(fitted_features).T
    by_similarity = np.argsort(-cosine, axis=1, kind="stable")
    return {
        "linear": ridge.predict(tested_features),
        "nearest": fitted_changes[by_similarity[:, 0]],
        KNN: fitted_changes[by_similarity[:, :neighbors]].mean(1),
    }


def _scale_to_length_1(vectors: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / lengths.clip(MIN_LENGTH)


def predict_new_contexts(
    changes: np.ndarray,
    fitted: np.ndarray,
    tested: np.ndarray,
    perturbation: np.ndarray,
    dose: np.ndarray,
    controls: np.ndarray,
) -> ChangesByMethod:
    """Predict the changes in contexts, such as donors, that no fitted unit has.

    A tested unit is predicted from the fitted units of the same perturbation and dose. If this dose of
    the perturbation was not fitted, the unit is predicted from fitted units of the perturbation at other
    doses. If the perturbation was not fitted, the prediction is the mean change of all fitted units. In
    row SAME_LINEAR it is then the intercept of a ridge regression, which is near this mean.

    `perturbation` and `dose`, both (U,), are the names of each unit's perturbation and dose.
    `controls`, (U, G), are the mean controls of the strata of each unit. Row SAME_NEAREST has the change
    of the fitted unit with the most similar controls.
    """
    no_change = np.zeros((len(tested), changes.shape[1]))
    mean = no_change + changes[fitted].mean(0)
    same_mean = mean.copy()
    nearest = mean.copy()
    # pair (U,): number of the pair of perturbation and dose; is_pair (U, pairs of fitted units)
    names = np.stack([perturbation, dose])
    pair = np.unique(names, axis=1, return_inverse=True)[1].ravel()
    is_pair = (pair[:, None] == np.unique(pair[fitted])).astype(float)
    # (tested units, pairs of fitted units): the pairs that a tested unit is predicted from, as shares
    pair_shares = np.zeros((len(tested), is_pair.shape[1]))
    for row, unit in enumerate(tested):
        same = fitted[perturbation[fitted] == perturbation[unit]]
        same = _select_or_all(same, dose[same] == dose[unit])
        if len(same):
            same_mean[row] = changes[same].mean(0)
            distances = np.abs(controls[same] - controls[unit]).mean(1)
            nearest[row] = changes[same[distances.argmin()]]
            pair_shares[row] = is_pair[same].mean(0)
    # ridge regression of the changes on the pairs, which draws pairs of few units towards the mean
    linear = mean
    if len(fitted) > 1:
        ridge = RidgeCV(ALPHAS).fit(is_pair[fitted], changes[fitted])
        linear = ridge.predict(pair_shares)
    return {
        NO_CHANGE: no_change,
        MEAN: mean,
        SAME_MEAN: same_mean,
        SAME_LINEAR: linear,
        SAME_NEAREST: nearest,
    }


def _select_or_all(units: np.ndarray, is_preferred: np.ndarray) -> np.ndarray:
    """The preferred units among `units`; all of `units` if no unit is preferred."""
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
    """(tested units, G): sum of the changes under the parts of a combination, such as under A and under B
    for A+B.

    The change under a part is the mean over fitted units whose whole perturbation is this part. If some
    of these units have the dose of the tested unit, only they are averaged. If some of the remaining
    units have its context, only they are averaged. A part without fitted units adds nothing. If no part
    has a fitted unit, the row is NaN.

    `perturbation`, `dose` and `unit_context`, all (U,), are the names of each unit's perturbation, dose
    and context. `parts` are the names of the parts of each unit's perturbation.
    """
    sums = np.full((len(tested), changes.shape[1]), np.nan)
    for row, unit in enumerate(tested):
        part_changes = []
        for part in parts[unit]:
            single = fitted[perturbation[fitted] == part]
            if not len(single):
                continue
            same = _select_or_all(single, dose[single] == dose[unit])
            same = _select_or_all(same, unit_context[same] == unit_context[unit])
            part_changes.append(changes[same].mean(0))
        if part_changes:
            sums[row] = np.sum(part_changes, axis=0)
    return sums
