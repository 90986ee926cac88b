"""Ranking of the runs of a dataset, over the tasks that all of them have.

A run's score in a task is the value of its best row. The run with the highest mean score leads.
A difference between two runs in a task is notable if the difference is at least TOLERANCE and its
95 % interval excludes 0. Without an interval, TOLERANCE alone decides. A run is tied with the
leader if it differs notably from the leader in no task.

The interval covers two sources of chance, repetitions and units. Units are mostly cells.

- Repetitions. The repetitions of two runs are paired if both runs were scored on the same cells,
  with the same labels, seed, folds and options of the task. Results of earlier versions do not say
  which cells were scored. Between such results, equal numbers of cells count as the same cells. If
  repetitions are not paired, the runs have no interval.
- Units. No file has the differences of two runs by unit. But the file of each run has the standard
  error over units of the difference between the run and its best baseline. The larger one of the
  two standard errors approximates the standard error of the difference between the runs. If only
  one of them is known, this one is taken. If neither is known, the runs have no interval.
  In some tasks, this standard error is over cells although the units are batches or donors
  (`Difference.cells_se`). The interval is then too wide, not too narrow.

The interval does not cover training seeds. A sweep over `train.seed` shows how much these matter.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

from cellmill.runs.results import TOLERANCE, DatasetResult, Difference, TaskResult

CONFIDENCE = 0.95  # confidence level of the intervals


@dataclass(frozen=True)
class TaskScore:
    """Score of a run's best row in one task."""

    value: float  # value of the metric
    # value in each repetition; None for a repetition that tested no unit. Empty if the file has no
    # repetitions.
    repetitions: Sequence[float | None]
    # standard error over units of the difference from the best baseline; None if unknown
    units_se: float | None
    n_units: int | None = None  # number of units; None if the file does not count them
    # describes cells, seed and options; two runs with equal texts have paired repetitions
    pairing: str = ""


TaskAndMetric = tuple[str, str]
"""Key of a task, and the metric that ranks the rows of the task."""
Scores = dict[TaskAndMetric, TaskScore]
"""Scores of a run by task and metric."""


class NotableDifference(NamedTuple):
    """A notable difference between two runs in a task."""

    value: float  # first run minus second run, in the metric of the task
    has_interval: bool  # False if the files do not suffice to estimate an interval


class TaskWin(NamedTuple):
    """A task in which a run is notably better than the leader."""

    run: str
    task: str
    difference: NotableDifference  # `run` minus the leader


@dataclass(frozen=True)
class Ranking:
    """Ranking of the runs of one dataset. Runs are given by name.

    If the runs share no task, all fields have their defaults.
    """

    n_runs: int = 0
    # True if the repetitions of all runs are paired in each shared task
    has_paired_runs: bool = False
    # tasks in which all runs have a score in the same metric
    shared_tasks: list[str] = field(default_factory=list)
    leader: str | None = None  # the run with the highest mean score
    tied: list[str] = field(default_factory=list)  # runs tied with the leader, without the leader
    wins_over_leader: list[TaskWin] = field(default_factory=list)
    # True if every other run is notably worse than the leader in some task, by a difference with an
    # interval
    is_clear: bool = False


def score_tasks(dataset_result: DatasetResult, options: Mapping[str, Any]) -> Scores:
    """Find the scores of one run on one dataset.

    A task has no score if no metric ranks its rows, or if it has no row of the model. `options` is
    section `evaluate` of the run.
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
            # the key is called cells_se because units are mostly cells
            units_se=None if difference is None else difference.cells_se,
            n_units=None if difference is None else difference.n,
            pairing=str([cells, options.get("seed"), options.get("folds"), task_options]),
        )
    return scores


def _find_difference(result: TaskResult, metric: str, method: str) -> Difference | None:
    """Find the difference between a method and the best baseline in `metric`.

    If the task has no baseline, find the method's difference with the largest standard error over
    units. Return None if the file has no such difference.
    """
    baseline = result.best_baseline(metric)
    differences = []
    for difference in result.differences:
        is_of_method = difference.column == metric and difference.compared == method
        if is_of_method and (baseline is None or difference.against == baseline.method.name):
            differences.append(difference)
    return max(differences, key=lambda difference: difference.cells_se, default=None)


def rank_runs(scores_by_run: Mapping[str, Scores]) -> Ranking:
    """Rank the runs of one dataset over the tasks in which all have a score in the same metric.

    Runs are given by name. Tasks are in the order of the first run.
    """
    first_scores, *other_scores = scores_by_run.values()
    shared_keys = [key for key in first_scores if all(key in scores for scores in other_scores)]
    if not shared_keys:
        return Ranking()

    # the run with the highest mean score leads
    mean_by_run = {
        run: statistics.fmean([scores[key].value for key in shared_keys])
        for run, scores in scores_by_run.items()
    }
    leader = max(mean_by_run, key=mean_by_run.__getitem__)

    # compare each other run with the leader
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
    # the lead is clear if every other run is worse in a task, by a difference with an interval
    is_clear = all(
        any(difference.value < 0 and difference.has_interval for difference in differences.values())
        for differences in differences_by_run.values()
    )

    # all runs are paired if their texts on pairing are equal
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
    """Find the notable differences of a run from the leader (run minus leader), by task and metric."""
    differences = {}
    for key in shared_keys:
        difference = find_notable_difference(scores[key], leader_scores[key])
        if difference is not None:
            differences[key] = difference
    return differences


def find_notable_difference(score: TaskScore, other: TaskScore) -> NotableDifference | None:
    """Compute the difference of two runs in a task, `score` minus `other`; None if it is not notable.

    The docstring of the module defines notable differences.
    """
    difference = score.value - other.value
    half_width = _compute_half_width(score, other)
    contains_zero = half_width is not None and abs(difference) <= half_width
    if abs(difference) < TOLERANCE or contains_zero:
        return None
    return NotableDifference(difference, has_interval=half_width is not None)


def _list_paired_differences(score: TaskScore, other: TaskScore) -> list[float]:
    """List the differences of two runs, `score` minus `other`, by repetition.

    Repetitions in which one of the runs tested no unit are left out. The list is empty if the runs
    are not paired, or if they have different numbers of repetitions.
    """
    if score.pairing != other.pairing:
        return []
    if len(score.repetitions) != len(other.repetitions):
        return []
    pairs = zip(score.repetitions, other.repetitions)
    return [a - b for a, b in pairs if a is not None and b is not None]


def _compute_half_width(score: TaskScore, other: TaskScore) -> float | None:
    """Compute half the width of the 95 % interval of the difference of two runs.

    Return None if there is no interval, in one of three cases:

    - There are fewer than two pairs of repetitions.
    - No standard error over units is known.
    - Nothing varies, neither the difference over repetitions nor the scores over units.
    """
    differences = _list_paired_differences(score, other)
    n_repetitions = len(differences)
    known_errors = [
        (one.units_se, one.n_units) for one in (score, other) if one.units_se is not None
    ]
    if n_repetitions < 2 or not known_errors:
        return None

    # the variance of the difference is the sum of two terms, from repetitions and from units
    repetitions_variance = statistics.variance(differences) / n_repetitions
    units_se, n_units = max(known_errors, key=lambda error: error[0])
    units_variance = units_se**2
    variance = repetitions_variance + units_variance
    if variance == 0:
        return None

    # Degrees of freedom of the sum of both variances, by Satterthwaite's formula. An unknown number
    # of units counts as infinite.
    divisor = repetitions_variance**2 / (n_repetitions - 1)
    if n_units is not None:
        divisor += units_variance**2 / max(n_units - 1, 1)
    degrees_of_freedom = variance**2 / divisor if divisor else math.inf

    # scipy is imported here because a page of one run does not need it
    stdtrit = import_module("scipy.special").stdtrit
    return float(stdtrit(degrees_of_freedom, (1 + CONFIDENCE) / 2)) * variance**0.5
