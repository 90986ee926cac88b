"""Tasks side by side in several runs."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from cellmill.report.collect import ReportedRun, RunOnDataset, list_results
from cellmill.report.task_table import select_numbers
from cellmill.runs.results import TaskResult


class RunValues(NamedTuple):
    """Values of a run on one dataset, by column."""

    run: ReportedRun
    dataset: str
    values: dict[str, float]


class TaskAcrossRuns(NamedTuple):
    """A task side by side in several runs.

    Columns are sets of features, each with its best classifier; without a metric that ranks rows,
    they are the task's single numbers.
    """

    task: str
    metric: str  # empty if no metric ranks rows
    rows: list[RunValues]

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(chain.from_iterable(row.values for row in self.rows)))


def compare_runs(runs: Sequence[ReportedRun]) -> list[TaskAcrossRuns]:
    """Each task that is not skipped and has a value, side by side in the runs."""
    by_task: dict[str, list[RunOnDataset]] = {}
    for evaluated in list_results(runs):
        for task, result in evaluated.results.items():
            if result.skipped is None:
                by_task.setdefault(task, []).append(evaluated)
    tables = [_compare_task(task, evaluated) for task, evaluated in by_task.items()]
    return [table for table in tables if table.columns]


def _compare_task(task: str, evaluated: Sequence[RunOnDataset]) -> TaskAcrossRuns:
    """The task of runs and datasets that all have it, a row for each."""
    metrics = [results[task].metric for _, _, results in evaluated]
    metric = next(filter(None, metrics), "")
    rows = []
    for run, dataset, results in evaluated:
        result = results[task]
        values = _find_highest_by_features(result) if metric else select_numbers(result)
        rows.append(RunValues(run, dataset, values))
    return TaskAcrossRuns(task, metric, rows)


def _find_highest_by_features(result: TaskResult) -> dict[str, float]:
    """The highest value of the metric, over classifiers, by features."""
    highest: dict[str, float] = {}
    for row in result.ranked_rows:
        features = row.method.features_name
        value = result.rank_value(row)
        highest[features] = max(value, highest.get(features, value))
    return highest
