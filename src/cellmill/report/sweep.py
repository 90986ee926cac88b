"""Results of the runs of a sweep side by side: tidy rows, and curves over an axis of sizes."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cellmill.report.collect import Object, ReportedRun
from cellmill.report.scaling_law import fit_law
from cellmill.report.tables import select_numbers

SEED = "train.seed"
NO_ROW = "model"  # name of measures that are no row of a table, but a single number


class Measure(NamedTuple):
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
SweepRow = Object
"""Line of results.csv: the run with its axes and sizes, a measure, and its value."""


def list_rows(run: ReportedRun, axes: Mapping[str, Any]) -> list[SweepRow]:
    """One row for each value that the run was judged by; `axes` are its values on the sweep's axes."""
    plan = run.plan or {}
    totals = (run.cost or {}).get("totals", {})
    shared = {"run": run.name, **axes}  # columns that are equal in all rows
    shared |= {key: plan.get(key) for key in ("parameters", "cells", "steps", "cells_seen")}
    shared |= {key: totals.get(key) for key in ("gpu_hours", "cpu_core_hours")}
    return [shared | row for row in _list_scores(run)]


def _list_scores(run: ReportedRun) -> Iterator[SweepRow]:
    """The validation loss, then the ranked rows or the single numbers of each task."""
    loss = (run.status or {}).get("best_val_loss")
    if loss is not None:
        yield _make_row(LOSS, "model", loss)
    if run.evaluation is None:
        return
    for dataset, task, result in run.evaluation.results():
        if result.metric is None:
            for key, number in select_numbers(result).items():
                yield _make_row(Measure(dataset, task, NO_ROW, key), "model", number)
            continue
        for row in result.ranked_rows:
            measure = Measure(dataset, task, row.method.name, result.metric)
            sd = row.sd(result.metric)
            yield _make_row(measure, row.method.kind, result.rank_value(row), sd)


def _make_row(measure: Measure, kind: str, value: float, sd: float | None = None) -> SweepRow:
    return {
        "dataset": measure.dataset,
        "task": measure.task,
        "name": measure.name,
        "kind": kind,
        "metric": measure.metric,
        "value": value,
        "sd": sd,
    }


def make_curves(rows: Sequence[SweepRow], axes: Sequence[str]) -> list[Object]:
    """A curve for each axis of sizes and each task, of the measure in which models are best.

    A curve has a line for each combination of values of the other axes, and the best baseline. A
    line has the mean and sd over seeds by size, and for the validation loss the law or why there is
    none.
    """
    valued = [row for row in rows if row["value"] is not None]
    by_measure = _group(valued, _find_measure)
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
            curve = {
                "axis": axis,
                "quantity": quantity,
                "dataset": measure.dataset,
                "task": measure.task,
                "name": measure.name,
                "metric": measure.metric,
                "lines": lines,
                "baseline": baselines.get(measure.column),
            }
            curves.append(curve)
    return curves


def _make_lines(
    rows: Sequence[SweepRow], axes: Sequence[str], quantity: str, is_loss: bool
) -> list[Object]:
    """A line for each combination of values on `axes`."""
    lines = []
    groups = _group(rows, lambda row: tuple(row[axis] for axis in axes))
    for values, group in groups.items():
        line = {"name": ", ".join(map(str, values)), "points": _average_seeds(group, quantity)}
        if is_loss:
            sizes = [row[quantity] for row in group]
            losses = [row["value"] for row in group]
            line |= fit_law(sizes, losses)
        lines.append(line)
    return lines


def _average_seeds(rows: Sequence[SweepRow], quantity: str) -> list[Object]:
    """Mean and standard deviation over seeds, by size."""
    points = []
    for size, group in sorted(_group(rows, lambda row: row[quantity]).items()):
        values = np.array([row["value"] for row in group], np.float64)
        point = {
            "size": size,
            "mean": float(values.mean()),
            "sd": float(values.std(ddof=1)) if len(values) > 1 else None,
            "n": len(values),
        }
        points.append(point)
    return points


def _find_measure(row: SweepRow) -> Measure:
    return Measure(row["dataset"], row["task"], row["name"], row["metric"])


def _group(rows: Iterable[SweepRow], key: Callable[[SweepRow], Any]) -> dict[Any, list[SweepRow]]:
    """Rows by their key, in order."""
    groups: dict[Hashable, list[SweepRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _best_baselines(valued: Sequence[SweepRow]) -> dict[Measure, Object]:
    """Name and value, a mean over the runs, of the highest baseline of each column."""
    best: dict[Measure, Object] = {}
    baselines = [row for row in valued if row["kind"] == "baseline"]
    for measure, group in _group(baselines, _find_measure).items():
        mean = float(np.mean([row["value"] for row in group]))
        highest = best.get(measure.column)
        if highest is None or mean > highest["value"]:
            best[measure.column] = {"name": measure.name, "value": mean}
    return best


def _best_measures(valued: Sequence[SweepRow]) -> list[Measure]:
    """The model's row (features and classifier) with the highest mean in each task.

    The loss comes first, then task probe, other tasks, and numbers of tasks without rows. Numbers
    that are equal in all runs are left out.
    """
    models = [row for row in valued if row["kind"] == "model"]
    values = {}
    for measure, group in _group(models, _find_measure).items():
        values[measure] = [row["value"] for row in group]
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
    values = [row[axis] for row in rows]
    if axis == SEED or len({*map(str, values)}) < 2:
        return None
    if axis == "stream.train_frac":
        return "cells"
    by_value = _group(rows, lambda row: str(row[axis]))
    sizes = set()
    for group in by_value.values():
        sizes.add(frozenset(row["parameters"] for row in group))
    are_known = not any(None in parameters for parameters in sizes)
    if are_known and len(sizes) == len(by_value):
        return "parameters"
    are_numbers = [
        isinstance(value, int | float) and not isinstance(value, bool) for value in values
    ]
    return axis if all(are_numbers) else None
