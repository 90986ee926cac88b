"""Tables of a task over several runs, side by side."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from cellmill.report.collect import ReportedRun, RunResults, list_results
from cellmill.report.task_table import select_numbers
from cellmill.runs.results import TaskResult


class RunValues(NamedTuple):
    """Row of a table over several runs: values of one run on one dataset."""

    run: ReportedRun
    dataset: str
    values: dict[str, float]  # by column


class TaskAcrossRuns(NamedTuple):
    """Table of one task over several runs.

    If the task ranks its rows by a metric, a column has the metric for one set of features, with
    the best classifier. Otherwise columns are the task's single numbers.
    """

    task: str
    metric: str  # empty if no metric ranks the rows
    rows: list[RunValues]

    @property
    def columns(self) -> list[str]:
        """Columns in which a run has a value, in order of appearance."""
        return list(dict.fromkeys(chain.from_iterable(row.values for row in self.rows)))


def compare_runs(runs: Sequence[ReportedRun]) -> list[TaskAcrossRuns]:
    """A table for each task that some run did not skip; tables without a value are left out."""
    runs_by_task: dict[str, list[RunResults]] = {}
    for run_results in list_results(runs):
        for task, result in run_results.by_task.items():
            if result.skipped is None:
                runs_by_task.setdefault(task, []).append(run_results)
    tables = [_compare_task(task, evaluated) for task, evaluated in runs_by_task.items()]
    return [table for table in tables if table.columns]


def _compare_task(task: str, evaluated: Sequence[RunResults]) -> TaskAcrossRuns:
    """Table of a task that all of `evaluated` have, with a row for each of them."""
    metrics = [by_task[task].metric for _, _, by_task in evaluated]
    metric = next(filter(None, metrics), "")
    rows = []
    for run, dataset, by_task in evaluated:
        result = by_task[task]
        values = _find_highest_by_features(result) if metric else select_numbers(result)
        rows.append(RunValues(run, dataset, values))
    return TaskAcrossRuns(task, metric, rows)


def _find_highest_by_features(result: TaskResult) -> dict[str, float]:
    """The highest value of the metric over classifiers, by features."""
    highest: dict[str, float] = {}
    for row in result.ranked_rows:
        features = row.method.features_name
        value = result.rank_value(row)
        highest[features] = max(value, highest.get(features, value))
    return highest
