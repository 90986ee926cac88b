"""Rows of results.csv. There is a row for each run of a sweep and each value by which it was judged."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cellmill.report.collect import ReportedRun
from cellmill.report.schemas import JsonObject, PlanSchema
from cellmill.report.task_table import list_figures, list_row_values
from cellmill.runs.results import TaskResult

TableColumn = tuple[str, str, str]
"""Dataset, task and metric: a column in a task's table.

Two values can be compared only if they are in the same column.
"""


@dataclass(frozen=True)
class Measure:
    """What a value measures: a metric of one method in a task, or a figure of a task.

    A run has at most one value of each measure. A curve shows how this value changes over runs.
    """

    dataset: str
    task: str
    row: str | None  # name of the method; None for a figure and for LOSS
    metric: str  # name of the metric or the figure

    @property
    def table_column(self) -> TableColumn:
        """The column of the task's table that has the values of this measure."""
        return self.dataset, self.task, self.metric


LOSS = Measure(dataset="", task="validation", row=None, metric="lowest_val_loss")
"""The lowest validation loss of a run.

It is this loss even if another metric chooses the best checkpoint of the run.
"""


@dataclass(frozen=True)
class SweepRow:
    """A row of results.csv: a value by which a run was judged."""

    # name, options, sizes and costs of the run, by column; equal in all rows of the run
    run_values: JsonObject
    measure: Measure
    kind: str  # kind of the method; `model` for a figure and for LOSS
    value: float
    sd: float | None = None  # standard deviation over repetitions; None if fewer than two
    is_best_baseline: bool = False  # True for the best baseline in the run's task
    # equal for runs that learn the same from the same data (`_make_training_key`)
    training_key: str = ""
    lower_is_better: bool = False

    def to_csv_row(self) -> JsonObject:
        """Make the row of results.csv: values by column.

        LOSS and figures belong to no method. Their name and kind is `model`.
        """
        measure = self.measure
        return self.run_values | {
            "dataset": measure.dataset,
            "task": measure.task,
            "name": measure.row or "model",
            "kind": self.kind,
            "metric": measure.metric,
            "value": self.value,
            "sd": self.sd,
        }


def list_rows(run: ReportedRun, axis_values: Mapping[str, Any]) -> list[SweepRow]:
    """List the rows of a run.

    The first row has the lowest validation loss of the run. Then come the values of each task that
    was not skipped. `axis_values` are the run's values of the options that the sweep varies, by
    option.
    """
    plan = run.plan or PlanSchema()
    run_values = {
        "run": run.name,
        **axis_values,
        "parameters": plan.parameters,
        "cells": plan.cells,
        "steps": plan.steps,
        "cells_seen": plan.cells_seen,
        "gpu_hours": run.totals.get("gpu_hours"),
        "cpu_core_hours": run.totals.get("cpu_core_hours"),
    }
    rows = []
    loss = run.lowest_val_loss
    if loss is not None:
        rows.append(SweepRow(run_values, LOSS, "model", loss, lower_is_better=True))
    if run.evaluation is not None:
        for dataset_name, task, result in run.evaluation.results():
            # a skipped task may have figures, which are not listed
            if result.skipped is None:
                rows += _list_task_rows(run_values, dataset_name, task, result)
    training_key = _make_training_key(run)
    return [replace(row, training_key=training_key) for row in rows]


def _make_training_key(run: ReportedRun) -> str:
    """Make a text that is equal for runs that learn the same from the same data.

    Such runs have the same family, objective, tokens and training data. Their models may differ in
    size.
    """
    options = run.options.content
    family = run.options.model.family
    fingerprint = None if run.run_record is None else run.run_record.fingerprint
    return str([family, options.get("objective"), options.get("tokens"), fingerprint])


def _list_task_rows(
    run_values: JsonObject, dataset_name: str, task: str, result: TaskResult
) -> Iterator[SweepRow]:
    """List the values of one task.

    If a metric ranks the rows of the task, there is one value for each ranked row: its value of the
    metric. If no metric ranks the rows, all values of each row are listed. If the task has no rows,
    its figures are listed.
    """
    best_baseline = None
    if result.metric is None:
        rows_with_values = [(row, list_row_values(row)) for row in result.rows]
    else:
        best_baseline = result.best_baseline(result.metric)
        rows_with_values = [
            (row, {result.metric: result.rank_value(row)}) for row in result.ranked_rows
        ]
    for row, values in rows_with_values:
        for metric, value in values.items():
            yield SweepRow(
                run_values,
                Measure(dataset_name, task, row.method.name, metric),
                row.method.kind,
                value,
                row.sd(metric),
                is_best_baseline=row == best_baseline,
                lower_is_better=metric in result.lower_is_better,
            )
    if not result.rows:
        for metric, figure in list_figures(result).items():
            yield SweepRow(run_values, Measure(dataset_name, task, None, metric), "model", figure)
