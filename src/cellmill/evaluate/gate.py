"""Gates of an evaluation (option `evaluate.gate`).

A gate compares the model with a baseline. An evaluation fails if the model does not pass every gate.
"""

from collections.abc import Iterable, Mapping
from math import isfinite
from operator import itemgetter

from cellmill.config.evaluate import BaselineGate
from cellmill.errors import ConfigError
from cellmill.runs.results import DatasetResult, Row, TaskResult

ROUNDING = 1e-9  # a score that misses the gate by at most this much passes


def find_failures(
    gates: Iterable[BaselineGate], datasets: Mapping[str, DatasetResult]
) -> list[str]:
    """Return a line for each gate that fails, for each dataset and label on which the gate fails.

    Raises ConfigError if a gate has nothing to compare: no result, no such baseline, or no such column.
    """
    lines = []
    for gate in gates:
        # results of the gate's task by place, such as `pbmc: few_shot of cell_type`
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
    """Say how the best row of the model misses the gate; None if the model passes.

    `where` names the dataset and task in messages.
    """
    column = gate.column or result.metric
    if column is None:
        raise ConfigError(f"evaluate.gate: {where}: no column ranks its rows; set column")
    models = [row for row in result.rows if row.method.kind == "model"]
    if not models:
        raise ConfigError(
            f"evaluate.gate: {where}: the task has no row of the model; remove this gate"
        )
    candidates = [row for row in result.rows if row.method.kind in ("baseline", "ceiling")]
    baselines = [
        row for row in candidates if gate.baseline in (row.method.name, row.method.features_name)
    ]
    if not baselines:
        names = ", ".join(row.method.name for row in candidates)
        raise ConfigError(
            f"evaluate.gate: {where}: no baseline {gate.baseline!r}; there are: {names}"
        )
    lower_is_better = gate.lower_is_better or column in result.lower_is_better
    choose_best = min if lower_is_better else max
    model, value = choose_best(_list_finite(where, models, column), key=itemgetter(1))
    baseline, baseline_value = choose_best(
        _list_finite(where, baselines, column), key=itemgetter(1)
    )
    sign = -1 if lower_is_better else 1
    if sign * (value - baseline_value) >= gate.margin - ROUNDING:
        return None
    limit = baseline_value + sign * gate.margin
    # print at least 3 decimals, and more until value and limit look different
    digits = 3
    while f"{value:.{digits}f}" == f"{limit:.{digits}f}":
        digits += 1
    bound, change = ("at most", "minus") if lower_is_better else ("at least", "plus")
    expected = f"{baseline_value:.{digits}f} of {baseline}"
    if gate.margin:
        expected = f"{limit:.{digits}f} ({expected} {change} margin {gate.margin:g})"
    return f"{model} has {value:.{digits}f} {column}, expected {bound} {expected}"


def _list_finite(where: str, rows: list[Row], column: str) -> list[tuple[str, float]]:
    """Return the name and the value of each row that has a finite number in a column.

    Raises ConfigError if no row has one.
    """
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
