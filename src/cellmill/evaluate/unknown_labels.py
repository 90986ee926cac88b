"""Labels of cells that a model does not know, by name and number of cells."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from cellmill.data.level_table import values_of_column
from cellmill.data.obs_levels import text_of

MOST_NAMES = 20  # labels that are named, those of most cells


@dataclass(frozen=True)
class LabelCounts:
    """Result of `count_labels`."""

    column: str
    present: bool  # False if the file has no such obs column
    n_labelled: int
    labels: Sequence[str]  # of the model
    unknown: dict[str, int]  # cells by label that the model does not know, those of most cells first

    @property
    def n_unknown(self) -> int:
        """Cells of a label that the model does not know."""
        return sum(self.unknown.values())

    def figures(self) -> dict[str, Any]:
        """Cells of unknown labels and the labels of most of them; empty without any."""
        if not self.unknown:
            return {}
        named = dict(list(self.unknown.items())[:MOST_NAMES])
        return {"n_cells_of_unknown_labels": self.n_unknown, "unknown_labels": named}

    def problems(self) -> Iterator[str]:
        """Say what is wrong with the labels, after the name of the column, without a full stop."""
        if not self.present:
            yield f"{self.column}: the file has no such obs column"
        elif not self.n_labelled:
            yield f"{self.column}: no cell has a label"
        elif self.n_unknown == self.n_labelled:
            yield (
                f"{self.column}: none of {self.n_labelled:,} labelled cells has a label that the model knows: expected "
                f"{listed(self.labels)}; got {self._named()}"
            )
        elif self.unknown:
            yield (
                f"{self.column}: {self.n_unknown:,} of {self.n_labelled:,} labelled cells have a label that the model "
                f"does not know: {self._named()}"
            )

    def _named(self) -> str:
        return listed([f"{label!r} {n:,}" for label, n in self.unknown.items()])


def count_labels(obs: pd.DataFrame, dataset: str, column: str, labels: Sequence[str]) -> LabelCounts:
    """Count the cells of `obs` by labels that are not in `labels`; `dataset` is the value of a column `dataset`."""
    found = values_of_column(obs, dataset, column)
    if found is None:
        return LabelCounts(column, False, 0, labels, {})
    codes, values = found
    n_cells, known = np.bincount(codes[codes >= 0], minlength=len(values)), {*labels}
    unknown: dict[str, int] = {}
    for value, n in zip(values, n_cells.tolist()):
        if n and (text := text_of(value)) not in known:
            unknown[text] = unknown.get(text, 0) + n
    ordered = dict(sorted(unknown.items(), key=lambda one: (-one[1], one[0])))
    return LabelCounts(column, True, int(n_cells.sum()), labels, ordered)


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")


def texts_of(column: pd.Series) -> np.ndarray:
    """(cells,) object: labels as the model names them, None for a missing one."""
    codes, values = pd.factorize(column)
    return np.array([*(text_of(value) for value in values), None], object)[codes]
