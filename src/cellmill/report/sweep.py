"""Results of the runs of a sweep side by side: tidy rows, and curves over an axis of sizes."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cellmill.report.collect import Object, ReportedRun
from cellmill.report.scaling_law import Law, NoLaw, fit_law
from cellmill.report.tables import select_numbers

SEED = "train.seed"
NO_ROW = "model"  # name of measures that are no row of a table, but a single number


@dataclass(frozen=True)
class Measure:
    """Source of a value: a row of a task on a dataset, and a metric of it."""

    dataset: str
    task: str
    name: str
    metric: str

    @property
    def column(self) -> "Measure":
        """The measure without its row: equal for rows that can be compared."""
        return Measure(self.dataset, self.task, "", self.metric)


LOSS = Measure("", "validation", NO_ROW, "val_loss")  # the best validation loss


@dataclass(frozen=True)
class SweepRow:
    """A value that a run was judged by."""

    run: Object  # columns that are equal in all rows of the run: its name, axes and sizes
    measure: Measure
    kind: str  # model, baseline or external
    value: float | None
    sd: float | None = None

    def columns(self) -> Object:
        """The row of results.csv."""
        measure = self.measure
        return self.run | {
            "dataset": measure.dataset,
            "task": measure.task,
            "name": measure.name,
            "kind": self.kind,
            "metric": measure.metric,
            "value": self.value,
            "sd": self.sd,
        }


@dataclass(frozen=True)
class Point:
    """Mean and standard deviation over seeds of the runs of one size."""

    size: float
    mean: float
    sd: float | None  # None for a single run
    n: int


@dataclass(frozen=True)
class CurveLine:
    """Runs with the same values on all axes other than the curve's."""

    name: str  # these values
    points: list[Point]  # sorted by size
    law: Law | NoLaw | None  # None unless the curve is of the validation loss

    def to_json(self) -> Object:
        line: Object = {"name": self.name, "points": [asdict(point) for point in self.points]}
        if isinstance(self.law, Law):
            line["law"] = asdict(self.law)
        elif isinstance(self.law, NoLaw):
            line["no_law"] = self.law.reason
        return line


@dataclass(frozen=True)
class BestBaseline:
    """The highest baseline of a task."""

    name: str
    value: float  # mean over the runs


@dataclass(frozen=True)
class Curve:
    """A measure over the sizes of an axis."""

    axis: str
    quantity: str  # column with the sizes
    measure: Measure
    lines: list[CurveLine]
    baseline: BestBaseline | None

    def to_json(self) -> Object:
        """The curve in curves.json."""
        return {
            "axis": self.axis,
            "quantity": self.quantity,
            **asdict(self.measure),
            "lines": [line.to_json() for line in self.lines],
            "baseline": self.baseline and asdict(self.baseline),
        }


def list_rows(run: ReportedRun, axes: Mapping[str, Any]) -> list[SweepRow]:
    """One row for each value that the run was judged by; `axes` are its values on the sweep's axes."""
    plan = run.plan or {}
    totals = (run.cost or {}).get("totals", {})
    shared = {"run": run.name, **axes}
    shared |= {key: plan.get(key) for key in ("parameters", "cells", "steps", "cells_seen")}
    shared |= {key: totals.get(key) for key in ("gpu_hours", "cpu_core_hours")}
    return list(_list_scores(run, shared))


def _list_scores(run: ReportedRun, shared: Object) -> Iterator[SweepRow]:
    """The validation loss, then the ranked rows or the single numbers of each task."""
    loss = (run.status or {}).get("best_val_loss")
    if loss is not None:
        yield SweepRow(shared, LOSS, "model", loss)
    if run.evaluation is None:
        return
    for dataset, task, result in run.evaluation.results():
        if result.metric is None:
            for key, number in select_numbers(result).items():
                yield SweepRow(shared, Measure(dataset, task, NO_ROW, key), "model", number)
            continue
        for row in result.ranked_rows:
            measure = Measure(dataset, task, row.method.name, result.metric)
            sd = row.sd(result.metric)
            yield SweepRow(shared, measure, row.method.kind, result.rank_value(row), sd)


def make_curves(rows: Sequence[SweepRow], axes: Sequence[str]) -> list[Curve]:
    """A curve for each axis of sizes and each task, of the measure in which models are best.

    A curve has a line for each combination of values of the other axes, and the best baseline. A
    line has the mean and sd over seeds by size, and for the validation loss the law or why there is
    none.
    """
    valued = [row for row in rows if row.value is not None]
    by_measure = _group(valued, lambda row: row.measure)
    measures = _best_measures(valued)
    baselines = _best_baselines(valued)
    curves = []
    for axis in axes:
        quantity = _find_quantity(rows, axis)
        if quantity is None:
            continue
        other_axes = [name for name in axes if name not in (axis, SEED)]
        for measure in measures:
            lines = _make_lines(by_measure[measure], other_axes, quantity, measure == LOSS)
            baseline = baselines.get(measure.column)
            curves.append(Curve(axis, quantity, measure, lines, baseline))
    return curves


def _make_lines(
    rows: Sequence[SweepRow], axes: Sequence[str], quantity: str, is_loss: bool
) -> list[CurveLine]:
    """A line for each combination of values on `axes`."""
    lines = []
    groups = _group(rows, lambda row: tuple(row.run[axis] for axis in axes))
    for values, group in groups.items():
        law = None
        if is_loss:
            law = fit_law([row.run[quantity] for row in group], _list_values(group))
        name = ", ".join(map(str, values))
        lines.append(CurveLine(name, _average_seeds(group, quantity), law))
    return lines


def _average_seeds(rows: Sequence[SweepRow], quantity: str) -> list[Point]:
    """Mean and standard deviation over seeds, by size."""
    points = []
    for size, group in sorted(_group(rows, lambda row: row.run[quantity]).items()):
        values = np.array(_list_values(group), np.float64)
        sd = float(values.std(ddof=1)) if len(values) > 1 else None
        points.append(Point(size, float(values.mean()), sd, len(values)))
    return points


def _list_values(rows: Sequence[SweepRow]) -> list[float]:
    return [row.value for row in rows if row.value is not None]


def _group(rows: Iterable[SweepRow], key: Callable[[SweepRow], Any]) -> dict[Any, list[SweepRow]]:
    """Rows by their key, in order."""
    groups: dict[Hashable, list[SweepRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _best_baselines(valued: Sequence[SweepRow]) -> dict[Measure, BestBaseline]:
    """The highest baseline of each column."""
    best: dict[Measure, BestBaseline] = {}
    baselines = [row for row in valued if row.kind == "baseline"]
    for measure, group in _group(baselines, lambda row: row.measure).items():
        mean = float(np.mean(_list_values(group)))
        highest = best.get(measure.column)
        if highest is None or mean > highest.value:
            best[measure.column] = BestBaseline(measure.name, mean)
    return best


def _best_measures(valued: Sequence[SweepRow]) -> list[Measure]:
    """The model's row (features and classifier) with the highest mean in each task.

    The loss comes first, then task probe, other tasks, and numbers of tasks without rows. Numbers
    that are equal in all runs are left out.
    """
    models = [row for row in valued if row.kind == "model"]
    values = {}
    for measure, group in _group(models, lambda row: row.measure).items():
        values[measure] = _list_values(group)
    highest_first = sorted(values, key=lambda measure: -float(np.mean(values[measure])))
    best: dict[Measure, Measure] = {}
    for measure in highest_first:
        is_shared = len({*values[measure]}) == 1
        if measure.name != NO_ROW or measure == LOSS or not is_shared:
            best.setdefault(measure.column, measure)

    def order(measure: Measure) -> tuple[bool, bool, bool]:
        return measure != LOSS, measure.task != "probe", measure.name == NO_ROW

    return sorted(best.values(), key=order)


def _find_quantity(rows: Sequence[SweepRow], axis: str) -> str | None:
    """Column that has the size of runs along an axis; None if the axis has no sizes.

    It is `cells` for fractions of the corpus, and `parameters` if they differ between the values of
    the axis. Otherwise it is the axis itself if its values are numbers.
    """
    values = [row.run[axis] for row in rows]
    if axis == SEED or len({*map(str, values)}) < 2:
        return None
    if axis == "stream.train_frac":
        return "cells"
    by_value = _group(rows, lambda row: str(row.run[axis]))
    sizes = set()
    for group in by_value.values():
        sizes.add(frozenset(row.run["parameters"] for row in group))
    are_known = not any(None in parameters for parameters in sizes)
    if are_known and len(sizes) == len(by_value):
        return "parameters"
    are_numbers = [
        isinstance(value, int | float) and not isinstance(value, bool) for value in values
    ]
    return axis if all(are_numbers) else None
