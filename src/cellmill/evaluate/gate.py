"""Gates of an evaluation: comparisons with a baseline that a model must pass (`evaluate.gate`)."""

from collections.abc import Iterable, Mapping
from math import isfinite
from operator import itemgetter

from cellmill.config.evaluate import BaselineGate
from cellmill.errors import ConfigError
from cellmill.runs.results import DatasetResult, Row, TaskResult

ROUNDING = 1e-9  # smaller differences are rounding errors


def find_failures(
    gates: Iterable[BaselineGate], datasets: Mapping[str, DatasetResult]
) -> list[str]:
    """A line for each gate and each dataset (and label) where it fails.

    Raises ConfigError for a gate without a row.
    """
    lines = []
    for gate in gates:
        results: dict[str, TaskResult] = {}
        for name, dataset in datasets.items():
            for task, result in dataset.tasks.items():
                if result.task == gate.task and result.skipped is None:
                    results[f"{name}: {task}"] = result
        if not results:
            raise ConfigError(
                f"evaluate.gate: task {gate.task} was skipped on every dataset: no row to compare"
            )
        for where, result in results.items():
            line = _describe_failure(gate, where, result)
            if line is not None:
                lines.append(f"{where}: {line}")
    return lines


def _describe_failure(gate: BaselineGate, where: str, result: TaskResult) -> str | None:
    """Say by how much the model's best row misses the gate; None if it passes."""
    column = gate.column or result.metric
    if column is None:
        raise ConfigError(f"evaluate.gate: {where}: no column ranks its rows; set column")
    models = [row for row in result.rows if row.method.kind == "model"]
    if not models:
        raise ConfigError(
            f"evaluate.gate: {where}: the task has no row of the model; remove this gate"
        )
    others = [row for row in result.rows if row.method.kind in ("baseline", "ceiling")]
    baselines = [
        row for row in others if gate.baseline in (row.method.name, row.method.features_name)
    ]
    if not baselines:
        names = ", ".join(row.method.name for row in others)
        raise ConfigError(
            f"evaluate.gate: {where}: no baseline {gate.baseline!r}; there are: {names}"
        )
    is_error = gate.lower_is_better or column in result.lower_is_better
    choose = min if is_error else max
    name, value = choose(_list_finite(where, models, column), key=itemgetter(1))
    other, other_value = choose(_list_finite(where, baselines, column), key=itemgetter(1))
    sign = -1 if is_error else 1
    if sign * (value - other_value) >= gate.margin - ROUNDING:
        return None
    limit = other_value + sign * gate.margin
    # as many digits as tell the value from the limit
    digits = 3
    while f"{value:.{digits}f}" == f"{limit:.{digits}f}":
        digits += 1
    bound, change = ("at most", "minus") if is_error else ("at least", "plus")
    expected = f"{other_value:.{digits}f} of {other}"
    if gate.margin:
        expected = f"{limit:.{digits}f} ({expected} {change} margin {gate.margin:g})"
    return f"{name} has {value:.{digits}f} {column}, expected {bound} {expected}"


def _list_finite(where: str, rows: list[Row], column: str) -> list[tuple[str, float]]:
    """Name and value of each row with a number in a column; raises ConfigError without any."""
    values = [(row.method.name, row.value(column)) for row in rows]
    finite = [
        (name, float(value)) for name, value in values if value is not None and isfinite(value)
    ]
    if not finite:
        columns: dict[str, None] = {}
        for row in rows:
            columns |= dict.fromkeys([*row.scores, *row.numbers])
        raise ConfigError(
            f"evaluate.gate: {where}: no numbers in column {column!r}; there are: {', '.join(columns)}"
        )
    return finite
