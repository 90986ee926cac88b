"""Tables that compare several runs in one task."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from cellmill.report.collect import ReportedRun, list_results
from cellmill.report.task_table import list_figures, list_row_values
from cellmill.runs.results import TaskResult


class RunValues(NamedTuple):
    """Row of a table over several runs. It has the values of one run on one dataset."""

    run: ReportedRun
    dataset_name: str
    value_by_column: dict[str, float]


class TaskAcrossRuns(NamedTuple):
    """Table of one task, over the runs that have the same metric in it.

    A column has the value of the metric for one set of features, with the best classifier on them.
    If no metric ranks the task's rows, the columns are those of the model's first row. If there is
    no row of the model either, the columns are the task's figures.
    """

    task: str
    metric: str | None  # None if no metric ranks the rows
    rows: list[RunValues]

    @property
    def columns(self) -> list[str]:
        """Columns in which at least one run has a value, in the order of their first appearance."""
        names = chain.from_iterable(row.value_by_column for row in self.rows)
        return list(dict.fromkeys(names))


def compare_runs(runs: Sequence[ReportedRun]) -> list[TaskAcrossRuns]:
    """Make a table for each pair of a task and a metric, over the runs that have both.

    Values of different metrics cannot be compared, so they are in different tables. Accuracies with
    different numbers of counts are an example. Skipped tasks and tables without a value are left
    out.
    """
    # group rows by task, then by metric, so that the tables of one task are next to each other
    rows_by_task: dict[str, dict[str | None, list[RunValues]]] = {}
    for run, dataset_name, dataset_result in list_results(runs):
        for task, result in dataset_result.tasks.items():
            if result.skipped is None:
                row = RunValues(run, dataset_name, _find_values(result))
                rows_by_task.setdefault(task, {}).setdefault(result.metric, []).append(row)
    tables = [
        TaskAcrossRuns(task, metric, rows)
        for task, rows_by_metric in rows_by_task.items()
        for metric, rows in rows_by_metric.items()
    ]
    return [table for table in tables if table.columns]


def _find_values(result: TaskResult) -> dict[str, float]:
    """Find the values of a run in its row of the table, by column."""
    if result.metric is not None:
        return _find_best_scores(result)
    for row in result.rows:
        if row.method.kind == "model":
            return list_row_values(row)
    return list_figures(result)


def _find_best_scores(result: TaskResult) -> dict[str, float]:
    """Find the value of the metric with the best classifier, by features."""
    best_by_features: dict[str, float] = {}
    for row in result.ranked_rows:
        features = row.method.features_name
        value = result.rank_value(row)
        best_by_features[features] = max(value, best_by_features.get(features, value))
    return best_by_features
