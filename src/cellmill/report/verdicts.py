"""Verdicts of a run against the best baselines of its tasks, without duplicates."""

from collections.abc import Hashable, Mapping
from typing import NamedTuple

from cellmill.runs.results import TaskResult, Verdict

WHOLE_CELL_METRICS = {
    "probe": "accuracy",
    "low_depth": "accuracy, whole",
    "missing_genes": "accuracy, whole",
}
"""The metric that is the accuracy on whole cells, by task that measures this accuracy.

Whole cells are cells with all their counts and genes. Tasks `low_depth` and `missing_genes` measure
the accuracy on fewer cells than `probe`. Only one of the three verdicts counts: the verdict of
`probe`. If `probe` has no such verdict, the verdict of the task that comes first counts.
"""


class TaskVerdict(NamedTuple):
    """Verdict against the best baseline in one metric of a task."""

    # key of the task in metrics.json: the task's name, or `NAME of LABEL` for further labels
    task: str
    verdict: Verdict


def list_verdicts(results: Mapping[str, TaskResult]) -> list[TaskVerdict]:
    """List the verdicts against the best baselines. Of duplicate verdicts, only one is kept.

    `results` has the result of each task by its key, such as `probe` or `probe of LABEL`.
    """
    distinct: dict[Hashable, TaskVerdict] = {}
    # probe comes first, so that of duplicates the verdict of probe is kept
    for task, result in sorted(results.items(), key=lambda item: item[1].task != "probe"):
        for verdict in result.best_verdicts():
            key = _make_key(task, result, verdict)
            distinct.setdefault(key, TaskVerdict(task, verdict))
    return list(distinct.values())


def _make_key(task: str, result: TaskResult, verdict: Verdict) -> Hashable:
    """Make a key that is equal for duplicate verdicts, and only for these.

    Two verdicts on the same label are duplicates if both are on the accuracy on whole cells, whatever
    their differences are. Other verdicts on the same label are duplicates if their methods, metric
    and difference are equal.
    """
    _, _, label = task.partition(" of ")  # empty for the first label
    if verdict.metric == WHOLE_CELL_METRICS.get(result.task):
        return label, "whole cells"
    return label, verdict.compared, verdict.against, verdict.metric, verdict.difference
