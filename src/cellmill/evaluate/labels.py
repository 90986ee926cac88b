"""Choice of labelled cells for an evaluation."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from cellmill.data.arrays import text_values
from cellmill.errors import DataError
from cellmill.evaluate.scores import draw_cells
from cellmill.evaluate.task import Context, TaskResult
from cellmill.evaluate.unknown_labels import count_labels as count_labels
from cellmill.evaluate.unknown_labels import tally as tally

MAX_CELLS = 10_000  # all-genes regression over more takes hours and moves accuracy by less than 0.01


@dataclass(frozen=True)
class Labelled:
    cells: np.ndarray  # their indices, ascending; int64
    labels: np.ndarray  # class of each; text
    classes: dict[str, int]  # cells of each class used, the largest first
    dropped: dict[str, int]  # cells of each class left out for having fewer cells than are needed
    n_unlabelled: int  # cells without a label, left out
    n_left_out: int  # cells beyond the most, left out by a seeded draw

    @property
    def numbers(self) -> dict[str, Any]:
        """Numbers of cells, for metrics.json."""
        used = {"n_cells": len(self.cells), "classes": self.classes, "dropped_classes": self.dropped}
        return used | {"n_unlabelled": self.n_unlabelled, "n_left_out": self.n_left_out}


def labelled_cells(
    context: Context, task: str, fewest: int, needed_by: str, max_cells: int = MAX_CELLS
) -> Labelled | TaskResult:
    """Evaluated cells of classes with at least `fewest` cells; the result of a skipped task if fewer than two.

    Prints the classes. `task` and `needed_by`, the option that needs so many cells, are named in messages. Raises
    DataError for a column of one class.
    """
    if "label" not in context.roles:
        return TaskResult(skipped="the dataset has no label column")
    column = context.roles["label"]
    if len(values := sorted({*text_values(column.dropna())})) < 2:
        content = f"one class, {values[0]!r}" if values else "no values"
        raise DataError(
            f"{context.reader.path}: obs column {column.name!r} has {content}; expected two classes or more for task "
            f"{task}: name another label column, or leave it empty"
        )
    scored = np.flatnonzero(context.scored)
    chosen = choose_cells(column.iloc[scored], fewest, context.options.seed, max_cells)
    for heading, classes in ((column.name, chosen.classes), (f"left out, fewer than {fewest} cells", chosen.dropped)):
        if classes or heading == column.name:
            counts = ", ".join(f"{name} {n:,}" for name, n in classes.items()) or "no class"
            print(f"{context.dataset}: {task}: {heading}: {counts}", flush=True)
    if (n := len(chosen.classes)) < 2:
        return TaskResult(
            figures=chosen.numbers,
            skipped=f"{n} classes of {column.name} have at least {fewest} scored cells ({needed_by}), expected two or "
            f"more; raise shard.test_frac or lower {needed_by}",
        )
    return replace(chosen, cells=scored[chosen.cells])


def choose_cells(labels: pd.Series, fewest: int, seed: int, max_cells: int = MAX_CELLS) -> Labelled:
    """The labelled cells of classes with at least `fewest` cells."""
    text, missing = text_values(labels), labels.isna().to_numpy()
    known = np.flatnonzero(~missing)
    drawn = draw_cells(known, max_cells, seed, 0)
    counts = tally(text[drawn])
    kept = np.array([cell for cell in drawn if counts[text[cell]] >= fewest], dtype=np.int64)
    return Labelled(
        cells=kept,
        labels=text[kept].astype(str),
        classes={name: n for name, n in counts.items() if n >= fewest},
        dropped={name: n for name, n in counts.items() if n < fewest},
        n_unlabelled=int(missing.sum()),
        n_left_out=len(known) - len(drawn),
    )
