"""Verdicts on a run against the best baselines of its tasks, each counted once."""

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from cellmill.runs.results import Row, TaskResult, Verdict

# metric in which each of these tasks classifies whole cells
WHOLE_CELLS = {
    "probe": "accuracy",
    "low_depth": "accuracy, whole",
    "missing_genes": "accuracy, whole",
}


class TaskVerdict(NamedTuple):
    """Verdict against the best baseline in one metric of a task."""

    task: str
    verdict: Verdict
    columns: set[str]  # columns of the task's table that have the verdict's difference


def list_verdicts(results: Mapping[str, TaskResult]) -> list[TaskVerdict]:
    """Verdicts against the best baselines, without those that only repeat another task's."""
    distinct: dict[Hashable, TaskVerdict] = {}
    # probe comes first, so that it keeps a verdict that other tasks repeat
    for task, result in sorted(results.items(), key=lambda item: item[1].task != "probe"):
        for verdict, columns in result.best_verdicts().items():
            key = _make_repetition_key(task, result, verdict)
            distinct.setdefault(key, TaskVerdict(task, verdict, columns))
    return list(distinct.values())


def _make_repetition_key(task: str, result: TaskResult, verdict: Verdict) -> Hashable:
    """Equal for verdicts that repeat each other: those on the accuracy of whole cells for one
    label, and equal ones of tasks that score the same cells.
    """
    if verdict.metric == WHOLE_CELLS.get(result.task):
        return task.removeprefix(result.task)  # ` of LABEL`, or empty for the first label
    return verdict.compared, verdict.against, verdict.metric, verdict.difference


def find_verdict(
    verdicts: Sequence[TaskVerdict], task: str, row: Row, metric: str | None
) -> Verdict | None:
    """The first verdict on a row of a task in `metric`."""
    for entry in verdicts:
        is_on_row = (entry.task, entry.verdict.compared) == (task, row.method.name)
        if is_on_row and metric in {entry.verdict.metric, *entry.columns}:
            return entry.verdict
    return None
