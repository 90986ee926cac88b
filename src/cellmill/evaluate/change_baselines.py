"""Predictions of changes from those of other units: mean, linear, nearest. All is fitted on training units.

Legend: U units, G genes, F features of a unit.
"""

from collections.abc import Mapping

import numpy as np
from sklearn.linear_model import RidgeCV
from sklearn.preprocessing import StandardScaler

ALPHAS = np.logspace(-2, 4, 13)  # of the ridge; the one of least leave-one-out error on the training units is taken
MIN_KNOWN = 3  # training units with features that a linear prediction needs
Prediction = dict[str, np.ndarray]


def of_new_perturbations(
    changes: np.ndarray, train: np.ndarray, test: np.ndarray, features: Mapping[str, np.ndarray]
) -> Prediction:
    """Changes `(test units, G)` by method, of units whose perturbation no training unit has.

    `features` by name are `(U, F)`, NaN rows for units without any, which get the mean of the training units.
    """
    mean = changes[train].mean(0)
    predicted = {"no change": np.zeros((len(test), changes.shape[1])), "mean": np.tile(mean, (len(test), 1))}
    for name, values in features.items():
        known, asked = train[_has(values, train)], np.flatnonzero(_has(values, test))
        linear, nearest = predicted["mean"].copy(), predicted["mean"].copy()
        if len(known) >= MIN_KNOWN and len(asked):
            scaler = StandardScaler().fit(values[known])
            given, queries = scaler.transform(values[known]), scaler.transform(values[test[asked]])
            linear[asked] = RidgeCV(ALPHAS).fit(given, changes[known]).predict(queries)
            similarity = _unit_rows(queries) @ _unit_rows(given).T
            nearest[asked] = changes[known[similarity.argmax(1)]]
        predicted |= {f"{name} + linear": linear, f"{name} + nearest": nearest}
    return predicted


def of_new_contexts(
    changes: np.ndarray, train: np.ndarray, test: np.ndarray, perturbation: np.ndarray, states: np.ndarray
) -> Prediction:
    """Changes `(test units, G)` by method, of units of contexts, such as donors, that no training unit has.

    `perturbation` `(U,)` is that of a unit, `states` `(U, G)` its controls. A perturbation that no training unit has
    gets the mean of the training units.
    """
    mean = changes[train].mean(0)
    predicted = {"no change": np.zeros((len(test), changes.shape[1])), "mean": np.tile(mean, (len(test), 1))}
    own, nearest = predicted["mean"].copy(), predicted["mean"].copy()
    for at, unit in enumerate(test):
        if len(same := train[perturbation[train] == perturbation[unit]]):
            own[at] = changes[same].mean(0)
            nearest[at] = changes[same[np.abs(states[same] - states[unit]).mean(1).argmin()]]
    known = np.unique(perturbation[train])
    one_hot = (perturbation[:, None] == known).astype(float)
    linear = RidgeCV(ALPHAS).fit(one_hot[train], changes[train]).predict(one_hot[test])
    return predicted | {
        "same perturbation + mean": own,
        "same perturbation + linear": linear,
        "same perturbation + nearest": nearest,
    }


def _has(values: np.ndarray, units: np.ndarray) -> np.ndarray:
    """(units,) bool: those that have features."""
    found: np.ndarray = np.isfinite(values[units]).all(1)
    return found


def _unit_rows(values: np.ndarray) -> np.ndarray:
    return values / np.linalg.norm(values, axis=1, keepdims=True).clip(1e-12)
