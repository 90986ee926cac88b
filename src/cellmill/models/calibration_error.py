"""Expected calibration error of a classifier: how far its probabilities are from the share of labels that are right."""

import numpy as np
from scipy.special import softmax

BINS = 15


def calibration_error(highest: np.ndarray, right: np.ndarray) -> float:
    """Return the expected calibration error of cells with these highest probabilities, (cells,), right or wrong."""
    bins = np.minimum((highest * BINS).astype(np.int64), BINS - 1)
    gaps = np.bincount(bins, weights=right - highest, minlength=BINS)
    return float(np.abs(gaps).sum() / len(highest))


def error_of_logits(logits: np.ndarray, labels: np.ndarray, temperature: float = 1.0) -> float:
    """Return the calibration error of logits, (cells, labels) float64, divided by a temperature."""
    return calibration_error(*highest_of(logits / temperature, labels))


def highest_of(logits: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each cell's highest probability, and whether its label is right, 0 or 1."""
    probabilities = softmax(logits, axis=1)
    return probabilities.max(axis=1), (probabilities.argmax(axis=1) == labels).astype(np.float64)
