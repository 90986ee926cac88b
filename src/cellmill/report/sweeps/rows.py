"""Rows of results.csv: one for each run of a sweep and each value by which it was judged."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from cellmill.report.collect import ReportedRun
from cellmill.report.schemas import JsonObject, PlanSchema
from cellmill.report.task_table import list_values, select_numbers
from cellmill.runs.baselines import list_baselines

NO_ROW = "model"
"""Value of column `name` in results.csv for single numbers, which are in no row of a task's table."""


class TableColumn(NamedTuple):
    """Column of a task's table. Only values of the same column can be compared."""

    dataset: str
    task: str
    metric: str


@dataclass(frozen=True)
class Measure:
    """Source of a value: a metric in one row of a task's table, or a single number of a task."""

    dataset: str
    task: str
    row: str  # name of the row's method; NO_ROW for a single number
    metric: str

    @property
    def has_row(self) -> bool:
        """False for a single number."""
        return self.row != NO_ROW

    @property
    def column(self) -> TableColumn:
        """The column that has the value."""
        return TableColumn(self.dataset, self.task, self.metric)


LOSS = Measure(dataset="", task="validation", row=NO_ROW, metric="val_loss")
"""The best validation loss of a run."""


@dataclass(frozen=True)
class SweepRow:
    """A value by which a run was judged."""

    run_columns: JsonObject  # name, axes, sizes and costs of the run: equal in all its rows
    measure: Measure
    kind: str  # of the row's method: model, variant, baseline or external
    value: float
    sd: float | None = None  # over repetitions
    is_baseline: bool = False  # True for a baseline that counts (`list_baselines`)

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


def list_rows(run: ReportedRun, axis_values: Mapping[str, Any]) -> list[SweepRow]:
    """Rows of a run. `axis_values` are its values by axis of the sweep."""
    plan = run.plan or PlanSchema()
    run_columns = {
        "run": run.name,
        **axis_values,
        "parameters": plan.parameters,
        "cells": plan.cells,
        "steps": plan.steps,
        "cells_seen": plan.cells_seen,
        "gpu_hours": run.totals.get("gpu_hours"),
        "cpu_core_hours": run.totals.get("cpu_core_hours"),
    }
    return list(_make_rows(run, run_columns))


def _make_rows(run: ReportedRun, run_columns: JsonObject) -> Iterator[SweepRow]:
    """The validation loss, then the values of each task.

    They are the metric in each ranked row. If no metric ranks the rows, they are all columns of
    each row; without rows, the task's single numbers.
    """
    if run.status is not None and run.status.best_val_loss is not None:
        yield SweepRow(run_columns, LOSS, "model", run.status.best_val_loss)
    if run.evaluation is None:
        return
    for dataset, task, result in run.evaluation.results():
        if result.metric is None:
            for row in result.rows:
                for column, value in list_values(row).items():
                    measure = Measure(dataset, task, row.method.name, column)
                    yield SweepRow(run_columns, measure, row.method.kind, value, row.sd(column))
            single_numbers = {} if result.rows else select_numbers(result)
            for key, number in single_numbers.items():
                measure = Measure(dataset, task, NO_ROW, key)
                yield SweepRow(run_columns, measure, "model", number)
            continue
        baselines = list_baselines(result, result.metric)
        for row in result.ranked_rows:
            yield SweepRow(
                run_columns,
                Measure(dataset, task, row.method.name, result.metric),
                row.method.kind,
                result.rank_value(row),
                row.sd(result.metric),
                is_baseline=row in baselines,
            )
