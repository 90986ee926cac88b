"""Standings of runs on datasets: which run is best, and how runs compare with the baselines."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cellmill.report.collect import EvaluatedDataset, ReportedRun, evaluated_datasets
from cellmill.report.ranking import Ranking, Scores, rank, score_tasks
from cellmill.report.tables import to_words
from cellmill.runs.results import Row, TaskResult, Verdict


class TaskVerdict(NamedTuple):
    """Verdict against the best baseline in one metric of a task."""

    task: str
    verdict: Verdict
    columns: set[str]  # columns of the task's table that have the verdict's difference


@dataclass(frozen=True)
class Standing:
    """A run on one dataset: its best row of the first task that all runs have, and verdicts against
    baselines.
    """

    run: str
    dataset: str
    task: str
    result: TaskResult
    row: Row
    baseline: Row | None  # the best baseline of the task
    difference: Verdict | None  # verdict of the row against the baseline; None if there is none
    verdicts: Sequence[TaskVerdict]  # verdicts of all tasks
    ranking: Ranking  # runs of the dataset
    n_runs: int  # runs of the dataset

    @property
    def is_best(self) -> bool:
        """True if the run is the best on the dataset, or tied with it."""
        return self.run in self.ranking.best

    @property
    def comparison_phrase(self) -> str:
        """The tasks that the dataset's runs are compared over, in words; empty for a single run."""
        if self.n_runs == 1 or not self.ranking.tasks:
            return ""
        tasks = ", ".join(map(to_words, self.ranking.tasks))
        noun = "task" if len(self.ranking.tasks) == 1 else "tasks"
        return f"over the {noun} that all have ({tasks})"

    @property
    def leads_sentence(self) -> str:
        """Tasks in which another run is better than the best run, in words; empty without any."""
        parts = []
        for lead in self.ranking.ahead:
            parts.append(f"{lead.run} in {to_words(lead.task)} (+{lead.difference:.3f})")
        if not parts:
            return ""
        return f"Better than it, beyond the interval between runs: {', '.join(parts)}."

    @property
    def outcomes(self) -> dict[str, int]:
        """Number of verdicts by outcome."""
        tally = Counter(line.verdict.outcome for line in self.verdicts)
        return {"ahead": tally["ahead"], "level": tally["level"], "behind": tally["behind"]}

    def tasks_with(self, outcome: str) -> str:
        """The tasks with verdicts of this outcome, in words, each with its largest difference."""
        by_task: dict[str, list[Verdict]] = {}
        for line in self.verdicts:
            if line.verdict.outcome == outcome:
                by_task.setdefault(line.task, []).append(line.verdict)
        parts = []
        for task, verdicts in by_task.items():
            largest = max(verdicts, key=lambda verdict: abs(verdict.difference))
            more = f" and {len(verdicts) - 1} more" if len(verdicts) > 1 else ""
            parts.append(f"{to_words(task)}: {largest.metric} ({largest.difference:+.3f}){more}")
        return "; ".join(parts)


def list_standings(runs: Sequence[ReportedRun]) -> list[Standing]:
    """Standing of each run on each dataset where one of its tasks has a metric."""
    scores: dict[str, dict[str, Scores]] = {}  # keys are the dataset and the run
    for evaluated in evaluated_datasets(runs):
        task_scores = score_tasks(evaluated.result.tasks)
        if task_scores:
            scores.setdefault(evaluated.name, {})[evaluated.run.name] = task_scores
    rankings = {name: rank(by_run) for name, by_run in scores.items()}
    standings = []
    for evaluated in evaluated_datasets(runs):
        by_run = scores.get(evaluated.name, {})
        if evaluated.run.name in by_run:
            standings.append(_find_standing(evaluated, rankings[evaluated.name], len(by_run)))
    return standings


def _find_standing(evaluated: EvaluatedDataset, ranking: Ranking, n_runs: int) -> Standing:
    tasks = evaluated.result.tasks
    rows = {task: result.best_row("model") for task, result in tasks.items()}
    comparable = ranking.tasks or [task for task, row in rows.items() if row is not None]
    task = "probe" if "probe" in comparable else comparable[0]
    result = tasks[task]
    row = rows[task]
    assert row is not None
    verdicts = _list_verdicts(tasks)
    difference = _find_verdict(verdicts, task, row, result.metric)
    baseline = result.best_row("baseline")
    if difference is not None:
        rows_by_name = {ranked.method.name: ranked for ranked in result.ranked_rows}
        baseline = rows_by_name[difference.against]
    return Standing(
        run=evaluated.run.name,
        dataset=evaluated.name,
        task=task,
        result=result,
        row=row,
        baseline=baseline,
        difference=difference,
        verdicts=verdicts,
        ranking=ranking,
        n_runs=n_runs,
    )


def _find_verdict(
    verdicts: Sequence[TaskVerdict], task: str, row: Row, metric: str | None
) -> Verdict | None:
    """The first verdict on a row of a task in `metric`."""
    for line in verdicts:
        is_of_row = (line.task, line.verdict.compared) == (task, row.method.name)
        if is_of_row and metric in {line.verdict.metric, *line.columns}:
            return line.verdict
    return None


def _list_verdicts(tasks: Mapping[str, TaskResult]) -> list[TaskVerdict]:
    """Verdicts against the best baselines. Tasks that see the same cells may share a verdict: it is
    listed once, for the first of them.
    """
    lines: dict[Hashable, TaskVerdict] = {}
    for task, result in tasks.items():
        for verdict, columns in result.best_verdicts().items():
            comparison = (verdict.compared, verdict.against, verdict.metric, verdict.difference)
            lines.setdefault(comparison, TaskVerdict(task, verdict, columns))
    return list(lines.values())


def list_unscored(runs: Sequence[ReportedRun]) -> list[str]:
    """Sentences about evaluations in which every task was skipped."""
    sentences = []
    for evaluated in evaluated_datasets(runs):
        tasks = evaluated.result.tasks
        reasons = {to_words(task): result.skipped for task, result in tasks.items()}
        if None in reasons.values():
            continue
        skipped = "; ".join(f"{task}: {reason}" for task, reason in reasons.items())
        sentences.append(
            f"{evaluated.run.name} on {evaluated.name}: nothing was scored, all {len(reasons)} "
            f"tasks were skipped ({skipped or 'none is configured'})"
        )
    return sentences


def list_comparisons(run: ReportedRun, outcomes: Sequence[str]) -> list[str]:
    """Sentences of the run's comparisons with these outcomes, each after its dataset's name."""
    sentences = []
    for outcome in outcomes:
        for evaluated in evaluated_datasets([run]):
            for task in evaluated.result.tasks.values():
                for verdict in task.verdicts:
                    if verdict.outcome == outcome:
                        sentences.append(f"{evaluated.name}: {verdict.sentence}")
    return list(dict.fromkeys(sentences))  # tasks that see the same cells may share a sentence
