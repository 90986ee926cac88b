"""Choice of labelled cells for an evaluation, and counts of cells whose label a model does not know."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from cellmill.data.arrays import text_values
from cellmill.data.shards.index import text_of
from cellmill.data.shards.obs import values_of_column
from cellmill.errors import DataError
from cellmill.evaluate.scores import draw_cells
from cellmill.evaluate.task import Context, TaskResult

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
