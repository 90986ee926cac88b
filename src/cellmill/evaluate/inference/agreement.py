"""Agreement of the labels and numbers that a model predicts with those of the file."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import pandas as pd

from cellmill.evaluate.seen.seen_cells import Seen
from cellmill.evaluate.tasks.expression import column_correlations


class Agreement(NamedTuple):
    """Number of cells whose label in the file the model knows, and how many of them have the same
    predicted label.
    """

    n_cells: int
    n_right: int
    n_rejected: int  # cells without a predicted label, counted as wrong

    @classmethod
    def tally(cls, given: np.ndarray, predicted: np.ndarray, among: np.ndarray) -> Self:
        """`given` and `predicted` are text, (cells,), None without a label; `among` is a mask."""
        return cls(
            n_cells=int(among.sum()),
            n_right=int((among & (given == predicted)).sum()),
            n_rejected=int((among & pd.isna(predicted)).sum()),
        )

    def describe(self) -> str:
        rejected = f", {self.n_rejected:,} rejected" if self.n_rejected else ""
        return f"{self.n_right:,} of {self.n_cells:,} ({self.n_right / self.n_cells:.3f}{rejected})"


def compare_labels(
    column: str, given: np.ndarray, predicted: np.ndarray, known: Sequence[str], seen: Seen
) -> tuple[dict[str, Any], list[str]]:
    """Numbers and sentences about the labels `given` in obs column `column` against `predicted`,
    both (cells,).

    Only cells whose label is `known` to the model are compared, and only unseen cells have an
    accuracy.
    """
    compared = np.isin(given.astype(str), np.array(known, str)) & ~pd.isna(given)
    if not compared.any():
        return {}, []
    if seen.cells is None:
        every = Agreement.tally(given, predicted, compared)
        line = (
            f"{column}: {every.describe()} as in the file, no accuracy: unknown whether the model was "
            "trained on them"
        )
        return {}, [f"{line} ({seen.unknown})"]
    unseen = Agreement.tally(given, predicted, compared & ~seen.cells)
    trained = Agreement.tally(given, predicted, compared & seen.cells)
    figures: dict[str, Any] = {
        "n_labelled_unseen": unseen.n_cells,
        "n_labelled_seen": trained.n_cells,
    }
    lines = []
    n_unknown = int((~pd.isna(given) & ~compared & ~seen.cells).sum())
    if unseen.n_cells:
        figures["accuracy"] = unseen.n_right / unseen.n_cells
        note = f", without {n_unknown:,} of labels that it does not know" if n_unknown else ""
        if seen.unknown:
            note += f"; {seen.unknown}"
        lines.append(
            f"{column}: accuracy on cells that the model was not trained on: {unseen.describe()}{note}"
        )
    if trained.n_cells:
        lines.append(
            f"{column}: no accuracy, cells of its training or validation: {trained.describe()} as in the file"
        )
    return figures, lines


def compare_numbers(
    column: str, given: np.ndarray, predicted: np.ndarray, training_mean: float | None, seen: Seen
) -> tuple[dict[str, Any], list[str]]:
    """Numbers and sentences about the numbers `given` in obs column `column` against `predicted`, both
    (cells,) float, NaN for none.

    `training_mean` is the prediction of the baseline; None if predictions are not in the unit of the
    column. Figures are of unseen cells only.
    """
    compared = np.isfinite(given) & np.isfinite(predicted)
    if not compared.any():
        return {}, []
    if seen.cells is None:
        _, words = _measure_numbers(given[compared], predicted[compared], training_mean)
        line = f"{column}: {words}, but it is unknown whether the model was trained on them"
        return {}, [f"{line} ({seen.unknown})"]
    unseen = compared & ~seen.cells
    trained = compared & seen.cells
    figures: dict[str, Any] = {
        "n_numbers_unseen": int(unseen.sum()),
        "n_numbers_seen": int(trained.sum()),
    }
    lines = []
    if unseen.any():
        measured, words = _measure_numbers(given[unseen], predicted[unseen], training_mean)
        figures |= measured
        note = f"; {seen.unknown}" if seen.unknown else ""
        lines.append(f"{column}: on cells that the model was not trained on: {words}{note}")
    if trained.any():
        _, words = _measure_numbers(given[trained], predicted[trained], training_mean)
        lines.append(f"{column}: cells of its training or validation, no measure: {words}")
    return figures, lines


def _measure_numbers(
    given: np.ndarray, predicted: np.ndarray, training_mean: float | None
) -> tuple[dict[str, float], str]:
    """Correlation and errors of finite numbers, and the same in words; no correlation if either is
    constant.
    """
    figures = {}
    words = [f"{len(given):,} cells"]
    correlation = float(column_correlations(given[:, None], predicted[:, None])[0])
    if np.isfinite(correlation):
        figures["pearson"] = correlation
        words.append(f"correlation {correlation:.3f}")
    if training_mean is not None:
        error = float(np.abs(predicted - given).mean())
        baseline = float(np.abs(training_mean - given).mean())
        figures |= {"mean_absolute_error": error, "mean_absolute_error_of_mean": baseline}
        relation = "less" if error < baseline else "not less"
        words.append(
            f"mean absolute error {error:.4g}, {relation} than {baseline:.4g} of the training mean "
            f"({training_mean:.4g})"
        )
    return figures, ", ".join(words)
