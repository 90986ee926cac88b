"""Results of the runs of a sweep side by side: tidy rows, curves over an axis, and a power law
fitted to the loss.

The law has a floor, y = floor + a * x ** -exponent, and is fitted to losses of runs of several
sizes as in Hoffmann et al. 2022 (Training compute-optimal large language models, section 3.3): the
Huber loss of log residuals, minimised by L-BFGS from a grid of starts. The interval comes from 200
bootstraps over the runs.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from importlib import import_module
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from cellmill.report.collect import ReportedRun
from cellmill.report.tables import single_numbers

FEWEST_SIZES = 4  # for three parameters
DELTA = 1e-3  # log units; the Huber loss is quadratic below it
DRAWS = 200  # bootstraps
STEEPEST = 3.0  # exponents beyond it fit noise
SEED = "train.seed"
NO_ROW = "model"  # name of a measure of a task that has only single numbers


class Measure(NamedTuple):
    """Where a value comes from: a row of a task on a dataset, by a metric."""

    dataset: str
    task: str
    name: str
    metric: str

    @property
    def column(self) -> tuple[str, str, str]:
        return self.dataset, self.task, self.metric


LOSS = Measure("", "validation", NO_ROW, "val_loss")  # the best validation loss
SweepRow = dict[str, Any]
"""Line of results.csv: the run with its axes and sizes, a measure, and its value."""


def fit_law(x: Sequence[float], y: Sequence[float]) -> dict[str, Any]:
    """The `law` of losses `y` of runs of sizes `x` (floor, factor, exponent, and low and high, the
    95 % interval of the exponent), or as `no_law` the reason why the data support none.
    """
    sizes = np.asarray(x, np.float64)
    losses = np.asarray(y, np.float64)
    n = len(np.unique(sizes))
    if n < FEWEST_SIZES:
        return {"no_law": f"{n} sizes; a law with a floor needs {FEWEST_SIZES}"}
    if not (np.isfinite(losses).all() and losses.min() > 0 and sizes.min() > 0):
        return {"no_law": "losses or sizes that are not positive"}
    # the factor is fitted at this size: at size 1 it would move with the exponent
    scale = float(np.exp(np.log(sizes).mean()))
    lowest = losses.min()
    log_span = np.log(np.ptp(losses) + 1e-9)
    floors = (lowest * 0.3, lowest * 0.7, lowest * 0.98)
    starts = [
        np.array([log_span, np.log(floor), exponent])
        for floor, exponent in product(floors, (0.1, 0.3, 0.7, 1.2))
    ]
    best = _fit(sizes / scale, losses, starts)
    generator = np.random.Generator(np.random.Philox(key=0))
    exponents: list[float] = []
    while len(exponents) < DRAWS:
        drawn = generator.integers(len(sizes), size=len(sizes))
        if len(np.unique(sizes[drawn])) >= FEWEST_SIZES - 1:
            _, _, drawn_exponent = _fit(sizes[drawn] / scale, losses[drawn], [best])
            exponents.append(float(drawn_exponent))
    low, high = np.quantile(exponents, [0.025, 0.975]).tolist()
    if low <= 0.01 or high >= 0.99 * STEEPEST:
        return {"no_law": f"the exponent is not determined: 95 % interval {low:.2f} to {high:.2f}"}
    log_factor, log_floor, exponent = best.tolist()
    law = {
        "floor": float(np.exp(log_floor)),
        "factor": float(np.exp(log_factor) * scale**exponent),
        "exponent": exponent,
        "low": low,
        "high": high,
    }
    return {"law": law}


def _fit(sizes: np.ndarray, losses: np.ndarray, starts: Sequence[np.ndarray]) -> np.ndarray:
    """log factor, log floor and exponent of the best fit."""
    log_x = np.log(sizes)
    log_y = np.log(losses)

    def objective(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        """Huber loss of the log residuals, and its gradient."""
        log_factor, log_floor, exponent = parameters
        log_power = log_factor - exponent * log_x
        predicted = np.logaddexp(log_power, np.full_like(log_x, log_floor))
        residual = predicted - log_y
        size = np.abs(residual)
        loss = np.where(size <= DELTA, residual**2 / (2 * DELTA), size - DELTA / 2).sum()
        slope = np.clip(residual / DELTA, -1, 1)
        share = np.exp(log_power - predicted)  # share of the power in the prediction
        gradient = [slope @ share, slope @ (1 - share), -(slope * share) @ log_x]
        return float(loss), np.array(gradient)

    bounds = [(-50, 50), (-50, float(log_y.min())), (0.0, STEEPEST)]
    minimize = import_module("scipy.optimize").minimize  # a fifth of a second, for few reports
    fits = [
        minimize(objective, start, method="L-BFGS-B", jac=True, bounds=bounds) for start in starts
    ]
    return np.asarray(min(fits, key=lambda fit: float(fit.fun)).x)


def list_values(run: ReportedRun, axes: Mapping[str, Any]) -> list[SweepRow]:
    """One row for each value that the run was judged by; `axes` are its values on the sweep's axes."""
    plan = run.plan or {}
    totals = (run.cost or {}).get("totals", {})
    shared = {"run": run.name, **axes}  # columns that are equal in all rows
    shared |= {key: plan.get(key) for key in ("parameters", "cells", "steps", "cells_seen")}
    shared |= {key: totals.get(key) for key in ("gpu_hours", "cpu_core_hours")}
    rows: list[SweepRow] = []

    def add(measure: Measure, kind: str, value: float, sd: float | None = None) -> None:
        row = {
            "dataset": measure.dataset,
            "task": measure.task,
            "name": measure.name,
            "kind": kind,
            "metric": measure.metric,
            "value": value,
            "sd": sd,
        }
        rows.append(shared | row)

    loss = (run.status or {}).get("best_val_loss")
    if loss is not None:
        add(LOSS, "model", loss)
    if run.evaluation is None:
        return rows
    for dataset, task, result in run.evaluation.results():
        if result.metric is None:
            for key, number in single_numbers(result).items():
                add(Measure(dataset, task, NO_ROW, key), "model", number)
            continue
        for row in result.ranked_rows:
            measure = Measure(dataset, task, row.method.name, result.metric)
            add(measure, row.method.kind, result.rank_value(row), row.sd(result.metric))
    return rows


def draw_curves(rows: Sequence[SweepRow], axes: Sequence[str]) -> list[dict[str, Any]]:
    """Curves for each axis of sizes and the models' best measure of each task.

    A curve has the mean and sd over seeds by size, a line for each combination of values of the
    other axes, the best baseline, and for the validation loss the law or why there is none.
    """
    valued = [row for row in rows if row["value"] is not None]
    by_measure = _group(valued, _measure)
    measures = _best_measures(valued)
    baselines = _best_baselines(valued)
    curves = []
    for axis in axes:
        quantity = _find_quantity(rows, axis)
        if quantity is None:
            continue
        other_axes = [other for other in axes if other not in (axis, SEED)]
        for measure in measures:
            lines = _lines(by_measure[measure], other_axes, quantity, measure == LOSS)
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


def _lines(
    rows: Sequence[SweepRow], axes: Sequence[str], quantity: str, is_loss: bool
) -> list[dict[str, Any]]:
    """A line for each of the values on other axes."""
    lines = []
    for values, group in _group(rows, lambda row: tuple(row[axis] for axis in axes)).items():
        line = {"name": ", ".join(map(str, values)), "points": _points(group, quantity)}
        if is_loss:
            losses = [row["value"] for row in group]
            line |= fit_law([row[quantity] for row in group], losses)
        lines.append(line)
    return lines


def _points(rows: Sequence[SweepRow], quantity: str) -> list[dict[str, Any]]:
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


def _measure(row: SweepRow) -> Measure:
    return Measure(row["dataset"], row["task"], row["name"], row["metric"])


def _group(rows: Iterable[SweepRow], key: Callable[[SweepRow], Any]) -> dict[Any, list[SweepRow]]:
    groups: dict[Hashable, list[SweepRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _best_baselines(valued: Sequence[SweepRow]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Name and mean over the runs of the highest baseline, by column."""
    best: dict[tuple[str, str, str], dict[str, Any]] = {}
    baselines = [row for row in valued if row["kind"] == "baseline"]
    for measure, group in _group(baselines, _measure).items():
        mean = float(np.mean([row["value"] for row in group]))
        highest = best.get(measure.column)
        if highest is None or mean > highest["value"]:
            best[measure.column] = {"name": measure.name, "value": mean}
    return best


def _best_measures(valued: Sequence[SweepRow]) -> list[Measure]:
    """The model's row (features and classifier) with the highest mean in each task.

    The loss comes first, then task probe, other tasks, and numbers of tasks without rows. Of these
    numbers, those that all runs share are left out.
    """
    models = [row for row in valued if row["kind"] == "model"]
    values = {}
    for measure, group in _group(models, _measure).items():
        values[measure] = [row["value"] for row in group]
    best: dict[tuple[str, str, str], Measure] = {}
    for measure in sorted(values, key=lambda measure: -float(np.mean(values[measure]))):
        differs = len({*values[measure]}) > 1
        if measure.name != NO_ROW or measure == LOSS or differs:
            best.setdefault(measure.column, measure)

    def order(measure: Measure) -> tuple[bool, bool, bool]:
        return measure != LOSS, measure.task != "probe", measure.name == NO_ROW

    return sorted(best.values(), key=order)


def _find_quantity(rows: Sequence[SweepRow], axis: str) -> str | None:
    """Column that has the size of runs along an axis; None if the axis has no sizes.

    It is `cells` for fractions of the corpus, `parameters` if each value of the axis has its own
    number of them, and else the axis itself if its values are numbers.
    """
    values = [row[axis] for row in rows]
    if axis == SEED or len({*map(str, values)}) < 2:
        return None
    if axis == "stream.train_frac":
        return "cells"
    by_value = _group(rows, lambda row: str(row[axis]))
    sizes = set()  # numbers of parameters of each value's runs
    for group in by_value.values():
        sizes.add(frozenset(row["parameters"] for row in group))
    if len(sizes) == len(by_value) and not any(None in parameters for parameters in sizes):
        return "parameters"
    are_numbers = [
        isinstance(value, int | float) and not isinstance(value, bool) for value in values
    ]
    return axis if all(are_numbers) else None
