"""Ranking of the runs of a dataset, over the tasks that all of them have.

A run's score in a task is the value of its best row. The run with the highest mean score leads.
A difference between two runs in a task is notable if its 95 % interval excludes 0 and it is at
least TOLERANCE. Without an interval, TOLERANCE alone decides. A run that differs notably from the
leader in no task is tied with it.

The interval covers repetitions and units, which are mostly cells:

- Repetitions of two runs are paired if both were scored on the same cells with the same labels,
  seed, folds and options of the task. If all results are of earlier versions, equally many cells
  count as the same. Other pairs of runs have no interval.
- No file has the paired difference of two runs per unit. Each run has a standard error over units,
  of its difference from its best baseline. The larger known one of the two runs is an
  approximation. If both are unknown, the runs have no interval.
- Where this standard error is over cells although units are fewer (`Difference.cells_se`), the
  interval is too wide, not too narrow.

The interval does not cover training seeds; a sweep over `train.seed` shows how much these matter.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

from cellmill.runs.results import TOLERANCE, DatasetResult, Difference, TaskResult

CONFIDENCE = 0.95  # level of the intervals


@dataclass(frozen=True)
class TaskScore:
    """A run's best row of one task."""

    value: float
    # empty if the file has none; None where a repetition tested no unit
    repetitions: Sequence[float | None]
    # standard error over units of its difference from the best baseline; None if unknown
    units_se: float | None
    n_units: int | None = None  # None if the file does not count them
    pairing: str = ""  # equal for runs whose repetitions are paired


TaskAndMetric = tuple[str, str]
Scores = dict[TaskAndMetric, TaskScore]
"""Scores of a run by task and metric."""


class NotableDifference(NamedTuple):
    """A notable difference between two runs in a task."""

    value: float  # in the task's metric
    has_interval: bool  # False if the files do not have enough to estimate one


class TaskWin(NamedTuple):
    """A task in which a run is notably better than the leader."""

    run: str
    task: str
    difference: NotableDifference


@dataclass(frozen=True)
class Ranking:
    """Ranking of the runs of one dataset. Runs are given by name. Empty if they share no task."""

    n_runs: int = 0
    # True if the repetitions of all are paired, in each shared task
    has_paired_runs: bool = False
    # tasks that all runs have with the same metric
    shared_tasks: list[str] = field(default_factory=list)
    leader: str | None = None  # the run with the highest mean
    tied: list[str] = field(default_factory=list)  # runs tied with the leader
    wins_over_leader: list[TaskWin] = field(default_factory=list)
    # True if every other run is worse than the leader in some task, beyond an interval
    is_clear: bool = False


def score_tasks(dataset_result: DatasetResult, options: Mapping[str, Any]) -> Scores:
    """Scores of one run on one dataset, of all tasks that rank its rows by a metric.

    `options` is section `evaluate` of the run.
    """
    scores: Scores = {}
    for task, result in dataset_result.tasks.items():
        row = result.best_row("model")
        if row is None or result.metric is None:
            continue
        score = row.scores.get(result.metric)
        repetitions = [] if score is None else score.repetitions
        difference = _find_difference(result, result.metric, row.method.name)
        cells = dataset_result.cells, dataset_result.n_scored, dataset_result.scored_digest
        task_options = options.get("tasks", {}).get(result.task)
        scores[task, result.metric] = TaskScore(
            result.rank_value(row),
            repetitions,
            # the file's key is cells_se; its units are mostly cells
            units_se=None if difference is None else difference.cells_se,
            n_units=None if difference is None else difference.n,
            pairing=str([cells, options.get("seed"), options.get("folds"), task_options]),
        )
    return scores


def _find_difference(result: TaskResult, metric: str, method: str) -> Difference | None:
    """A method's difference from the best baseline in `metric`; None if the file has none.

    Without a baseline, it is the method's difference with the largest standard error over units.
    """
    baseline = result.best_baseline(metric)
    differences = []
    for difference in result.differences:
        is_of_method = difference.column == metric and difference.compared == method
        if is_of_method and (baseline is None or difference.against == baseline.method.name):
            differences.append(difference)
    return max(differences, key=lambda difference: difference.cells_se, default=None)


def rank_runs(scores_by_run: Mapping[str, Scores]) -> Ranking:
    """Rank the runs of one dataset over the tasks that all have with the same metric.

    Runs are given by name. Tasks are in the order of the first run.
    """
    first, *others = scores_by_run.values()
    shared_keys = [key for key in first if all(key in scores for scores in others)]
    if not shared_keys:
        return Ranking()
    mean_by_run = {
        run: statistics.fmean([scores[key].value for key in shared_keys])
        for run, scores in scores_by_run.items()
    }
    leader = max(mean_by_run, key=mean_by_run.__getitem__)
    differences_by_run = {
        run: _find_differences_by_task(scores, scores_by_run[leader], shared_keys)
        for run, scores in scores_by_run.items()
        if run != leader
    }
    wins = [
        TaskWin(run, task, difference)
        for run, differences in differences_by_run.items()
        for (task, _), difference in differences.items()
        if difference.value > 0
    ]
    tied = [run for run, differences in differences_by_run.items() if not differences]
    is_clear = all(
        any(difference.value < 0 and difference.has_interval for difference in differences.values())
        for differences in differences_by_run.values()
    )
    pairings = {
        str([scores[key].pairing for key in shared_keys]) for scores in scores_by_run.values()
    }
    return Ranking(
        n_runs=len(scores_by_run),
        has_paired_runs=len(pairings) == 1,
        shared_tasks=[task for task, _ in shared_keys],
        leader=leader,
        tied=tied,
        wins_over_leader=wins,
        is_clear=is_clear,
    )


def _find_differences_by_task(
    scores: Scores, leader_scores: Scores, shared_keys: Sequence[TaskAndMetric]
) -> dict[TaskAndMetric, NotableDifference]:
    """Notable differences of a run from the leader, by task and metric."""
    differences = {}
    for key in shared_keys:
        difference = find_notable_difference(scores[key], leader_scores[key])
        if difference is not None:
            differences[key] = difference
    return differences


def find_notable_difference(score: TaskScore, other: TaskScore) -> NotableDifference | None:
    """Difference of two runs in a task, `score` minus `other`; None if it is not notable."""
    difference = score.value - other.value
    half_width = _compute_half_width(score, other)
    contains_zero = half_width is not None and abs(difference) <= half_width
    if abs(difference) < TOLERANCE or contains_zero:
        return None
    return NotableDifference(difference, has_interval=half_width is not None)


def _list_paired_differences(score: TaskScore, other: TaskScore) -> list[float]:
    """Differences of two runs in the repetitions in which both were tested.

    Empty if the runs are not paired, or differ in the number of repetitions.
    """
    if score.pairing != other.pairing:
        return []
    if len(score.repetitions) != len(other.repetitions):
        return []
    pairs = zip(score.repetitions, other.repetitions)
    return [a - b for a, b in pairs if a is not None and b is not None]


def _compute_half_width(score: TaskScore, other: TaskScore) -> float | None:
    """Half the width of the interval of a paired difference.

    None, for no interval, if there are fewer than two pairs of repetitions, if the difference
    varies neither over repetitions nor over units, or if no error over units is known.
    """
    differences = _list_paired_differences(score, other)
    n = len(differences)
    known = [(one.units_se, one.n_units) for one in (score, other) if one.units_se is not None]
    if n < 2 or not known:
        return None
    repetitions_variance = statistics.variance(differences) / n
    units_se, n_units = max(known, key=lambda error: error[0])
    units_variance = units_se**2
    variance = repetitions_variance + units_variance
    if variance == 0:
        return None
    # degrees of freedom by Satterthwaite; an unknown number of units counts as infinite
    divisor = repetitions_variance**2 / (n - 1)
    if n_units is not None:
        divisor += units_variance**2 / max(n_units - 1, 1)
    degrees_of_freedom = variance**2 / divisor if divisor else math.inf
    # imported here because pages of one run need no scipy
    stdtrit = import_module("scipy.special").stdtrit
    return float(stdtrit(degrees_of_freedom, (1 + CONFIDENCE) / 2)) * variance**0.5
