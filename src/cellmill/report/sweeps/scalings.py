"""Scaling curves of a sweep: each measure over sizes, such as numbers of cells.

From rows of results.csv to curves:

1. A *measure* is a value that each run has, such as the accuracy of one method in one task.
2. An *axis* is an option that the sweep varies. Its *size column*, of results.csv, has the x values:
   `cells` for the fraction of the corpus, `parameters` for options that change only the size of the
   model, or else the axis itself.
3. A *scaling* is a measure over an axis: a curve for each combination of values on the other axes,
   with a point for each size, the mean over seeds.
4. A law is fitted to each curve of the loss, if its sizes are amounts of data, model or training.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import AliasChoices, Field, TypeAdapter, ValidationError

from cellmill.files import read_own_json
from cellmill.report.schemas import make_damage_error
from cellmill.report.sweeps.rows import LOSS, Measure, SweepRow, TableColumn
from cellmill.report.sweeps.scaling_law import Law, NoLaw, fit_law
from cellmill.report.text import to_words

SEED = "train.seed"
TRAIN_FRAC = "stream.train_frac"
LAW_COLUMNS = ("cells", "parameters", TRAIN_FRAC, "train.steps", "train.epochs")
"""Amounts of data, model or training. Over other numbers, such as rates, a power law has no meaning."""

Key = TypeVar("Key", bound=Hashable)
RowsByMeasure = dict[Measure, list[SweepRow]]


@dataclass(frozen=True)
class SizePoint:
    """A point of a curve: mean and standard deviation over runs that differ only in their seeds."""

    size: float  # the x value, from the scaling's size column
    mean: float
    sd: float | None  # None for a single run
    n: int  # number of runs


@dataclass(frozen=True)
class ScalingCurve:
    """Points of runs that have the same values on all axes, except the scaling's own and the seeds."""

    # these axes and values, such as `model.hidden 64, train.lr 0.1`; empty without further axes
    name: str
    points: Annotated[list[SizePoint], Field(min_length=1)]  # sorted by size
    law: Law | NoLaw | None  # only of LOSS, over one of LAW_COLUMNS


@dataclass(frozen=True)
class BestBaseline:
    """The best baseline in a column: the one with the best mean, of the runs' best baselines."""

    name: str
    value: float  # mean over the runs


@dataclass(frozen=True)
class Scaling:
    """Curves of one measure over the sizes of one axis."""

    axis: str  # option that the sweep varies
    # column of results.csv with the sizes, such as cells or parameters; `quantity` in files of
    # earlier versions
    size_column: Annotated[str, Field(validation_alias=AliasChoices("size_column", "quantity"))]
    measure: Measure
    curves: list[ScalingCurve]
    baseline: BestBaseline | None

    @property
    def x_title(self) -> str:
        """The size column, and the axis if it is another column: `parameters (model.layers)`."""
        if self.size_column == self.axis:
            return self.axis
        return f"{to_words(self.size_column)} ({self.axis})"


@dataclass(frozen=True)
class SweepCurves:
    """Content of curves.json."""

    name: str  # of the sweep
    axes: list[str]
    n_runs: int
    scalings: list[Scaling]


def read_sweep(path: Path) -> SweepCurves:
    """Read curves.json of a sweep. Raise DataError if it is damaged."""
    try:
        return TypeAdapter(SweepCurves).validate_python(read_own_json(path))
    except ValidationError as error:
        raise make_damage_error(path, error) from None


def make_scalings(rows: Sequence[SweepRow], axes: Sequence[str]) -> list[Scaling]:
    """A scaling for each axis with a size column and each measure that `_choose_measures` returns.

    It has a curve for each combination of values on the other axes except seeds, and the best
    baseline of the measure's column.
    """
    by_measure = _group(rows, lambda row: row.measure)
    measures = _choose_measures(by_measure)
    baselines = _find_best_baselines(by_measure)
    scalings = []
    for axis in axes:
        other_axes = [name for name in axes if name not in (axis, SEED)]
        size_column = _choose_size_column(rows, axis, other_axes)
        if size_column is None:
            continue
        for measure in measures:
            may_have_law = measure == LOSS and size_column in LAW_COLUMNS
            curves = _make_curves(by_measure[measure], axis, other_axes, size_column, may_have_law)
            scalings.append(
                Scaling(axis, size_column, measure, curves, baselines.get(measure.table_column))
            )
    return scalings


def _group(rows: Iterable[SweepRow], key: Callable[[SweepRow], Key]) -> dict[Key, list[SweepRow]]:
    """Rows by their key. Keys are in the order in which they first appear."""
    groups: dict[Key, list[SweepRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _choose_measures(by_measure: RowsByMeasure) -> list[Measure]:
    """Measures to draw: the loss, then the model's best row in each column.

    Of the model's rows (features and classifier), the best has the best mean over runs. Task probe
    comes first, then tables of other tasks, then figures. A measure with one value in all runs is
    left out, except the loss.
    """
    of_model = {measure: rows for measure, rows in by_measure.items() if rows[0].kind == "model"}
    drawn = [
        measure
        for measure in _find_best_measures(of_model).values()
        if measure == LOSS or len({*_list_values(by_measure[measure])}) > 1
    ]
    return sorted(
        drawn, key=lambda measure: (measure != LOSS, measure.task != "probe", measure.row is None)
    )


def _find_best_baselines(by_measure: RowsByMeasure) -> dict[TableColumn, BestBaseline]:
    """The best baseline in each column, of those that are the best of some run."""
    candidates = {
        measure: rows
        for measure, rows in by_measure.items()
        if any(row.is_best_baseline for row in rows)
    }
    best = {}
    for column, measure in _find_best_measures(candidates).items():
        assert measure.row is not None  # figures have no baseline
        mean = float(np.mean(_list_values(by_measure[measure])))
        best[column] = BestBaseline(measure.row, mean)
    return best


def _find_best_measures(by_measure: RowsByMeasure) -> dict[TableColumn, Measure]:
    """In each column, the measure with the best mean over all runs."""
    means = {}  # with the sign that makes higher better
    for measure, rows in by_measure.items():
        sign = -1 if rows[0].lower_is_better else 1
        means[measure] = sign * float(np.mean(_list_values(rows)))
    best: dict[TableColumn, Measure] = {}
    for measure in sorted(means, key=means.__getitem__, reverse=True):
        best.setdefault(measure.table_column, measure)
    return best


def _list_values(rows: Sequence[SweepRow]) -> list[float]:
    return [row.value for row in rows]


def _choose_size_column(
    rows: Sequence[SweepRow], axis: str, other_axes: Sequence[str]
) -> str | None:
    """The size column of an axis; None if it has no sizes, so that no curve is drawn over it.

    It is `cells` for fractions of the corpus. It is `parameters` if the axis changes the size of
    the model and not what it learns. Otherwise it is the axis, if its values are numbers. Seeds,
    and an axis with a single value, have none.
    """
    if axis == SEED or len({str(row.run_values[axis]) for row in rows}) < 2:
        return None
    if axis == TRAIN_FRAC and all(row.run_values["cells"] is not None for row in rows):
        return "cells"
    if _is_axis_of_sizes(rows, axis, other_axes):
        return "parameters"
    types = {type(row.run_values[axis]) for row in rows}
    return axis if types <= {int, float} else None


def _is_axis_of_sizes(rows: Sequence[SweepRow], axis: str, other_axes: Sequence[str]) -> bool:
    """True if values of the axis differ in their number of parameters, and runs in nothing learned.

    Only runs with the same values on `other_axes` are compared. Some of them must have two values
    of the axis.
    """
    has_several = False
    for group in _group(rows, lambda row: _list_values_on(row, other_axes)).values():
        sizes = {(str(row.run_values[axis]), row.run_values["parameters"]) for row in group}
        numbers = {n_parameters for _, n_parameters in sizes}
        values = {value for value, _ in sizes}
        are_distinct = None not in numbers and len(sizes) == len(numbers) == len(values)
        if not are_distinct or len({row.training_key for row in group}) > 1:
            return False
        has_several |= len(values) > 1
    return has_several


def _list_values_on(row: SweepRow, axes: Sequence[str]) -> tuple[Any, ...]:
    return tuple(row.run_values[axis] for axis in axes)


def _make_curves(
    rows: Sequence[SweepRow],
    axis: str,
    other_axes: Sequence[str],
    size_column: str,
    may_have_law: bool,
) -> list[ScalingCurve]:
    """A curve over `size_column` for each combination of values on `other_axes`.

    A law is fitted to each curve if `may_have_law`.
    """
    curves = []
    groups = _group(rows, lambda row: _list_values_on(row, other_axes))
    for values, group in groups.items():
        law = None
        if may_have_law:
            law = fit_law([row.run_values[size_column] for row in group], _list_values(group))
        name = ", ".join(f"{other} {value}" for other, value in zip(other_axes, values))
        curves.append(ScalingCurve(name, _average_over_seeds(group, axis, size_column), law))
    return curves


def _average_over_seeds(rows: Sequence[SweepRow], axis: str, size_column: str) -> list[SizePoint]:
    """A point for each value of the axis, by ascending size. Two values may have one size."""
    points = []
    groups = _group(rows, lambda row: (row.run_values[size_column], str(row.run_values[axis])))
    for (size, _), group in sorted(groups.items()):
        values = np.array(_list_values(group), np.float64)
        sd = float(values.std(ddof=1)) if len(values) > 1 else None
        points.append(SizePoint(size, float(values.mean()), sd, len(values)))
    return points
