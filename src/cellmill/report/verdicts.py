"""Verdicts on a run against the best baselines of its tasks, each counted once."""

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from cellmill.runs.results import Row, TaskResult, Verdict

# by task, its accuracy for whole cells: in these tasks it is the same number
WHOLE_CELL_METRICS = {
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
    """A key that verdicts share if only one of them counts: those on the accuracy for whole cells
    with the same label, and those with the same difference between the same methods.
    """
    if verdict.metric == WHOLE_CELL_METRICS.get(result.task):
        return task.removeprefix(result.task)  # ` of LABEL`, or empty for the first label
    return verdict.compared, verdict.against, verdict.metric, verdict.difference


def find_verdict(
    verdicts: Sequence[TaskVerdict], task: str, row: Row, metric: str | None
) -> Verdict | None:
    """The first verdict on `row` of `task` in `metric`; None if there is none."""
    for entry in verdicts:
        is_on_row = (entry.task, entry.verdict.compared) == (task, row.method.name)
        if is_on_row and metric in {entry.verdict.metric, *entry.columns}:
            return entry.verdict
    return None
