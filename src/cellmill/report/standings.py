"""Standings of runs on datasets: the ranking, and each run's comparison with the best baselines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cellmill.report.collect import ReportedRun, list_results
from cellmill.report.ranking import Ranking, Scores, rank_runs, score_tasks
from cellmill.report.verdicts import TaskVerdict, list_verdicts
from cellmill.runs.results import DatasetResult, Outcome, Row, TaskResult, Verdict


@dataclass(frozen=True)
class Standing:
    """A run on one dataset: its best row in one task, and its verdicts in all tasks.

    The task is probe if all runs of the dataset have it, otherwise the first task that they share.
    If they share none, it is the run's own probe, otherwise its first scored task.
    """

    run: ReportedRun
    dataset_name: str
    task: str
    result: TaskResult  # the run's result of `task`
    metric: str  # ranks the rows of `result`
    best_row: Row  # the model's best row in `result`
    baseline: Row | None  # the best baseline in `result`; None if it has no baseline
    verdict: Verdict | None  # on `best_row` against `baseline`; None if the file has none
    verdicts: Sequence[TaskVerdict]  # in all tasks, against their best baselines
    ranking: Ranking  # of all runs of the dataset
    # numbers of steps of these runs; None is an unknown number
    distinct_steps: frozenset[int | None]

    @property
    def is_leader_or_tied(self) -> bool:
        """True if the run has the highest mean score, or is tied with the run that has."""
        return self.run.name in (self.ranking.leader, *self.ranking.tied)

    @property
    def is_called_best(self) -> bool:
        """True if the run leads, and the page may call it the best of several runs.

        The lead must be clear, and all runs must be paired and have been trained for the same known
        number of steps.
        """
        has_equal_steps = len(self.distinct_steps) == 1 and None not in self.distinct_steps
        is_clear = (
            self.ranking.n_runs > 1 and self.ranking.has_paired_runs and self.ranking.is_clear
        )
        return self.is_leader_or_tied and is_clear and has_equal_steps

    def count_verdicts(self, outcome: Outcome) -> int:
        """Number of verdicts with this outcome."""
        return sum(entry.verdict.outcome == outcome for entry in self.verdicts)


def list_standings(runs: Sequence[ReportedRun]) -> list[Standing]:
    """Standing of each run on each dataset.

    A run has no standing on a dataset where no task ranks its methods by a metric.
    """
    scores_by_dataset: dict[str, dict[str, Scores]] = {}  # by dataset, then by run
    for run, dataset_name, dataset_result in list_results(runs):
        assert run.evaluation is not None
        scores = score_tasks(dataset_result, run.evaluation.options)
        if scores:
            scores_by_dataset.setdefault(dataset_name, {})[run.name] = scores
    rankings = {name: rank_runs(by_run) for name, by_run in scores_by_dataset.items()}
    step_by_run = {run.name: run.status.step if run.status else None for run in runs}
    standings = []
    for run, dataset_name, dataset_result in list_results(runs):
        ranked_names = scores_by_dataset.get(dataset_name, {})
        if run.name in ranked_names:
            ranking = rankings[dataset_name]
            distinct_steps = frozenset(step_by_run[name] for name in ranked_names)
            standings.append(
                _make_standing(run, dataset_name, dataset_result, ranking, distinct_steps)
            )
    return standings


def _make_standing(
    run: ReportedRun,
    dataset_name: str,
    dataset_result: DatasetResult,
    ranking: Ranking,
    distinct_steps: frozenset[int | None],
) -> Standing:
    """Standing of a run that is in `ranking`, with its comparison with the best baselines."""
    task = _choose_task(dataset_result.tasks, ranking)
    result = dataset_result.tasks[task]
    best_row = result.best_row("model")
    # `_choose_task` returns only tasks with a metric and a row of the model
    assert best_row is not None
    assert result.metric is not None
    verdict = result.find_verdict(result.metric)
    # a verdict on another row of the model does not fit the score of the best row
    if verdict is not None and verdict.compared != best_row.method.name:
        verdict = None
    return Standing(
        run=run,
        dataset_name=dataset_name,
        task=task,
        result=result,
        metric=result.metric,
        best_row=best_row,
        baseline=result.best_baseline(result.metric),
        verdict=verdict,
        verdicts=list_verdicts(dataset_result.tasks),
        ranking=ranking,
        distinct_steps=distinct_steps,
    )


def _choose_task(results: Mapping[str, TaskResult], ranking: Ranking) -> str:
    """The task by which a run is judged: probe, otherwise the first task.

    Only tasks that all runs share count. If they share none, the run's scored tasks count.
    """
    scored = [task for task, result in results.items() if result.best_row("model") is not None]
    comparable = ranking.shared_tasks or scored
    return "probe" if "probe" in comparable else comparable[0]
