"""Probabilities from logits of labels, and their expected calibration error."""

import numpy as np

N_BINS = 15  # bins of confidence


def softmax(logits: np.ndarray) -> np.ndarray:
    """Turn logits into probabilities, both `(cells, labels)`.

    Without scipy.special, whose import takes 0.17 s.
    """
    largest = logits.max(axis=1, keepdims=True)
    exponentials = np.exp(logits - largest)
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def expected_calibration_error(confidence: np.ndarray, is_correct: np.ndarray) -> float:
    """Compute the expected calibration error, in bins of equal width.

    `confidence` `(cells,)` is each cell's highest probability; `is_correct` `(cells,)` is 1.0 if it
    belongs to the cell's label, otherwise 0.0.
    """
    bins = np.minimum((confidence * N_BINS).astype(np.int64), N_BINS - 1)
    # `(N_BINS,)`: number of cells predicted right, minus the number expected
    gaps = np.bincount(bins, weights=is_correct - confidence, minlength=N_BINS)
    return float(np.abs(gaps).sum() / len(confidence))


def calibration_error_of_logits(
    logits: np.ndarray, label_indices: np.ndarray, temperature: float = 1.0
) -> float:
    """Compute the expected calibration error of logits divided by a temperature.

    `logits` are `(cells, labels)`, `label_indices` `(cells,)` int64.
    """
    return expected_calibration_error(
        *confidence_and_correctness(logits / temperature, label_indices)
    )


def confidence_and_correctness(
    logits: np.ndarray, label_indices: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return each cell's highest probability, and 1.0 if it belongs to the cell's label, otherwise 0.0.

    `logits` are `(cells, labels)`, `label_indices` `(cells,)` int64. The results are `(cells,)`: the
    probability in the dtype of `logits`, the other float64.
    """
    probabilities = softmax(logits)
    is_correct = probabilities.argmax(axis=1) == label_indices
    return probabilities.max(axis=1), is_correct.astype(np.float64)
