"""Results of the runs of a sweep, side by side: tidy rows, curves over an axis, and the law of the loss."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from cellmill.report.collect import ReportedRun
from cellmill.report.power_law import fit_law
from cellmill.report.tables import TaskTable

SEED = "train.seed"
FIGURE = "model"  # in place of a row's name, for a task that has figures alone
LOSS = ("", "validation", FIGURE, "val_loss")  # dataset, task, name and metric of the best validation loss
Row = dict[str, Any]
Measure = tuple[str, str, str, str]


def rows_of(run: ReportedRun, values: Mapping[str, Any]) -> Iterator[Row]:
    """One row for each value that the run was judged by; `values` are those of the sweep's axes."""
    plan, status, totals = run.plan or {}, run.status or {}, (run.cost or {}).get("totals", {})
    size = {key: plan.get(key) for key in ("parameters", "cells", "steps", "cells_seen")}
    cost = {key: totals.get(key) for key in ("gpu_hours", "cpu_core_hours")}
    for (dataset, task, name, metric), kind, value, sd in _measures(run, status):
        about = {"dataset": dataset, "task": task, "name": name, "kind": kind, "metric": metric}
        yield {"run": run.name, **values, **size, **cost, **about, "value": value, "sd": sd}


def curves(rows: Sequence[Row], axes: Sequence[str]) -> list[dict[str, Any]]:
    """For each axis of sizes and each task's best measure of the models: mean and sd over seeds by size, a line for
    each of the other axes' values; the best baseline beside it, and the law of validation losses or why there is none.
    """
    found = []
    measures = _best_measures(rows)
    for axis in axes:
        quantity = _quantity(rows, axis)
        if quantity is None:
            continue
        others = [other for other in axes if other not in (axis, SEED)]
        for measure in measures:
            own = [row for row in rows if _measure(row) == measure and row["value"] is not None]
            lines = [
                {"name": ", ".join(map(str, group)), **_line(of_group, quantity, measure == LOSS)}
                for group, of_group in _grouped(own, others).items()
            ]
            dataset, task, name, metric = measure
            about = {"axis": axis, "quantity": quantity, "dataset": dataset, "task": task, "name": name}
            found.append({**about, "metric": metric, "lines": lines, "baseline": _baseline(rows, measure)})
    return found


def _measures(run: ReportedRun, status: Mapping[str, Any]) -> Iterator[tuple[Measure, str, Any, Any]]:
    if status.get("best_val_loss") is not None:
        yield LOSS, "model", status["best_val_loss"], None
    for dataset, entry in (run.evaluation or {}).get("datasets", {}).items():
        for task, result in entry["tasks"].items():
            for name, value, sd, kind in TaskTable(result).points():
                yield (dataset, task, name, result["metric"]), kind, value, sd
            if not result["metric"]:
                for key, value in result["figures"].items():
                    if isinstance(value, int | float):
                        yield (dataset, task, FIGURE, key), "model", value, None


def _best_measures(rows: Sequence[Row]) -> list[Measure]:
    """Of each task's rows of the model (features and classifiers), the one with the highest mean: the loss first, then
    task probe, then others, then figures of a task without rows. Such figures that are alike in all runs are left out.
    """
    values: dict[Measure, list[float]] = {}
    for row in rows:
        if row["kind"] == "model" and row["value"] is not None:
            values.setdefault(_measure(row), []).append(row["value"])
    best: dict[tuple[str, str, str], Measure] = {}
    for measure in sorted(values, key=lambda measure: -float(np.mean(values[measure]))):
        dataset, task, name, metric = measure
        if name != FIGURE or measure == LOSS or len({*values[measure]}) > 1:
            best.setdefault((dataset, task, metric), measure)
    return sorted(best.values(), key=lambda one: (one != LOSS, one[1] != "probe", one[2] == FIGURE))


def _measure(row: Row) -> Measure:
    return row["dataset"], row["task"], row["name"], row["metric"]


def _quantity(rows: Sequence[Row], axis: str) -> str | None:
    """Column that says how large runs are along an axis; None if the axis is none of sizes.

    Cells for fractions of the corpus, parameters for options and named points that change them, else the values.
    """
    values = [row[axis] for row in rows]
    if axis == SEED or len({*map(str, values)}) < 2:
        return None
    if axis == "stream.train_frac":
        return "cells"
    by_value: dict[str, set[Any]] = {}
    for row in rows:
        by_value.setdefault(str(row[axis]), set()).add(row["parameters"])
    if len({frozenset(sizes) for sizes in by_value.values()}) == len(by_value) and None not in set().union(
        *by_value.values()
    ):
        return "parameters"
    return axis if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values) else None


def _grouped(rows: Sequence[Row], axes: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[axis] for axis in axes), []).append(row)
    return groups


def _line(rows: Sequence[Row], quantity: str, is_loss: bool) -> dict[str, Any]:
    points = []
    for (size,), of_size in sorted(_grouped(rows, [quantity]).items()):
        values = np.array([row["value"] for row in of_size], np.float64)
        sd = float(values.std(ddof=1)) if len(values) > 1 else None
        points.append({"size": size, "mean": float(values.mean()), "sd": sd, "n": len(values)})
    if not is_loss:
        return {"points": points}
    law = fit_law([row[quantity] for row in rows], [row["value"] for row in rows])
    return {"points": points, **({"no_law": law} if isinstance(law, str) else {"law": asdict(law)})}


def _baseline(rows: Sequence[Row], measure: Measure) -> dict[str, Any] | None:
    """The highest baseline of a measure's task, by its mean over the runs."""
    dataset, task, _, metric = measure
    beside = [row for row in rows if row["kind"] == "baseline" and row["value"] is not None]
    of_task = [row for row in beside if (row["dataset"], row["task"], row["metric"]) == (dataset, task, metric)]
    means = {
        name: float(np.mean([row["value"] for row in group])) for (name,), group in _grouped(of_task, ["name"]).items()
    }
    return max(
        ({"name": name, "value": value} for name, value in means.items()), key=lambda best: best["value"], default=None
    )
