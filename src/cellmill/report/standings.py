"""Standings of runs on datasets.

A standing says how a run ranks among the runs of a dataset, and how it compares with the best
baselines.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cellmill.report.collect import ReportedRun, list_results
from cellmill.report.ranking import Ranking, Scores, rank_runs, score_tasks
from cellmill.report.schemas import StatusSchema
from cellmill.report.verdicts import TaskVerdict, list_verdicts
from cellmill.runs.results import DatasetResult, Outcome, Row, TaskResult, Verdict


@dataclass(frozen=True)
class Standing:
    """How a run stands on one dataset, by its best row in one task and its verdicts in all tasks.

    The run is judged by task probe if all runs of the dataset have a score in probe. Otherwise the
    run is judged by the first task in which all runs have a score. If the runs share no task, the
    run is judged by its own probe, or else by the first task in which it has a score.
    """

    run: ReportedRun
    dataset_name: str
    task: str  # key in metrics.json of the task by which the run is judged
    result: TaskResult  # the run's result of `task`
    metric: str  # metric that ranks the rows of `result`
    best_row: Row  # the model's best row in `result`
    baseline: Row | None  # the best baseline in `result`; None if it has no baseline
    # comparison of `best_row` with `baseline`; None if the file has no verdict on `best_row`
    verdict: Verdict | None
    verdicts: Sequence[TaskVerdict]  # the run's verdicts against best baselines, in all tasks
    ranking: Ranking  # ranking of all runs of the dataset
    # distinct numbers of training steps of all runs of the dataset; None for an unknown number
    step_counts: frozenset[int | None]

    @property
    def is_leader_or_tied(self) -> bool:
        """True if the run has the highest mean score, or is tied with the run that has it."""
        return self.run.name in (self.ranking.leader, *self.ranking.tied)

    @property
    def is_called_best(self) -> bool:
        """True if the run leads, and the page may call it the best of several runs.

        The page may do so if all runs are paired, the lead is clear, and all runs were trained for
        the same known number of steps.
        """
        if not self.is_leader_or_tied or self.ranking.n_runs < 2:
            return False
        has_equal_steps = len(self.step_counts) == 1 and None not in self.step_counts
        return self.ranking.has_paired_runs and self.ranking.is_clear and has_equal_steps

    def count_verdicts(self, outcome: Outcome) -> int:
        """Count the verdicts with this outcome."""
        return sum(entry.verdict.outcome == outcome for entry in self.verdicts)


def list_standings(runs: Sequence[ReportedRun]) -> list[Standing]:
    """List the standing of each run on each dataset.

    A run has no standing on a dataset if it has no score there. A run has a score in a task if a
    metric ranks the rows of the task, and one of the rows is of the model.
    """
    # rank the runs of each dataset
    scores_by_dataset: dict[str, dict[str, Scores]] = {}  # by dataset, then by run
    for run, dataset_name, dataset_result in list_results(runs):
        assert run.evaluation is not None
        scores = score_tasks(dataset_result, run.evaluation.options)
        if scores:
            scores_by_dataset.setdefault(dataset_name, {})[run.name] = scores
    ranking_by_dataset = {
        dataset_name: rank_runs(scores_by_run)
        for dataset_name, scores_by_run in scores_by_dataset.items()
    }

    # join the ranking with the results of each run
    step_by_run = {run.name: (run.status or StatusSchema()).step for run in runs}
    standings = []
    for run, dataset_name, dataset_result in list_results(runs):
        scores_by_run = scores_by_dataset.get(dataset_name, {})
        if run.name in scores_by_run:
            ranking = ranking_by_dataset[dataset_name]
            step_counts = frozenset(step_by_run[name] for name in scores_by_run)
            standings.append(
                _make_standing(run, dataset_name, dataset_result, ranking, step_counts)
            )
    return standings


def _make_standing(
    run: ReportedRun,
    dataset_name: str,
    dataset_result: DatasetResult,
    ranking: Ranking,
    step_counts: frozenset[int | None],
) -> Standing:
    """Make the standing of a run that is in `ranking`."""
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
        step_counts=step_counts,
    )


def _choose_task(results: Mapping[str, TaskResult], ranking: Ranking) -> str:
    """Choose the task by which a run is judged. It is probe, or else the first of the candidates.

    The candidates are the tasks in which all runs have a score. If the runs share no task, the
    candidates are the tasks in which this run has a score.
    """
    scored = [task for task, result in results.items() if result.best_row("model") is not None]
    candidates = ranking.shared_tasks or scored
    return "probe" if "probe" in candidates else candidates[0]
