"""A run's verdicts against the best baselines of its tasks, without duplicates."""

from collections.abc import Hashable, Mapping
from typing import NamedTuple

from cellmill.runs.results import TaskResult, Verdict

WHOLE_CELL_METRICS = {
    "probe": "accuracy",
    "low_depth": "accuracy, whole",
    "missing_genes": "accuracy, whole",
}
"""Name of the accuracy on whole cells in each task that has it.

The last two tasks measure it on fewer cells than `probe`. One verdict stands for all: of `probe`,
or without it of the first task in the file.
"""


class TaskVerdict(NamedTuple):
    """Verdict against the best baseline in one metric of a task."""

    task: str  # key of the task in the file: its name, or `NAME of LABEL` for further labels
    verdict: Verdict


def list_verdicts(results: Mapping[str, TaskResult]) -> list[TaskVerdict]:
    """Verdicts against the best baselines. Of duplicates in several tasks, one is kept.

    `results` are by the task's key, such as `probe` or `probe of LABEL`.
    """
    distinct: dict[Hashable, TaskVerdict] = {}
    # probe comes first, so that its verdicts are kept and duplicates of them dropped
    for task, result in sorted(results.items(), key=lambda item: item[1].task != "probe"):
        for verdict in result.best_verdicts():
            key = _make_key(task, result, verdict)
            distinct.setdefault(key, TaskVerdict(task, verdict))
    return list(distinct.values())


def _make_key(task: str, result: TaskResult, verdict: Verdict) -> Hashable:
    """Key that is equal for duplicates.

    All verdicts on the accuracy on whole cells for one label count as one, whatever their values.
    Other verdicts on one label are duplicates if their methods, metric and difference are equal.
    """
    _, _, label = task.partition(" of ")  # empty for the first label
    if verdict.metric == WHOLE_CELL_METRICS.get(result.task):
        return label, "whole cells"
    return label, verdict.compared, verdict.against, verdict.metric, verdict.difference
