"""Counts of cells whose label a model does not know."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from cellmill.data.shards.index import text_of
from cellmill.data.shards.obs import values_of_column


def tally(values: np.ndarray) -> dict[str, int]:
    """Number of cells of each class, the largest first."""
    return dict(sorted(Counter(values.tolist()).items(), key=lambda item: (-item[1], item[0])))


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

    def numbers(self) -> dict[str, Any]:
        """Cells of unknown labels and the labels of most of them; empty without any."""
        named = dict(list(self.unknown.items())[:MOST_NAMES])
        return {"n_cells_of_unknown_labels": self.n_unknown, "unknown_labels": named} if named else {}

    def problem(self) -> str | None:
        """What is wrong with the labels, after the name of the column, without a full stop; None if nothing is."""
        unknown = _listed([f"{label!r} {n:,}" for label, n in self.unknown.items()])
        if not self.present:
            return f"{self.column}: the file has no such obs column"
        if not self.n_labelled:
            return f"{self.column}: no cell has a label"
        labelled = f"{self.n_labelled:,} labelled cells"
        if self.n_unknown == self.n_labelled:
            known = f"a label that the model knows: expected {_listed(self.labels)}; got {unknown}"
            return f"{self.column}: none of {labelled} has {known}"
        if self.unknown:
            return (
                f"{self.column}: {self.n_unknown:,} of {labelled} have a label that the model does not know: {unknown}"
            )
        return None


def _listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")


def count_labels(obs: pd.DataFrame, dataset: str, column: str, labels: Sequence[str]) -> LabelCounts:
    """Count the cells of `obs` by labels that are not in `labels`; `dataset` is the value of a column `dataset`."""
    found = values_of_column(obs, dataset, column)
    if found is None:
        return LabelCounts(column, False, 0, labels, {})
    codes, values = found
    given = np.array([text_of(value) for value in values], object)[codes[codes >= 0]]
    unknown = {label: n for label, n in tally(given).items() if label not in labels}
    return LabelCounts(column, True, len(given), labels, unknown)
