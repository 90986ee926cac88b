"""Scaling curves of a sweep. They show how values change with sizes, such as numbers of cells.

Four steps lead from the rows of results.csv to the curves:

1. A *measure* says what a value measures, such as the accuracy of one method in one task. A run has
   at most one value of each measure.
2. An *axis* is an option that the sweep varies. The *size column* of an axis is the column of
   results.csv with the x values. It is `cells` for the fraction of the corpus. It is `parameters`
   for an option that changes only the size of the model. For other options it is the axis itself.
3. A *scaling* has the curves of one measure over one axis. There is a curve for each combination of
   values on the other axes, except the seed. A curve has a point for each size: the mean over seeds.
4. A power law is fitted to each curve of the loss, if the sizes are amounts of data, model or
   training.
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

SEED = "train.seed"  # option of the seed, over which curves are averaged
TRAIN_FRAC = "stream.train_frac"  # option of the fraction of the corpus that trains
LAW_COLUMNS = ("cells", "parameters", TRAIN_FRAC, "train.steps", "train.epochs")
"""Size columns that are amounts of data, model or training.

Over other numbers, such as learning rates, a power law has no meaning.
"""

Key = TypeVar("Key", bound=Hashable)
"""Key by which rows are grouped."""
RowsByMeasure = dict[Measure, list[SweepRow]]
"""Rows of all runs by what they measure."""


@dataclass(frozen=True)
class SizePoint:
    """A point of a curve. It summarises the runs of one size, which differ only in their seeds."""

    size: float  # x value, from the size column of the scaling
    mean: float  # mean over the runs
    sd: float | None  # standard deviation over the runs; None for a single run
    n: int  # number of runs


@dataclass(frozen=True)
class ScalingCurve:
    """Curve of the runs that have the same values on the other axes, except the seed.

    The other axes are all axes of the sweep but the axis of the scaling.
    """

    # the other axes with their values, such as `model.hidden 64, train.lr 0.1`; empty if the sweep
    # has no other axes
    name: str
    points: Annotated[list[SizePoint], Field(min_length=1)]  # sorted by size
    law: Law | NoLaw | None  # None unless the measure is LOSS, and the size column in LAW_COLUMNS


@dataclass(frozen=True)
class BestBaseline:
    """The best baseline in a column of a task's table, over all runs of the sweep.

    The candidates are baselines that are the best in at least one run. The candidate with the best
    mean over runs is chosen.
    """

    name: str
    value: float  # mean over runs


@dataclass(frozen=True)
class Scaling:
    """Curves of one measure over the sizes of one axis."""

    axis: str  # option that the sweep varies
    # column of results.csv with the sizes, such as cells or parameters. The key in files of earlier
    # versions is `quantity`.
    size_column: Annotated[str, Field(validation_alias=AliasChoices("size_column", "quantity"))]
    measure: Measure
    curves: list[ScalingCurve]
    baseline: BestBaseline | None

    @property
    def x_title(self) -> str:
        """Title of the x axis, such as `parameters (model.layers)`.

        The title is the size column, followed by the axis of the sweep if it is another column.
        """
        if self.size_column == self.axis:
            return self.axis
        return f"{to_words(self.size_column)} ({self.axis})"


@dataclass(frozen=True)
class SweepCurves:
    """Content of curves.json, the file with the curves of a sweep."""

    name: str  # name of the sweep
    axes: list[str]  # options that the sweep varies
    n_runs: int
    scalings: list[Scaling]


def read_sweep(path: Path) -> SweepCurves:
    """Read curves.json of a sweep. Raise DataError if the file is absent or damaged."""
    try:
        return TypeAdapter(SweepCurves).validate_python(read_own_json(path))
    except ValidationError as error:
        raise make_damage_error(path, error) from None


def make_scalings(rows: Sequence[SweepRow], axes: Sequence[str]) -> list[Scaling]:
    """Make a scaling for each pair of an axis and a measure.

    Axes without sizes, such as the seed, have no scaling. Only measures that `_choose_measures`
    chooses have a scaling. `axes` are the options that the sweep varies.
    """
    rows_by_measure = _group(rows, lambda row: row.measure)
    measures = _choose_measures(rows_by_measure)
    baseline_by_column = _find_best_baselines(rows_by_measure)
    scalings = []
    for axis in axes:
        other_axes = [name for name in axes if name not in (axis, SEED)]
        size_column = _choose_size_column(rows, axis, other_axes)
        if size_column is None:
            continue
        for measure in measures:
            may_have_law = measure == LOSS and size_column in LAW_COLUMNS
            measure_rows = rows_by_measure[measure]
            curves = _make_curves(measure_rows, axis, other_axes, size_column, may_have_law)
            baseline = baseline_by_column.get(measure.table_column)
            scalings.append(Scaling(axis, size_column, measure, curves, baseline))
    return scalings


def _group(
    rows: Iterable[SweepRow], make_key: Callable[[SweepRow], Key]
) -> dict[Key, list[SweepRow]]:
    """Group rows by their keys. Keys are in the order in which they first appear."""
    rows_by_key: dict[Key, list[SweepRow]] = {}
    for row in rows:
        rows_by_key.setdefault(make_key(row), []).append(row)
    return rows_by_key


def _choose_measures(rows_by_measure: RowsByMeasure) -> list[Measure]:
    """Choose the measures to draw, in the order of the page.

    In each column of a task's table, the row of the model with the best mean over runs is chosen. A
    row is a pair of features and classifier. The loss comes first, then task probe, then the tables
    of other tasks, then figures. A measure with the same value in all runs is left out, unless it is
    the loss.
    """
    model_rows_by_measure = {
        measure: rows for measure, rows in rows_by_measure.items() if rows[0].kind == "model"
    }
    drawn = [
        measure
        for measure in _find_best_measures(model_rows_by_measure).values()
        if measure == LOSS or len({*_list_values(rows_by_measure[measure])}) > 1
    ]
    # False comes before True
    return sorted(
        drawn, key=lambda measure: (measure != LOSS, measure.task != "probe", measure.row is None)
    )


def _find_best_baselines(rows_by_measure: RowsByMeasure) -> dict[TableColumn, BestBaseline]:
    """Find the best baseline in each column, among the baselines that are the best in some run."""
    candidates = {
        measure: rows
        for measure, rows in rows_by_measure.items()
        if any(row.is_best_baseline for row in rows)
    }
    baseline_by_column = {}
    for column, measure in _find_best_measures(candidates).items():
        assert measure.row is not None  # figures have no baseline
        mean = float(np.mean(_list_values(rows_by_measure[measure])))
        baseline_by_column[column] = BestBaseline(measure.row, mean)
    return baseline_by_column


def _find_best_measures(rows_by_measure: RowsByMeasure) -> dict[TableColumn, Measure]:
    """Find the measure with the best mean over all runs in each column."""
    # means with the sign that makes higher better
    signed_mean_by_measure = {}
    for measure, rows in rows_by_measure.items():
        sign = -1 if rows[0].lower_is_better else 1
        signed_mean_by_measure[measure] = sign * float(np.mean(_list_values(rows)))
    # with the best first, the first measure of a column is its best
    best_by_column: dict[TableColumn, Measure] = {}
    best_first = sorted(
        signed_mean_by_measure, key=signed_mean_by_measure.__getitem__, reverse=True
    )
    for measure in best_first:
        best_by_column.setdefault(measure.table_column, measure)
    return best_by_column


def _list_values(rows: Sequence[SweepRow]) -> list[float]:
    """List the values of the rows."""
    return [row.value for row in rows]


def _choose_size_column(
    rows: Sequence[SweepRow], axis: str, other_axes: Sequence[str]
) -> str | None:
    """Choose the size column of an axis. Return None if no curve can be drawn over the axis.

    - Seeds, and an axis with a single value, have no size column.
    - For fractions of the corpus, it is `cells`, if all runs have their number of cells.
    - It is `parameters` if the axis changes the size of the model, and nothing else.
    - Otherwise it is the axis itself, if all its values are numbers.
    """
    if axis == SEED or len({str(row.run_values[axis]) for row in rows}) < 2:
        return None
    if axis == TRAIN_FRAC and all(row.run_values["cells"] is not None for row in rows):
        return "cells"
    if _changes_only_size(rows, axis, other_axes):
        return "parameters"
    types = {type(row.run_values[axis]) for row in rows}
    return axis if types <= {int, float} else None


def _changes_only_size(rows: Sequence[SweepRow], axis: str, other_axes: Sequence[str]) -> bool:
    """True if the axis changes the size of the model, and nothing else.

    The runs are compared in groups that have the same values on `other_axes`. In each group, every
    value of the axis must have its own number of parameters, and all runs must learn the same from
    the same data. At least one group must have two values of the axis.
    """
    has_several_values = False
    for group in _group(rows, lambda row: _get_values_on(row, other_axes)).values():
        pairs = {(str(row.run_values[axis]), row.run_values["parameters"]) for row in group}
        axis_values = {axis_value for axis_value, _ in pairs}
        parameter_counts = {n_parameters for _, n_parameters in pairs}
        # The sets are equally large if each value of the axis has one number of parameters, and each
        # number of parameters has one value of the axis.
        is_one_to_one = len(pairs) == len(axis_values) == len(parameter_counts)
        if None in parameter_counts or not is_one_to_one:
            return False
        if len({row.training_key for row in group}) > 1:
            return False
        has_several_values |= len(axis_values) > 1
    return has_several_values


def _get_values_on(row: SweepRow, axes: Sequence[str]) -> tuple[Any, ...]:
    """Values of the row's run on each of `axes`."""
    return tuple(row.run_values[axis] for axis in axes)


def _make_curves(
    rows: Sequence[SweepRow],
    axis: str,
    other_axes: Sequence[str],
    size_column: str,
    may_have_law: bool,
) -> list[ScalingCurve]:
    """Make a curve over `size_column` for each combination of values on `other_axes`.

    `rows` are the rows of one measure. If `may_have_law` is True, a power law is fitted to each
    curve.
    """
    curves = []
    groups = _group(rows, lambda row: _get_values_on(row, other_axes))
    for values, group in groups.items():
        law = None
        if may_have_law:
            law = fit_law([row.run_values[size_column] for row in group], _list_values(group))
        name = ", ".join(f"{other} {value}" for other, value in zip(other_axes, values))
        curves.append(ScalingCurve(name, _average_over_seeds(group, axis, size_column), law))
    return curves


def _average_over_seeds(rows: Sequence[SweepRow], axis: str, size_column: str) -> list[SizePoint]:
    """Make a point for each value of the axis, by ascending size.

    Two values of the axis that have the same size have two points.
    """
    points = []
    groups = _group(rows, lambda row: (row.run_values[size_column], str(row.run_values[axis])))
    for (size, _), group in sorted(groups.items()):
        values = np.array(_list_values(group), np.float64)
        sd = float(values.std(ddof=1)) if len(values) > 1 else None
        points.append(SizePoint(size, float(values.mean()), sd, len(values)))
    return points
