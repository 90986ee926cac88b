"""Standings of runs on datasets: a run's rank, and its comparison with the best baselines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cellmill.report.collect import ReportedRun, list_results
from cellmill.report.ranking import Ranking, Scores, rank_runs, score_tasks
from cellmill.report.verdicts import TaskVerdict, list_verdicts
from cellmill.runs.results import Outcome, Row, TaskResult, Verdict


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
    best_row: Row  # the model's best row in `result`
    baseline: Row | None  # the best baseline in `result`; None if it has no baseline
    verdict: Verdict | None  # on `best_row` against `baseline`; None if the file has none
    verdicts: Sequence[TaskVerdict]  # in all tasks, against their best baselines
    ranking: Ranking  # of all runs of the dataset
    n_runs: int  # runs in `ranking`
    # distinct numbers of steps of these runs; it contains None if one is unknown
    steps: frozenset[int | None]
    has_equal_cells: bool  # True if these runs were scored on the same cells

    @property
    def is_leader(self) -> bool:
        """True if the run has the highest mean score, or is tied with the run that has."""
        return self.run.name in self.ranking.leaders

    @property
    def is_called_best(self) -> bool:
        """True if the run leads, and the page may call it the best of several runs.

        The lead must be clear, and all runs must have been trained for the same known number of
        steps. Equal cells need no test: without them no lead is clear.
        """
        has_equal_steps = len(self.steps) == 1 and None not in self.steps
        return self.is_leader and self.n_runs > 1 and self.ranking.is_clear and has_equal_steps

    def count(self, outcome: Outcome) -> int:
        """Number of verdicts with this outcome."""
        return sum(entry.verdict.outcome == outcome for entry in self.verdicts)


def list_standings(runs: Sequence[ReportedRun]) -> list[Standing]:
    """Standing of each run on each dataset.

    A run has no standing on a dataset where no task ranks its methods by a metric.
    """
    # rank the runs of each dataset, then compare each run with its baselines
    scores_by_dataset: dict[str, dict[str, Scores]] = {}  # by dataset, then by run
    # distinct `DatasetResult.scored` of the runs
    scored_cells_by_dataset: dict[str, set[tuple[str, int]]] = {}
    for run, dataset_name, dataset_result in list_results(runs):
        scores = score_tasks(dataset_result)
        if scores:
            scored_cells_by_dataset.setdefault(dataset_name, set()).add(dataset_result.scored)
            scores_by_dataset.setdefault(dataset_name, {})[run.name] = scores
    rankings = {name: rank_runs(by_run) for name, by_run in scores_by_dataset.items()}
    step_by_run = {run.name: run.status.step if run.status else None for run in runs}
    standings = []
    for run, dataset_name, dataset_result in list_results(runs):
        ranked_runs = scores_by_dataset.get(dataset_name, {})
        if run.name not in ranked_runs:
            continue
        ranking = rankings[dataset_name]
        task = _choose_task(dataset_result.tasks, ranking)
        result = dataset_result.tasks[task]
        best_row = result.best_row("model")
        # `_choose_task` returns only tasks with a row of the model
        assert best_row is not None
        verdict = result.find_verdict(result.metric or "")
        # a verdict on another row of the model does not fit the score of the best row
        if verdict is not None and verdict.compared != best_row.method.name:
            verdict = None
        standing = Standing(
            run=run,
            dataset_name=dataset_name,
            task=task,
            result=result,
            best_row=best_row,
            baseline=result.best_baseline(result.metric or ""),
            verdict=verdict,
            verdicts=list_verdicts(dataset_result.tasks),
            ranking=ranking,
            n_runs=len(ranked_runs),
            steps=frozenset(step_by_run[run_name] for run_name in ranked_runs),
            has_equal_cells=len(scored_cells_by_dataset[dataset_name]) == 1,
        )
        standings.append(standing)
    return standings


def _choose_task(results: Mapping[str, TaskResult], ranking: Ranking) -> str:
    """The task by which a run is judged: probe, otherwise the first task.

    Only tasks that all runs share count. If they share none, the run's scored tasks count.
    """
    scored = [task for task, result in results.items() if result.best_row("model") is not None]
    comparable = ranking.shared_tasks or scored
    return "probe" if "probe" in comparable else comparable[0]
