"""Scores of predicted changes of expression, by unit (a perturbation, maybe of one donor).

Genes that a unit perturbs are left out of its scores: their own change says nothing of a response.
"""

from collections.abc import Mapping

import numpy as np

METRICS: Mapping[str, str] = {
    "Pearson": "Pearson of the change",
    "discrimination": "discrimination",
    "direction": "direction of the top genes",
    "MAE": "mean absolute error",
}
"""Heading of each metric, and its name in words; of MAE alone, lower is better."""


def change_scores(
    predicted: np.ndarray, seen: np.ndarray, perturbed: np.ndarray, top_genes: int
) -> dict[str, np.ndarray]:
    """Scores of each unit by metric, (units,) float64; NaN where one is not defined.

    Parameters
    ----------
    predicted, seen
        Changes, `(units, genes)`, of units that are tested together.
    perturbed
        `(units, genes)` bool: genes that the unit perturbs.
    top_genes
        Number of genes of largest seen change whose direction counts.

    Notes
    -----
    Pearson is not defined for a constant prediction, nor are directions where nothing is predicted to change.
    Discrimination is 1 if the prediction is nearer (in mean absolute difference) to the unit's own seen change than to
    that of any other unit, 0 if farther, and the share of the others that are farther between (Wu et al. 2024,
    PerturBench; ties count half). It is not defined for a single unit.
    """
    scores = {metric: np.full(len(seen), np.nan) for metric in METRICS}
    for unit, (own, change, left_out) in enumerate(zip(predicted, seen, perturbed)):
        x, y, every = own[~left_out], change[~left_out], seen[:, ~left_out]
        scores["MAE"][unit] = np.abs(x - y).mean()
        if not x.any():
            continue
        if x.std() > 0 and y.std() > 0:
            scores["Pearson"][unit] = np.corrcoef(x, y)[0, 1]
        top = np.argsort(-np.abs(y), kind="stable")[:top_genes]
        scores["direction"][unit] = (np.sign(x[top]) == np.sign(y[top])).mean()
        if len(seen) > 1:
            distances = np.abs(every - x).mean(1)
            others = np.delete(distances, unit) - distances[unit]
            scores["discrimination"][unit] = (others > 0).mean() + (others == 0).mean() / 2
    return scores
