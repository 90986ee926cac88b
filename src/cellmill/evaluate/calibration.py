"""Calibration of a classifier on cells that it was not trained on: temperature, its error, and accuracy by threshold.

The temperature divides all logits, so it changes no cell's likeliest label (Guo et al. 2017, section 4.2). It has the
smallest cross-entropy, and is kept only if temperatures fitted without a fifth of the cells lower the calibration error
of that fifth; otherwise it is 1. The calibration error is the expected one of the same paper, section 3: the mean, over
bins of equal width, of the distance between probability and accuracy, weighted by cells.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

from cellmill.models.calibration_error import calibration_error, error_of_logits, highest_of

STEPS = 100
"""Thresholds of the table: 0, 1 / STEPS, ..."""
LARGEST = 100.0
"""Largest temperature, and inverse of the smallest: cells that are all told apart would have none."""
FOLDS = 5
"""Parts of the cells that are held out in turn, to see whether a temperature is of use."""


@dataclass(frozen=True)
class Calibration:
    """Result of `calibrate`."""

    temperature: float
    n_cells: int
    accuracy: float
    calibration_error: float
    calibration_error_uncalibrated: float
    """With temperature 1."""
    accuracy_above: list[float | None]
    """Accuracy of the cells whose highest probability is at least i / STEPS, for i from 0; None for no cell."""
    labelled_above: list[float]
    """Share of these cells."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return dict(vars(self))


def calibrate(logits: np.ndarray, labels: np.ndarray) -> Calibration:
    """Return the calibration of logits, (cells, labels) float, on cells of these labels, (cells,) int from 0."""
    logits = logits.astype(np.float64)
    temperature = fit_temperature(logits, labels) if _lowers_error(logits, labels) else 1.0
    highest, right = highest_of(logits / temperature, labels)
    above = highest[:, None] >= np.arange(STEPS) / STEPS
    accuracy = [float(right[chosen].mean()) if chosen.any() else None for chosen in above.T]
    return Calibration(
        temperature=temperature,
        n_cells=len(labels),
        accuracy=float(right.mean()),
        calibration_error=calibration_error(highest, right),
        calibration_error_uncalibrated=error_of_logits(logits, labels),
        accuracy_above=accuracy,
        labelled_above=above.mean(axis=0).tolist(),
    )


def _lowers_error(logits: np.ndarray, labels: np.ndarray) -> bool:
    """True if temperatures lower the calibration error of cells that they were not fitted on."""
    fold, scaled = np.arange(len(labels)) % FOLDS, logits.copy()
    for held_out in (fold == number for number in range(min(FOLDS, len(labels)))):
        if not held_out.all():
            scaled[held_out] /= fit_temperature(logits[~held_out], labels[~held_out])
    return error_of_logits(scaled, labels) < error_of_logits(logits, labels)


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the temperature with the smallest cross-entropy, between 1 / LARGEST and LARGEST."""

    def loss(log_temperature: float) -> float:
        scaled = log_softmax(logits / np.exp(log_temperature), axis=1)
        return -float(scaled[np.arange(len(labels)), labels].mean())

    bound = float(np.log(LARGEST))
    return float(np.exp(minimize_scalar(loss, bounds=(-bound, bound), method="bounded").x))
