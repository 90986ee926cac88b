"""Results of the runs of a sweep side by side: tidy rows, curves over an axis, and a power law
fitted to the loss.

The law has a floor, y = floor + a * x ** -exponent, and is fitted to losses of runs of several
sizes as in Hoffmann et al. 2022 (Training compute-optimal large language models, section 3.3): the
Huber loss of log residuals, minimised by L-BFGS from a grid of starts. The interval comes from 200
bootstraps over the runs.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import product
from typing import Any

import numpy as np

from cellmill.report.collect import ReportedRun
from cellmill.report.tables import single_numbers

FEWEST_SIZES = 4  # for three parameters
DELTA = 1e-3  # of the Huber loss, in log units
DRAWS = 200
STEEPEST = 3.0  # exponents beyond it fit noise
SEED = "train.seed"
NO_ROW = "model"  # in place of a row's name, for a task that has single numbers alone
MEASURE = ("dataset", "task", "name", "metric")
LOSS = ("", "validation", NO_ROW, "val_loss")  # measure of the best validation loss
Row = dict[str, Any]
Measure = tuple[str, str, str, str]


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
    # around which the factor is fitted: else it moves with the exponent
    scale = float(np.exp(np.log(sizes).mean()))
    lowest = losses.min()
    span = np.ptp(losses) + 1e-9
    # floors, exponents
    grid = product((lowest * 0.3, lowest * 0.7, lowest * 0.98), (0.1, 0.3, 0.7, 1.2))
    starts = [np.array([np.log(span), np.log(floor), exponent]) for floor, exponent in grid]
    best = _fit(sizes / scale, losses, starts)
    generator = np.random.Generator(np.random.Philox(key=0))
    exponents: list[float] = []
    while len(exponents) < DRAWS:
        drawn = generator.integers(len(sizes), size=len(sizes))
        if len(np.unique(sizes[drawn])) >= FEWEST_SIZES - 1:
            exponents.append(float(_fit(sizes[drawn] / scale, losses[drawn], [best])[2]))
    low, high = np.quantile(exponents, [0.025, 0.975]).tolist()
    if low <= 0.01 or high >= 0.99 * STEEPEST:
        return {"no_law": f"the exponent is not determined: 95 % interval {low:.2f} to {high:.2f}"}
    log_factor, log_floor, exponent = best
    law = {"floor": float(np.exp(log_floor)), "factor": float(np.exp(log_factor) * scale**exponent)}
    return {"law": law | {"exponent": float(exponent), "low": low, "high": high}}


def _fit(sizes: np.ndarray, losses: np.ndarray, starts: Sequence[np.ndarray]) -> np.ndarray:
    """log factor, log floor and exponent of the best fit."""
    log_x = np.log(sizes)
    log_y = np.log(losses)

    def objective(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        log_factor, log_floor, exponent = parameters
        parts = log_factor - exponent * log_x, np.full_like(log_x, log_floor)
        predicted = np.logaddexp(*parts)
        off = predicted - log_y
        loss = np.where(np.abs(off) <= DELTA, off**2 / (2 * DELTA), np.abs(off) - DELTA / 2).sum()
        slope = np.clip(off / DELTA, -1, 1)
        share = np.exp(parts[0] - predicted)
        return float(loss), np.array([slope @ share, slope @ (1 - share), -(slope * share) @ log_x])

    bounds = [(-50, 50), (-50, float(log_y.min())), (0.0, STEEPEST)]
    minimize = import_module("scipy.optimize").minimize  # a fifth of a second, for few reports
    fits = [
        minimize(objective, start, method="L-BFGS-B", jac=True, bounds=bounds) for start in starts
    ]
    found: np.ndarray = min(fits, key=lambda fit: float(fit.fun)).x
    return found


def rows_of(run: ReportedRun, values: Mapping[str, Any]) -> list[Row]:
    """One row for each value that the run was judged by; `values` are those of the sweep's axes."""
    plan = run.plan or {}
    totals = (run.cost or {}).get("totals", {})
    about = {"run": run.name, **values}
    about |= {key: plan.get(key) for key in ("parameters", "cells", "steps", "cells_seen")}
    about |= {key: totals.get(key) for key in ("gpu_hours", "cpu_core_hours")}
    rows: list[Row] = []

    def add(measure: Measure, kind: str, value: float, sd: float | None = None) -> None:
        dataset, task, name, metric = measure
        named = {"dataset": dataset, "task": task, "name": name, "kind": kind, "metric": metric}
        rows.append({**about, **named, "value": value, "sd": sd})

    loss = (run.status or {}).get("best_val_loss")
    if loss is not None:
        add(LOSS, "model", loss)
    for task_result in [] if run.evaluation is None else run.evaluation.results():
        dataset, task, result = task_result
        for row in result.ranked_rows:
            kind = row.method.kind
            measure = (dataset, task, row.method.name, result.metric or "")
            add(measure, kind, result.rank_value(row), row.sd(result.metric or ""))
        if not result.metric:
            for key, value in single_numbers(result).items():
                add((dataset, task, NO_ROW, key), "model", value)
    return rows


def curves(rows: Sequence[Row], axes: Sequence[str]) -> list[dict[str, Any]]:
    """For each axis of sizes and each task's best measure of the models: mean and sd over seeds by
    size, a line for each of the other axes' values; the best baseline beside it, and the law of
    validation losses or why there is none.
    """
    valued = [row for row in rows if row["value"] is not None]
    by_measure = _grouped(valued, MEASURE)
    measures = _best_measures(valued)
    # with the highest mean over the runs
    baselines: dict[tuple[str, str, str], dict[str, Any]] = {}
    of_baselines = [row for row in valued if row["kind"] == "baseline"]
    for (dataset, task, name, metric), group in _grouped(of_baselines, MEASURE).items():
        mean = float(np.mean([row["value"] for row in group]))
        if mean > baselines.get((dataset, task, metric), {"value": -np.inf})["value"]:
            baselines[dataset, task, metric] = {"name": name, "value": mean}
    found = []
    for axis in axes:
        quantity = _quantity(rows, axis)
        if quantity is None:
            continue
        others = [other for other in axes if other not in (axis, SEED)]
        for measure in measures:
            lines = [
                {"name": ", ".join(map(str, group)), **_line(of_group, quantity, measure == LOSS)}
                for group, of_group in _grouped(by_measure[measure], others).items()
            ]
            about = {
                "axis": axis,
                "quantity": quantity,
                **dict(zip(MEASURE, measure)),
                "lines": lines,
            }
            dataset, task, _, metric = measure
            found.append({**about, "baseline": baselines.get((dataset, task, metric))})
    return found


def _best_measures(valued: Sequence[Row]) -> list[Measure]:
    """Of each task's rows of the model (features and classifiers), the one with the highest mean:
    the loss first, then task probe, then others, then numbers of a task without rows. Such numbers
    that are alike in all runs are left out.
    """
    groups = _grouped([row for row in valued if row["kind"] == "model"], MEASURE)
    values = {measure: [row["value"] for row in group] for measure, group in groups.items()}
    best: dict[tuple[str, str, str], Measure] = {}
    for measure in sorted(values, key=lambda measure: -float(np.mean(values[measure]))):
        dataset, task, name, metric = measure
        if name != NO_ROW or measure == LOSS or len({*values[measure]}) > 1:
            best.setdefault((dataset, task, metric), measure)
    return sorted(best.values(), key=lambda one: (one != LOSS, one[1] != "probe", one[2] == NO_ROW))


def _quantity(rows: Sequence[Row], axis: str) -> str | None:
    """Column that says how large runs are along an axis; None if the axis is none of sizes.

    Cells for fractions of the corpus, parameters for options and named points that change them,
    else the values.
    """
    values = [row[axis] for row in rows]
    if axis == SEED or len({*map(str, values)}) < 2:
        return None
    if axis == "stream.train_frac":
        return "cells"
    sizes: dict[str, set[Any]] = defaultdict(set)
    for row in rows:
        sizes[str(row[axis])].add(row["parameters"])
    distinct = {frozenset(of_value) for of_value in sizes.values()}
    if len(distinct) == len(sizes) and not any(None in of_value for of_value in distinct):
        return "parameters"
    return (
        axis
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        else None
    )


def _grouped(rows: Sequence[Row], keys: Sequence[str]) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[key] for key in keys)].append(row)
    return groups


def _line(rows: Sequence[Row], quantity: str, is_loss: bool) -> dict[str, Any]:
    points = []
    for (size,), of_size in sorted(_grouped(rows, [quantity]).items()):
        values = np.array([row["value"] for row in of_size], np.float64)
        sd = float(values.std(ddof=1)) if len(values) > 1 else None
        points.append({"size": size, "mean": float(values.mean()), "sd": sd, "n": len(values)})
    law = (
        fit_law([row[quantity] for row in rows], [row["value"] for row in rows]) if is_loss else {}
    )
    return {"points": points, **law}
