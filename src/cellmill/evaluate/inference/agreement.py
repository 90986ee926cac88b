"""Agreement of predicted labels and numbers with the labels and numbers in the file.

Only cells that the model was not trained on have figures. Seen cells have only a sentence, and so
have all cells if it is not known which are seen.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from cellmill.evaluate.features.expression import column_correlations
from cellmill.evaluate.seen.seen_cells import Seen

Measures = tuple[dict[str, float], str]
"""Figures of some cells, and the same in words."""


class Wording(NamedTuple):
    """Sentences about compared cells. `{}` stands for their measures in words."""

    n_cells: str  # beginning of the names of numbers of cells in figures
    unknown: str  # if it is not known which cells the model has seen
    held_out: str
    seen: str


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
    """Figures and sentences on the `predicted` labels against the labels in obs column `column`.

    Both are (cells,) object: text, None without a label. Only cells whose label in the file is `known`
    to the model are compared.
    """
    has_label = ~pd.isna(file_labels)
    is_known = np.isin(file_labels.astype(str), np.array(known, str)) & has_label
    note = ""
    if seen.is_seen is not None:
        n_unknown = int((has_label & ~is_known & ~seen.is_seen).sum())
        if n_unknown:
            note = f", without {n_unknown:,} of labels that it does not know"

    def measure(cells: np.ndarray) -> Measures:
        return _measure_labels(file_labels[cells], predicted[cells])

    return _compare(column, is_known, seen, measure, LABELS, note)


def compare_numbers(
    column: str,
    file_numbers: np.ndarray,
    predicted: np.ndarray,
    training_mean: float | None,
    seen: Seen,
) -> tuple[dict[str, Any], list[str]]:
    """Figures and sentences on the `predicted` numbers against the numbers in obs column `column`, both
    (cells,) float, NaN for none.

    `training_mean` is the prediction of the baseline; None if predictions are not in the unit of the
    column.
    """
    is_finite = np.isfinite(file_numbers) & np.isfinite(predicted)

    def measure(cells: np.ndarray) -> Measures:
        return _measure_numbers(file_numbers[cells], predicted[cells], training_mean)

    return _compare(column, is_finite, seen, measure, NUMBERS)


def _compare(
    column: str,
    is_compared: np.ndarray,
    seen: Seen,
    measure: Callable[[np.ndarray], Measures],
    wording: Wording,
    note: str = "",
) -> tuple[dict[str, Any], list[str]]:
    """Figures of held-out cells, and sentences on all cells of the mask `is_compared`.

    `measure` takes a mask of cells. `note` follows the measures of held-out cells.
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
    """Accuracy, in which a cell without a predicted label is wrong."""
    n_cells = len(file_labels)
    n_right = int((file_labels == predicted).sum())
    n_missing = int(pd.isna(predicted).sum())
    accuracy = n_right / n_cells
    missing = f", {n_missing:,} without a predicted label" if n_missing else ""
    return {"accuracy": accuracy}, f"{n_right:,} of {n_cells:,} ({accuracy:.3f}{missing})"


def _measure_numbers(
    file_numbers: np.ndarray, predicted: np.ndarray, training_mean: float | None
) -> Measures:
    """Correlation and errors of finite numbers; no correlation if either is constant."""
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
