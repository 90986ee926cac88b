"""Labels of the cells in a file, as texts, and numbers of cells with labels that a model does not know."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from cellmill.config.datasets import NO_COLUMNS
from cellmill.data.arrays import as_text
from cellmill.data.prepare.qc_lines import list_counts, list_first
from cellmill.data.shards.obs import shard_column

MAX_NAMES = 20  # at most this many labels are named, the most frequent ones


def list_label_texts(column: Any, known: Sequence[str]) -> np.ndarray:
    """Return the labels of an obs column as texts, (cells,) object; None for a missing label.

    Shards have the same texts. A text that usually means no label, such as `unknown`, is a label only if
    the text is in `known`.
    """
    codes, values = pd.factorize(column)
    texts: list[str | None] = []
    for value in values:
        text = as_text(value)
        is_unknown = isinstance(value, str) and text not in known
        texts.append(None if is_unknown and NO_COLUMNS.means_no_label(text) else text)
    return np.array([*texts, None], object)[codes]


def count_by_label(labels: np.ndarray) -> dict[str, int]:
    """Count the cells of each label. `labels` are (cells,) text.

    The largest label comes first. Labels with equally many cells are in the order of their names.
    """
    return dict(sorted(Counter(labels.tolist()).items(), key=lambda item: (-item[1], item[0])))


@dataclass(frozen=True)
class LabelCounts:
    """Numbers of labelled cells in a file, and of cells with a label that the model does not know."""

    n_labelled: int  # cells with a label
    n_unknown: int  # cells with a label that the model does not know
    unknown: dict[str, int]  # number of cells by such a label, the largest label first
    # sentence on the problem with the labels, without a full stop; None if there is no problem
    problem: str | None

    def figures(self) -> dict[str, Any]:
        """Figures about unknown labels: the number of their cells, and the largest labels.

        Empty if there is no unknown label.
        """
        if not self.unknown:
            return {}
        named = dict(list(self.unknown.items())[:MAX_NAMES])
        return {"n_cells_of_unknown_labels": self.n_unknown, "unknown_labels": named}


def count_labels(
    obs: pd.DataFrame, dataset: str, column: str, labels: Sequence[str]
) -> LabelCounts:
    """Count the cells in `obs` that have a label in obs column `column`.

    `labels` are the labels that the model knows. `dataset` is the name of the dataset, which is the label of
    all cells if `column` is `dataset`.
    """
    values = shard_column(obs, dataset, column)
    if values is None:
        return LabelCounts(0, 0, {}, f"{column}: the file has no such obs column")
    texts = list_label_texts(values, labels)
    labelled = texts[~pd.isna(texts)]
    unknown = {label: n for label, n in count_by_label(labelled).items() if label not in labels}
    n_labelled = len(labelled)
    n_unknown = sum(unknown.values())
    problem = ""
    named = list_counts(unknown, MAX_NAMES)
    if not n_labelled:
        problem = "no cell has a label"
    elif n_unknown == n_labelled:
        known = list_first(labels, MAX_NAMES)
        problem = (
            f"none of {n_labelled:,} labelled cells has a label that the model knows: "
            f"expected {known}; got {named}"
        )
    elif unknown:
        problem = f"{n_unknown:,} of {n_labelled:,} labelled cells have a label that the model does not know: {named}"
    return LabelCounts(n_labelled, n_unknown, unknown, f"{column}: {problem}" if problem else None)
