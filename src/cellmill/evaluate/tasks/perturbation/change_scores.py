"""Scores of predicted changes of expression, compared with the measured changes.

Legend: U units (see `profiles.py`), G genes.
"""

from collections.abc import Mapping

import numpy as np

from cellmill.data.arrays import divide

# names of the metrics in words, by their headings in tables; a lower score is better for MAE only
METRICS: Mapping[str, str] = {
    "Pearson": "Pearson of the change",
    "discrimination": "discrimination",
    "direction": "direction of the top genes",
    "MAE": "mean absolute error",
}


def score_changes(
    predicted: np.ndarray, measured: np.ndarray, is_perturbed: np.ndarray, top_genes: int
) -> dict[str, np.ndarray]:
    """Scores of each unit, (U,) float64 by metric. A score that is not defined is NaN.

    `predicted` and `measured`, (U, G), are the changes of units that are tested together.
    `is_perturbed`, (U, G) bool, marks the genes that a unit perturbs. These genes are not scored.

    - Pearson is not defined if the predicted or the measured change is equal for all genes.
    - Discrimination is the share of the other units whose measured change is farther from the
      prediction than the measured change of the unit. The distance is the mean absolute difference,
      and equal distances count half (Wu et al. 2024, PerturBench).
    - Direction is the share of genes whose predicted change has the sign of the measured change. It
      reads the `top_genes` genes with the largest measured changes.
    - MAE is the mean absolute error.

    A prediction of no change has an MAE only. A prediction with NaN has no score.
    """
    scores = {metric: np.full(len(measured), np.nan) for metric in METRICS}
    for unit in range(len(measured)):
        is_scored = ~is_perturbed[unit]
        x = predicted[unit, is_scored]
        y = measured[unit, is_scored]
        scores["MAE"][unit] = np.abs(x - y).mean()
        # A prediction of no change has no sign. Its distance to a unit says only how large the
        # unit's change is, so the other scores are not defined.
        if not x.any() or not np.isfinite(x).all():
            continue
        if x.std() > 0 and y.std() > 0:
            scores["Pearson"][unit] = np.corrcoef(x, y)[0, 1]
        top = np.argsort(-np.abs(y), kind="stable")[:top_genes]
        scores["direction"][unit] = (np.sign(x[top]) == np.sign(y[top])).mean()
        if len(measured) > 1:
            # (U,): distance from the prediction to the measured change of each unit
            distances = np.abs(measured[:, is_scored] - x).mean(1)
            excess = np.delete(distances, unit) - distances[unit]
            scores["discrimination"][unit] = (excess > 0).mean() + (excess == 0).mean() / 2
    return scores


def average_perturbations(by_unit: np.ndarray, perturbation: np.ndarray) -> np.ndarray:
    """(repetitions, perturbations) float64: mean of the scores `by_unit`, (repetitions, U), over the
    units of each perturbation. NaN if no unit of the perturbation has a score.

    `perturbation`, (U,), is the name of each unit's perturbation. Columns are in the order of names.
    """
    names, number = np.unique(perturbation, return_inverse=True)
    is_member = np.eye(len(names))[number]  # (U, perturbations)
    sums = np.nan_to_num(by_unit) @ is_member
    return divide(sums, np.isfinite(by_unit) @ is_member)
