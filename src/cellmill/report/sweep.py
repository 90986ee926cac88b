"""Results of the runs of a sweep side by side: tidy rows, and curves over an axis of sizes."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from cellmill.files import read_json
from cellmill.report.collect import ReportedRun
from cellmill.report.forms import JsonObject, PlanForm, damage_error
from cellmill.report.scaling_law import Law, NoLaw, fit_law
from cellmill.report.task_table import select_numbers

SEED = "train.seed"
NO_ROW = "model"
"""Column `name` of results.csv for values that are single numbers, not rows of a table."""


@dataclass(frozen=True)
class Measure:
    """Source of a value: a row of a task on a dataset, and a metric of it."""

    dataset: str
    task: str
    row: str  # name of the row's method, or NO_ROW
    metric: str

    @property
    def has_row(self) -> bool:
        """False for a single number of the model."""
        return self.row != NO_ROW

    @property
    def column(self) -> "Measure":
        """The column of the task's table: this measure without the row. Only measures of the same
        column can be compared.
        """
        return replace(self, row="")


LOSS = Measure("", "validation", NO_ROW, "val_loss")
"""The best validation loss. Lower is better, but it is the only measure of its column, so the choice
of the highest mean keeps it.
"""


@dataclass(frozen=True)
class SweepRow:
    """A value that a run was judged by."""

    run_columns: JsonObject  # name, axes and sizes of the run: equal in all its rows
    measure: Measure
    kind: str  # of the row's method: model, baseline or external
    value: float
    sd: float | None = None

    def to_csv_row(self) -> JsonObject:
        """The row of results.csv: values by column."""
        measure = self.measure
        return self.run_columns | {
            "dataset": measure.dataset,
            "task": measure.task,
            "name": measure.row,
            "kind": self.kind,
            "metric": measure.metric,
            "value": self.value,
            "sd": self.sd,
        }


RowsByMeasure = dict[Measure, list[SweepRow]]


@dataclass(frozen=True)
class Point:
    """Mean and standard deviation over seeds of the runs of one size."""

    size: float
    mean: float
    sd: float | None  # None for a single run
    n: int


@dataclass(frozen=True)
class CurveOfRuns:
    """Runs with the same values on all axes other than the curve's."""

    name: str  # these values, joined by commas
    points: Annotated[list[Point], Field(min_length=1)]  # sorted by size
    law: Law | NoLaw | None  # None unless the measure is the validation loss


@dataclass(frozen=True)
class BestBaseline:
    """The highest baseline of a task."""

    name: str
    value: float  # mean over the runs


@dataclass(frozen=True)
class Scaling:
    """A measure over the sizes of an axis."""

    axis: str
    quantity: str  # key of `run_columns` that has the sizes
    measure: Measure
    curves: list[CurveOfRuns]
    baseline: BestBaseline | None


@dataclass(frozen=True)
class SweepCurves:
    """Content of curves.json."""

    name: str
    axes: list[str]
    n_runs: int
    scalings: list[Scaling]


def read_sweep(path: Path) -> SweepCurves:
    """curves.json of a sweep. Raises DataError if it is damaged."""
    try:
        return TypeAdapter(SweepCurves).validate_python(read_json(path))
    except ValidationError as error:
        raise damage_error(path, error) from None


def list_rows(run: ReportedRun, axes: Mapping[str, Any]) -> list[SweepRow]:
    """One row for each value that the run was judged by; `axes` are its values on the sweep's axes."""
    plan = run.plan or PlanForm()
    columns = {
        "run": run.name,
        **axes,
        "parameters": plan.parameters,
        "cells": plan.cells,
        "steps": plan.steps,
        "cells_seen": plan.cells_seen,
        "gpu_hours": run.totals.get("gpu_hours"),
        "cpu_core_hours": run.totals.get("cpu_core_hours"),
    }
    return list(_make_rows(run, columns))


def _make_rows(run: ReportedRun, columns: JsonObject) -> Iterator[SweepRow]:
    """The validation loss, then the ranked rows or the single numbers of each task."""
    if run.status is not None and run.status.best_val_loss is not None:
        yield SweepRow(columns, LOSS, "model", run.status.best_val_loss)
    if run.evaluation is None:
        return
    for dataset, task, result in run.evaluation.results():
        if result.metric is None:
            for metric, number in select_numbers(result).items():
                measure = Measure(dataset, task, NO_ROW, metric)
                yield SweepRow(columns, measure, "model", number)
            continue
        for row in result.ranked_rows:
            measure = Measure(dataset, task, row.method.name, result.metric)
            sd = row.sd(result.metric)
            yield SweepRow(columns, measure, row.method.kind, result.rank_value(row), sd)


def make_scalings(rows: Sequence[SweepRow], axes: Sequence[str]) -> list[Scaling]:
    """A scaling for each axis of sizes and each task, from the row in which models are best.

    It has the best baseline, and a curve for each combination of values on the other axes, seeds
    excepted.
    """
    by_measure = _group(rows, lambda row: row.measure)
    measures = _find_best_measures(by_measure)
    baselines = _find_best_baselines(by_measure)
    scalings = []
    for axis in axes:
        quantity = _find_quantity(rows, axis)
        if quantity is None:
            continue
        other_axes = [name for name in axes if name not in (axis, SEED)]
        for measure in measures:
            is_loss = measure == LOSS
            curves = _make_curves(by_measure[measure], other_axes, quantity, is_loss)
            baseline = baselines.get(measure.column)
            scalings.append(Scaling(axis, quantity, measure, curves, baseline))
    return scalings


def _group(rows: Iterable[SweepRow], key: Callable[[SweepRow], Any]) -> dict[Any, list[SweepRow]]:
    """Rows by their key, in order."""
    groups: dict[Hashable, list[SweepRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _find_best_measures(by_measure: RowsByMeasure) -> list[Measure]:
    """The model's row (features and classifier) with the highest mean in each task.

    The loss comes first, then task probe, other tasks, and single numbers. Single numbers that are
    equal in all runs are left out.
    """
    means = _average_runs(by_measure, "model")
    for measure in [*means]:
        is_single_number = measure != LOSS and not measure.has_row
        if is_single_number and len({*_list_values(by_measure[measure])}) == 1:
            del means[measure]
    return sorted(
        _find_highest(means).values(),
        key=lambda measure: (measure != LOSS, measure.task != "probe", not measure.has_row),
    )


def _find_best_baselines(by_measure: RowsByMeasure) -> dict[Measure, BestBaseline]:
    """The highest baseline of each column."""
    means = _average_runs(by_measure, "baseline")
    best = _find_highest(means)
    return {column: BestBaseline(best[column].row, means[best[column]]) for column in best}


def _average_runs(by_measure: RowsByMeasure, kind: str) -> dict[Measure, float]:
    """Mean over the runs of each measure of one kind."""
    means = {}
    for measure, rows in by_measure.items():
        if rows[0].kind == kind:
            means[measure] = float(np.mean(_list_values(rows)))
    return means


def _list_values(rows: Sequence[SweepRow]) -> list[float]:
    return [row.value for row in rows]


def _find_highest(means: Mapping[Measure, float]) -> dict[Measure, Measure]:
    """The measure with the highest mean of each column, by column."""
    highest: dict[Measure, Measure] = {}
    for measure in sorted(means, key=means.__getitem__, reverse=True):
        highest.setdefault(measure.column, measure)
    return highest


def _find_quantity(rows: Sequence[SweepRow], axis: str) -> str | None:
    """Key of `run_columns` to draw on the x axis; None for seeds, an axis of one value, and words.

    It is `cells` for fractions of the corpus, `parameters` if each value of the axis has its own
    number of parameters, else the axis itself.
    """
    values = [row.run_columns[axis] for row in rows]
    if axis == SEED or len({*map(str, values)}) < 2:
        return None
    if axis == "stream.train_frac":
        return "cells"
    by_value = _group(rows, lambda row: str(row.run_columns[axis]))
    numbers_of_parameters = set()
    for group in by_value.values():
        numbers_of_parameters.add(frozenset(row.run_columns["parameters"] for row in group))
    are_known = not any(None in numbers for numbers in numbers_of_parameters)
    if are_known and len(numbers_of_parameters) == len(by_value):
        return "parameters"
    kinds = {type(value) for value in values}
    return axis if kinds <= {int, float} else None


def _make_curves(
    rows: Sequence[SweepRow], axes: Sequence[str], quantity: str, is_loss: bool
) -> list[CurveOfRuns]:
    """A curve over `quantity` for each combination of values on `axes`."""
    curves = []
    groups = _group(rows, lambda row: tuple(row.run_columns[axis] for axis in axes))
    for values, group in groups.items():
        law = None
        if is_loss:
            law = fit_law([row.run_columns[quantity] for row in group], _list_values(group))
        name = ", ".join(map(str, values))
        curves.append(CurveOfRuns(name, _average_seeds(group, quantity), law))
    return curves


def _average_seeds(rows: Sequence[SweepRow], quantity: str) -> list[Point]:
    """Mean and standard deviation over seeds, by size."""
    points = []
    for size, group in sorted(_group(rows, lambda row: row.run_columns[quantity]).items()):
        values = np.array(_list_values(group), np.float64)
        sd = float(values.std(ddof=1)) if len(values) > 1 else None
        points.append(Point(size, float(values.mean()), sd, len(values)))
    return points
