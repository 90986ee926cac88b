"""Agreement of the labels that a model predicts with those of the file."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import pandas as pd

from cellmill.evaluate.seen.seen_cells import Seen


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
