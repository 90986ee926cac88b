"""Agreement of predicted labels and numbers with the labels and numbers in the file.

Results about cells that the model was not trained on are figures, which are kept in the file, and a
printed sentence. Seen cells have only a sentence. If it is not known which cells are seen, all cells have
only a sentence.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from cellmill.evaluate.features.expression import column_correlations
from cellmill.evaluate.seen.seen_cells import Seen

Measures = tuple[dict[str, float], str]
"""Measures of the agreement on some cells: as figures by name, and in words."""


class Wording(NamedTuple):
    """Texts about compared cells. In a sentence, `{}` stands for the measures in words."""

    n_cells: str  # the names of figures that are numbers of cells begin with this
    unknown: str  # sentence if it is not known which cells the model has seen
    held_out: str  # sentence about cells that the model has not seen
    seen: str  # sentence about cells that the model has seen


LABELS = Wording(
    "n_labelled",
    "{} as in the file; no accuracy, because it is unknown whether the model was trained on them",
    "accuracy on cells that the model was not trained on: {}",
    "on cells of its training or validation, which do not measure accuracy: {} as in the file",
)
NUMBERS = Wording(
    "n_numbers",
    "{}, but it is unknown whether the model was trained on them",
    "on cells that the model was not trained on: {}",
    "on cells of its training or validation, which do not measure accuracy: {}",
)


def compare_labels(
    column: str,
    file_labels: np.ndarray,
    predicted: np.ndarray,
    known: Sequence[str],
    seen: Seen,
) -> tuple[dict[str, Any], list[str]]:
    """Compare the `predicted` labels with the labels in obs column `column`, in figures and sentences.

    `file_labels` and `predicted` are (cells,) object: text, or None for a cell without a label. A cell is
    compared only if the model knows its label in the file; `known` are the labels of the model.
    """
    has_label = ~pd.isna(file_labels)
    is_known = np.isin(file_labels.astype(str), np.array(known, str)) & has_label
    note = ""
    if seen.is_seen is not None:
        n_unknown = int((has_label & ~is_known & ~seen.is_seen).sum())
        if n_unknown:
            note = f", without {n_unknown:,} of labels that it does not know"

    def measure(chosen: np.ndarray) -> Measures:
        return _measure_labels(file_labels[chosen], predicted[chosen])

    return _compare(column, is_known, seen, measure, LABELS, note)


def compare_numbers(
    column: str,
    file_numbers: np.ndarray,
    predicted: np.ndarray,
    training_mean: float | None,
    seen: Seen,
) -> tuple[dict[str, Any], list[str]]:
    """Compare the `predicted` numbers with the numbers in obs column `column`, in figures and sentences.

    `file_numbers` and `predicted` are (cells,) float; a cell without a number has NaN. `training_mean` is
    the prediction of a baseline: the mean over training cells. It is None if the predictions are not in the
    unit of the column.
    """
    is_finite = np.isfinite(file_numbers) & np.isfinite(predicted)

    def measure(chosen: np.ndarray) -> Measures:
        return _measure_numbers(file_numbers[chosen], predicted[chosen], training_mean)

    return _compare(column, is_finite, seen, measure, NUMBERS)


def _compare(
    column: str,
    is_compared: np.ndarray,
    seen: Seen,
    measure: Callable[[np.ndarray], Measures],
    wording: Wording,
    note: str = "",
) -> tuple[dict[str, Any], list[str]]:
    """Return figures of held-out cells, and sentences about all compared cells.

    `is_compared`, (cells,) bool, marks the compared cells. `measure` takes such a mask, and returns the
    measures of the marked cells. `note` follows the measures of held-out cells in their sentence.
    """
    if not is_compared.any():
        return {}, []
    if seen.is_seen is None:
        _, words = measure(is_compared)
        return {}, [f"{column}: {wording.unknown.format(words)} ({seen.caveat})"]
    is_held_out = is_compared & ~seen.is_seen
    is_seen = is_compared & seen.is_seen
    figures: dict[str, Any] = {
        f"{wording.n_cells}_unseen": int(is_held_out.sum()),
        f"{wording.n_cells}_seen": int(is_seen.sum()),
    }
    lines = []
    if is_held_out.any():
        measures, words = measure(is_held_out)
        figures |= measures
        limits = f"; {seen.caveat}" if seen.caveat else ""
        lines.append(f"{column}: {wording.held_out.format(words)}{note}{limits}")
    if is_seen.any():
        _, words = measure(is_seen)
        lines.append(f"{column}: {wording.seen.format(words)}")
    return figures, lines


def _measure_labels(file_labels: np.ndarray, predicted: np.ndarray) -> Measures:
    """Measure the accuracy. A cell without a predicted label counts as wrong."""
    n_cells = len(file_labels)
    n_right = int((file_labels == predicted).sum())
    n_missing = int(pd.isna(predicted).sum())
    accuracy = n_right / n_cells
    missing = f", {n_missing:,} without a predicted label" if n_missing else ""
    return {"accuracy": accuracy}, f"{n_right:,} of {n_cells:,} ({accuracy:.3f}{missing})"


def _measure_numbers(
    file_numbers: np.ndarray, predicted: np.ndarray, training_mean: float | None
) -> Measures:
    """Measure the correlation and the errors of finite numbers.

    There is no correlation if the numbers in the file, or the predicted numbers, are constant.
    """
    figures = {}
    words = [f"{len(file_numbers):,} cells"]
    correlation = float(column_correlations(file_numbers[:, None], predicted[:, None])[0])
    if np.isfinite(correlation):
        figures["pearson"] = correlation
        words.append(f"correlation {correlation:.3f}")
    if training_mean is not None:
        error = float(np.abs(predicted - file_numbers).mean())
        baseline = float(np.abs(training_mean - file_numbers).mean())
        figures |= {"mean_absolute_error": error, "mean_absolute_error_of_mean": baseline}
        relation = "less" if error < baseline else "not less"
        words.append(
            f"mean absolute error {error:.4g}, {relation} than {baseline:.4g} of the training mean "
            f"({training_mean:.4g})"
        )
    return figures, ", ".join(words)
