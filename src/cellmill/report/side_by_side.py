"""Tables of a task over several runs, side by side."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from cellmill.report.collect import ReportedRun, list_results
from cellmill.report.task_table import list_figures, list_values
from cellmill.runs.results import TaskResult


class RunValues(NamedTuple):
    """Row of a table over several runs: values of one run on one dataset."""

    run: ReportedRun
    dataset_name: str
    value_by_column: dict[str, float]


class TaskAcrossRuns(NamedTuple):
    """Table of one task over the runs that rank its rows by the same metric.

    A column has the metric for one set of features, with the best classifier. If no metric ranks
    the rows, columns are those of the model's row; without such a row, the task's figures.
    """

    task: str
    metric: str | None  # None if no metric ranks the rows
    rows: list[RunValues]

    @property
    def columns(self) -> list[str]:
        """Columns in which a run has a value, in order of appearance."""
        return list(dict.fromkeys(chain.from_iterable(row.value_by_column for row in self.rows)))


def compare_runs(runs: Sequence[ReportedRun]) -> list[TaskAcrossRuns]:
    """A table for each task and metric, over the runs that have both.

    Values of different metrics, such as accuracies with different numbers of counts, cannot be
    compared, so they are in different tables. Skipped tasks and tables without a value are left out.
    """
    # by task, then by metric: tables of a task are next to each other
    rows_by_table: dict[str, dict[str | None, list[RunValues]]] = {}
    for run, dataset_name, dataset_result in list_results(runs):
        for task, result in dataset_result.tasks.items():
            if result.skipped is None:
                row = RunValues(run, dataset_name, _find_values(result))
                rows_by_table.setdefault(task, {}).setdefault(result.metric, []).append(row)
    tables = [
        TaskAcrossRuns(task, metric, rows)
        for task, rows_by_metric in rows_by_table.items()
        for metric, rows in rows_by_metric.items()
    ]
    return [table for table in tables if table.columns]


def _find_values(result: TaskResult) -> dict[str, float]:
    """Values of a run in its row of the table, by column."""
    if result.metric is not None:
        return _find_best_scores(result)
    for row in result.rows:
        if row.method.kind == "model":
            return list_values(row)
    return list_figures(result)


def _find_best_scores(result: TaskResult) -> dict[str, float]:
    """The best classifier's value of the metric, by features."""
    best: dict[str, float] = {}
    for row in result.ranked_rows:
        features = row.method.features_name
        value = result.rank_value(row)
        best[features] = max(value, best.get(features, value))
    return best
