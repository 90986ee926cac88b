"""Tables of any evaluation task, from the rows and figures it wrote to metrics.json."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cellmill.report.collect import ReportedRun

HIDDEN = ("name", "kind")


@dataclass(frozen=True)
class Column:
    """One column of a task's rows."""

    heading: str
    key: str
    sd_key: str | None = None
    """Key of the standard deviation shown beside it."""


class TaskTable:
    """Rows of one task on one dataset, as the page shows them."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.rows: list[dict[str, Any]] = result["rows"]
        self.columns = list(columns(self.rows))
        self.metric: str = result["metric"] or ""

    @property
    def best(self) -> str | None:
        """Name of the row with the highest metric; None where no metric ranks the rows."""
        return max(self.points(), key=lambda point: point[1])[0] if self.points() else None

    def points(self) -> list[tuple[str, float, float, bool]]:
        """(name, value, sd, is a baseline) of each row by the metric; none where no metric ranks the rows."""
        ranking = [column for column in self.columns if column.heading == self.metric][:1]
        return [
            (str(row["name"]), row[column.key], row.get(column.sd_key or "", 0.0), row.get("kind") == "baseline")
            for column in ranking
            for row in self.rows
            if row.get(column.key) is not None
        ]


def columns(rows: list[dict[str, Any]]) -> Iterator[Column]:
    """Columns over the keys of all rows: `x_mean` and `x_sd` as one; no lists, and no counts that are 0 in all rows."""
    keys = dict.fromkeys(key for row in rows for key in row if key not in HIDDEN)
    for key in keys:
        values = [row.get(key) for row in rows]
        stem = key.removesuffix("_sd") if key.endswith("_sd") else None
        if any(isinstance(value, list) for value in values) or not any(
            isinstance(value, float) or value for value in values
        ):
            continue
        if key.endswith("_mean"):
            stem = key.removesuffix("_mean")
            yield Column(stem, key, f"{stem}_sd" if f"{stem}_sd" in keys else None)
        elif stem is None or f"{stem}_mean" not in keys:
            yield Column(key, key)


@dataclass(frozen=True)
class Comparison:
    """One task over all runs and datasets."""

    task: str
    metric: str
    """Empty where the columns are the task's figures."""
    columns: list[str]
    lines: list[tuple[str, str, dict[str, Any]]]
    """(run, dataset, value by column)."""


def compare_runs(runs: list[ReportedRun]) -> list[Comparison]:
    """Each task side by side: its rows by their metric, or its figures where no metric ranks rows."""
    tasks: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for run in runs:
        for dataset, entry in ((run.evaluation or {}).get("datasets") or {}).items():
            for task, result in entry["tasks"].items():
                if result["skipped"] is None:
                    tasks.setdefault(task, []).append((run.name, dataset, result))
    comparisons = []
    for task, results in tasks.items():
        metric = next((result["metric"] for _, _, result in results if result["metric"]), "")
        lines = [(run, dataset, _values(result, metric)) for run, dataset, result in results]
        names = list(dict.fromkeys(name for _, _, values in lines for name in values))
        if names:
            comparisons.append(Comparison(task, metric, names, lines))
    return comparisons


def _values(result: dict[str, Any], metric: str) -> dict[str, Any]:
    if metric:
        return {name: value for name, value, _, _ in TaskTable(result).points()}
    return {key: value for key, value in result["figures"].items() if isinstance(value, int | float)}
