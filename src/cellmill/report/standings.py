"""Standings of runs on datasets: which run leads, and how runs compare with the baselines."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cellmill.report.collect import ReportedRun, RunOnDataset, list_results
from cellmill.report.ranking import Ranking, Scores, rank_runs, score_tasks
from cellmill.report.tables import to_words
from cellmill.runs.results import Outcome, Row, TaskResult, Verdict

OUTCOMES: tuple[Outcome, ...] = ("ahead", "level", "behind")
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


@dataclass(frozen=True)
class Standing:
    """A run on one dataset: its best row of one task, and verdicts of all tasks.

    The task is probe, or else the first task that all runs of the dataset have. If they share none,
    it is the run's own first task.
    """

    run: ReportedRun
    dataset: str
    task: str
    result: TaskResult  # of this task
    row: Row  # the run's best one
    baseline: Row | None  # the best baseline of the task
    verdict: Verdict | None  # verdict of the row against the baseline; None if there is none
    verdicts: Sequence[TaskVerdict]  # verdicts of all tasks against their best baselines
    ranking: Ranking  # runs of the dataset
    n_runs: int  # runs of the dataset
    differs_in_steps: bool  # the runs of the dataset were trained for different numbers of steps

    @property
    def is_leader(self) -> bool:
        """True if the run has the highest mean on the dataset, or is tied with that run."""
        return self.run.name in self.ranking.leaders

    @property
    def leads_clearly(self) -> bool:
        """True if the run leads by more than the interval between runs, all of equally many steps."""
        is_clear = self.ranking.is_clear and self.n_runs > 1 and not self.differs_in_steps
        return is_clear and self.is_leader

    @property
    def outcomes(self) -> dict[str, int]:
        """Number of verdicts by outcome. Undecided verdicts count in none."""
        return {outcome: self.count(outcome) for outcome in OUTCOMES}

    def count(self, outcome: Outcome) -> int:
        """Number of verdicts with an outcome."""
        return sum(entry.verdict.outcome == outcome for entry in self.verdicts)

    def describe_tasks(self, outcome: str) -> str:
        """The tasks with verdicts of this outcome, each with its largest difference, in words."""
        by_task: dict[str, list[Verdict]] = {}
        for task, verdict, _ in self.verdicts:
            if verdict.outcome == outcome:
                by_task.setdefault(task, []).append(verdict)
        parts = []
        for task, verdicts in by_task.items():
            largest = max(verdicts, key=lambda verdict: abs(verdict.difference))
            more = f" and {len(verdicts) - 1} more" if len(verdicts) > 1 else ""
            parts.append(f"{to_words(task)}: {largest.metric} ({largest.difference:+.3f}){more}")
        return "; ".join(parts)


def list_standings(runs: Sequence[ReportedRun]) -> list[Standing]:
    """Standing of each run on each dataset where one of its tasks has a metric."""
    scores_by_dataset: dict[str, dict[str, Scores]] = {}  # then by run
    for run, dataset, results in list_results(runs):
        scores = score_tasks(results)
        if scores:
            scores_by_dataset.setdefault(dataset, {})[run.name] = scores
    rankings = {dataset: rank_runs(by_run) for dataset, by_run in scores_by_dataset.items()}
    steps = {run.name: run.status and run.status.step for run in runs}
    standings = []
    for evaluated in list_results(runs):
        by_run = scores_by_dataset.get(evaluated.dataset, {})
        if evaluated.run.name in by_run:
            differs_in_steps = len({steps[name] for name in by_run}) > 1
            ranking = rankings[evaluated.dataset]
            standings.append(_make_standing(evaluated, ranking, len(by_run), differs_in_steps))
    return standings


def _make_standing(
    evaluated: RunOnDataset, ranking: Ranking, n_runs: int, differs_in_steps: bool
) -> Standing:
    task = _choose_task(evaluated.results, ranking)
    result = evaluated.results[task]
    row = result.best_row("model")
    assert row is not None
    verdicts = _list_verdicts(evaluated.results)
    verdict = _find_verdict(verdicts, task, row, result.metric)
    return Standing(
        run=evaluated.run,
        dataset=evaluated.dataset,
        task=task,
        result=result,
        row=row,
        baseline=_find_baseline(result, verdict),
        verdict=verdict,
        verdicts=verdicts,
        ranking=ranking,
        n_runs=n_runs,
        differs_in_steps=differs_in_steps,
    )


def _choose_task(results: Mapping[str, TaskResult], ranking: Ranking) -> str:
    """The task that a run is judged by."""
    scored = [task for task, result in results.items() if result.best_row("model") is not None]
    comparable = ranking.tasks or scored
    return "probe" if "probe" in comparable else comparable[0]


def _find_baseline(result: TaskResult, verdict: Verdict | None) -> Row | None:
    """The baseline that `verdict` is against; without a verdict, the best one."""
    if verdict is None:
        return result.best_row("baseline")
    rows_by_name = {row.method.name: row for row in result.ranked_rows}
    return rows_by_name[verdict.against]


def _find_verdict(
    verdicts: Sequence[TaskVerdict], task: str, row: Row, metric: str | None
) -> Verdict | None:
    """The first verdict on a row of a task in `metric`."""
    for entry in verdicts:
        is_on_row = (entry.task, entry.verdict.compared) == (task, row.method.name)
        if is_on_row and metric in {entry.verdict.metric, *entry.columns}:
            return entry.verdict
    return None


def _list_verdicts(results: Mapping[str, TaskResult]) -> list[TaskVerdict]:
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


def list_verdict_sentences(
    runs: Sequence[ReportedRun], *outcomes: Outcome
) -> list[tuple[str, str]]:
    """(run, sentence) of verdicts with these outcomes; a sentence begins with its dataset."""
    sentences = []
    for run, dataset, results in list_results(runs):
        for result in results.values():
            for verdict in result.verdicts:
                if verdict.outcome in outcomes:
                    sentences.append((run.name, f"{dataset}: {verdict.sentence}"))
    return list(dict.fromkeys(sentences))  # tasks that see the same cells may share a sentence


def list_defeats(
    runs: Sequence[ReportedRun], standings: Sequence[Standing]
) -> list[tuple[str, str]]:
    """(run, sentence) on where a run is behind: one sentence for all best baselines of a dataset,
    then one for each verdict of a task that has no verdict against a best baseline.
    """
    defeats = []
    for standing in standings:
        n_behind = standing.count("behind")
        if n_behind:
            n = len(standing.verdicts)
            tasks = standing.describe_tasks("behind")
            defeats.append(
                (standing.run.name, f"{standing.dataset}: behind in {n_behind} of {n}: {tasks}.")
            )
    for run, dataset, results in list_results(runs):
        for result in results.values():
            for verdict in result.verdicts:
                if verdict.outcome == "behind" and not result.best_verdicts():
                    defeats.append((run.name, f"{dataset}: {verdict.sentence}"))
    return defeats
