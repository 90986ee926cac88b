"""Probabilities from the logits of labels, and the expected calibration error of these probabilities.

A classifier is calibrated if, of the cells that it labels with a confidence of 0.8, 80% are labelled
correctly. The confidence of a cell is the probability of the cell's most probable label.
"""

import numpy as np

N_BINS = 15  # number of bins of equal width into which confidences from 0 to 1 are divided


def softmax(logits: np.ndarray) -> np.ndarray:
    """Turn logits into probabilities; both arrays are (cells, labels).

    The function does not use scipy.special, because importing scipy.special takes 0.17 s.
    """
    largest = logits.max(axis=1, keepdims=True)
    exponentials = np.exp(logits - largest)
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def confidence_and_correctness(
    logits: np.ndarray, label_indices: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the confidence of each cell, and whether the most probable label is the true label.

    `logits` are (cells, labels). `label_indices` (cells,) int64 are the true labels. Both results are
    (cells,). The confidence has the dtype of `logits`. The correctness is float64: 1.0 for cells whose
    most probable label is the true label, and 0.0 for all other cells.
    """
    probabilities = softmax(logits)
    is_correct = probabilities.argmax(axis=1) == label_indices
    return probabilities.max(axis=1), is_correct.astype(np.float64)


def expected_calibration_error(confidence: np.ndarray, correctness: np.ndarray) -> float:
    """Compute the expected calibration error, from 0 to 1, in bins of equal width.

    The arguments are the two results of `confidence_and_correctness`. The error of a bin is the absolute
    difference between the accuracy and the mean confidence of its cells. The expected calibration
    error is the mean of the errors of all bins, weighted by the number of cells in each bin.
    """
    # a confidence of exactly 1 belongs to the last bin
    bins = np.minimum((confidence * N_BINS).astype(np.int64), N_BINS - 1)
    # (N_BINS,): the number of correctly labelled cells, minus the number that the confidences predict
    excess = np.bincount(bins, weights=correctness - confidence, minlength=N_BINS)
    return float(np.abs(excess).sum() / len(confidence))


def calibration_error_of_logits(
    logits: np.ndarray, label_indices: np.ndarray, temperature: float = 1.0
) -> float:
    """Compute the expected calibration error of logits that are first divided by a temperature.

    `logits` are (cells, labels). `label_indices` (cells,) int64 are the true labels.
    """
    confidence, correctness = confidence_and_correctness(logits / temperature, label_indices)
    return expected_calibration_error(confidence, correctness)
