"""Gates: whether the tables of an evaluation reach the baselines that `evaluate.gate` states."""

from collections.abc import Iterable, Iterator, Mapping
from math import isfinite
from typing import Any

from cellmill.config.gate import BaselineGate
from cellmill.errors import ConfigError


def failures(gates: Iterable[BaselineGate], datasets: Mapping[str, Any]) -> list[str]:
    """A line for each gate and dataset (and label) that it fails on. `datasets` is that of metrics.json.

    Raises ConfigError for a column or a baseline that a table lacks, and for a gate whose task was skipped everywhere.
    """
    return [line for gate in gates for line in _failures(gate, datasets)]


def _failures(gate: BaselineGate, datasets: Mapping[str, Any]) -> Iterator[str]:
    tables = {
        f"{name}: {task}": result
        for name, dataset in datasets.items()
        for task, result in dataset["tasks"].items()
        if (task == gate.task or task.startswith(f"{gate.task} of ")) and result["skipped"] is None
    }
    if not tables:
        raise ConfigError(f"evaluate.gate: task {gate.task} was skipped on every dataset: no row to compare")
    for where, result in tables.items():
        own, other = (_best(gate, where, result, model) for model in (True, False))
        if (other[1] - own[1] if gate.lower_is_better else own[1] - other[1]) < gate.margin:
            more = f" and {gate.margin:g} {'less' if gate.lower_is_better else 'more'}" if gate.margin else ""
            yield f"{where}: {own[0]} has {own[1]:.3f} {own[2]}, expected {other[1]:.3f} of {other[0]}{more}"


def _best(gate: BaselineGate, where: str, result: Mapping[str, Any], model: bool) -> tuple[str, float, str]:
    """Name, value and column of the best row of the model, or of the gate's baseline."""
    column = gate.column or result["metric"]
    if column is None:
        raise ConfigError(f"evaluate.gate: {where}: no column ranks its rows; set column")
    rows = [row for row in result["rows"] if (row.get("kind") == "model") == model and row.get("kind") != "external"]
    if not model:
        rows = [row for row in rows if row["name"] == gate.baseline or row["name"].startswith(f"{gate.baseline} + ")]
        if not rows:
            names = ", ".join(row["name"] for row in result["rows"] if row.get("kind") not in ("model", "external"))
            raise ConfigError(f"evaluate.gate: {where}: no baseline {gate.baseline!r}; there are: {names}")
    key = f"{column}_mean" if any(f"{column}_mean" in row for row in rows) else column
    known = [
        (row["name"], float(row[key])) for row in rows if isinstance(row.get(key), int | float) and isfinite(row[key])
    ]
    if not known:
        keys = dict.fromkeys(key.removesuffix("_mean") for row in rows for key in row if not key.endswith("_sd"))
        columns = ", ".join(key for key in keys if key not in ("name", "kind") and not key.endswith("_repetitions"))
        raise ConfigError(f"evaluate.gate: {where}: no numbers in column {column!r}; there are: {columns}")
    name, value = (min if gate.lower_is_better else max)(known, key=lambda one: one[1])
    return name, value, column
