"""Choice of the labelled cells that a task uses."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from cellmill.data.arrays import text_values
from cellmill.errors import DataError
from cellmill.evaluate import draws
from cellmill.evaluate.draws import draw_cells
from cellmill.evaluate.inference.label_counts import count_by_label
from cellmill.evaluate.task import Context, Skipped

# A task uses at most this many labelled cells. With more cells, the regression on all genes takes hours,
# and accuracies change by less than 0.01.
MAX_LABELLED_CELLS = 10_000


@dataclass(frozen=True)
class LabelledCells:
    """Labelled cells that a task uses, and the numbers of other cells.

    Numbers have the names that they have in metrics.json.
    """

    cells: np.ndarray  # (cells,) int64: indices, ascending
    labels: np.ndarray  # (cells,) text: class of each cell
    classes: dict[str, int]  # number of cells of each used class, the largest class first
    dropped_classes: dict[str, int]  # number of drawn cells of each class with too few cells
    n_unlabelled: int  # cells without a label
    n_left_out: int  # labelled cells that were not drawn

    @property
    def figures(self) -> dict[str, Any]:
        """Numbers of cells and classes, for metrics.json."""
        return {
            "n_cells": len(self.cells),
            "classes": self.classes,
            "dropped_classes": self.dropped_classes,
            "n_unlabelled": self.n_unlabelled,
            "n_left_out": self.n_left_out,
        }


def labelled_cells(
    context: Context,
    task: str,
    min_cells: int,
    option: str,
    max_cells: int = MAX_LABELLED_CELLS,
    reason: str = "",
) -> LabelledCells:
    """Choose the labelled cells of a task among the scored cells of a dataset, with `choose_cells`.

    `task` is the name of the task in messages. `option` is the name of the option that `min_cells` comes
    from. If `min_cells` is not the value of that option, `reason` says how it follows from the option.

    Raises Skipped if fewer than two classes have `min_cells` cells. Raises DataError if the label column
    has a single class.
    """
    if "label" not in context.roles:
        raise Skipped("the dataset has no label column")
    column = context.roles["label"]
    values = sorted({*text_values(column.dropna())})
    if not values:
        raise Skipped(f"no cell has a label in obs column {column.name!r}")
    if len(values) < 2:
        raise DataError(
            f"{context.reader.path}: obs column {column.name!r} has one class, {values[0]!r}; expected two classes or "
            f"more for task {task}: name another label column, or leave it empty"
        )
    scored = np.flatnonzero(context.scored)
    chosen = choose_cells(column.iloc[scored], min_cells, context.options.seed, max_cells)
    n_classes = len(chosen.classes)
    if n_classes < 2:
        counted = "scored cells"
        remedy = f"lower {option}"
        if chosen.n_left_out:
            counted = f"of the {max_cells:,} drawn cells"
        elif context.options.cells == "heldout":
            remedy = f"raise shard.test_frac or {remedy}"
        raise Skipped(
            f"expected at least two classes of {column.name} with {min_cells} or more {counted} each "
            f"({reason or option}), got {n_classes}; {remedy}",
            chosen.figures,
        )
    return replace(chosen, cells=scored[chosen.cells])


def choose_cells(
    labels: pd.Series, min_cells: int, seed: int, max_cells: int = MAX_LABELLED_CELLS
) -> LabelledCells:
    """Draw at most `max_cells` labelled cells, then drop classes with fewer than `min_cells` drawn cells.

    `labels` has a value for each cell, NaN for none. The cells in the result are indices of `labels`. The
    draw is made with `seed`.
    """
    text = text_values(labels)
    is_missing = labels.isna().to_numpy()
    labelled = np.flatnonzero(~is_missing)
    drawn = draw_cells(labelled, max_cells, seed, draws.LABELLED_CELLS)
    counts = count_by_label(text[drawn])
    kept = np.array([cell for cell in drawn if counts[text[cell]] >= min_cells], dtype=np.int64)
    return LabelledCells(
        cells=kept,
        labels=text[kept].astype(str),
        classes={name: n for name, n in counts.items() if n >= min_cells},
        dropped_classes={name: n for name, n in counts.items() if n < min_cells},
        n_unlabelled=int(is_missing.sum()),
        n_left_out=len(labelled) - len(drawn),
    )
