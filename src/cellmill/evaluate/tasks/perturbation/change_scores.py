"""Scores of predicted against measured changes of expression.

Legend: U units (see `profiles.py`), G genes.
"""

from collections.abc import Mapping

import numpy as np

from cellmill.data.arrays import divide

METRICS: Mapping[str, str] = {  # names in words by heading; lower is better for MAE only
    "Pearson": "Pearson of the change",
    "discrimination": "discrimination",
    "direction": "direction of the top genes",
    "MAE": "mean absolute error",
}


def change_scores(
    predicted: np.ndarray, measured: np.ndarray, perturbed: np.ndarray, top_genes: int
) -> dict[str, np.ndarray]:
    """Scores of each unit by metric, (U,) float64; NaN for an undefined score, such as the Pearson of
    a constant, or any score of a prediction with NaN.

    `predicted` and `measured` are changes, `(U, G)`, of units that are tested together. `perturbed`,
    bool of the same shape, marks the genes that a unit perturbs, which are not scored. Direction is
    judged on the `top_genes` genes with the largest measured change. Discrimination is the share of
    other units whose measured change is farther from the prediction than the unit's own, in mean
    absolute difference (Wu et al. 2024, PerturBench; ties count half).
    """
    scores = {metric: np.full(len(measured), np.nan) for metric in METRICS}
    for unit in range(len(measured)):
        is_scored = ~perturbed[unit]
        x = predicted[unit, is_scored]
        y = measured[unit, is_scored]
        scores["MAE"][unit] = np.abs(x - y).mean()
        # no change has no sign, and is as far from a unit as that unit's change is large
        if not x.any() or not np.isfinite(x).all():
            continue
        if x.std() > 0 and y.std() > 0:
            scores["Pearson"][unit] = np.corrcoef(x, y)[0, 1]
        top = np.argsort(-np.abs(y), kind="stable")[:top_genes]
        scores["direction"][unit] = (np.sign(x[top]) == np.sign(y[top])).mean()
        if len(measured) > 1:
            # (units,): distance of the prediction to the measured change of each unit
            distances = np.abs(measured[:, is_scored] - x).mean(1)
            excess = np.delete(distances, unit) - distances[unit]
            scores["discrimination"][unit] = (excess > 0).mean() + (excess == 0).mean() / 2
    return scores


def average_perturbations(by_unit: np.ndarray, perturbation: np.ndarray) -> np.ndarray:
    """(repetitions, perturbations): means of `by_unit`, (repetitions, U), over the units of each
    perturbation. `perturbation`, (U,), has their names.
    """
    names, number = np.unique(perturbation, return_inverse=True)
    is_member = np.eye(len(names))[number]  # (U, perturbations)
    sums = np.nan_to_num(by_unit) @ is_member
    return divide(sums, np.isfinite(by_unit) @ is_member)
