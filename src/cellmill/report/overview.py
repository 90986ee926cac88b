"""Sentences of the overview, the first section of the page.

The sentences say which runs have no result and which run leads on each dataset. They say how the
leading run compares with the baselines, where runs are behind, and what to change next.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cellmill.report.advice import find_advice
from cellmill.report.collect import ReportedRun, list_results
from cellmill.report.ranking import Ranking
from cellmill.report.standings import Standing
from cellmill.report.task_table import find_gap
from cellmill.report.text import to_words, with_noun
from cellmill.report.verdicts import TaskVerdict, list_verdicts
from cellmill.runs.results import Gap, Outcome, Row, Verdict

RELATIONS: dict[Outcome, str] = {
    "ahead": "ahead of",
    "level": "level with",
    "behind": "behind",
    "undecided": "undecided against",
}
"""Words between the names of a run and a baseline, by outcome.

The outcomes are in the order in which sentences, and the table of standings, list them.
"""
# Phrases in the sentences about runs that are better than the leader in single tasks. They say if
# the differences have an interval.
WITH_INTERVAL = "with a 95 % interval above 0"
WITHOUT_INTERVAL = (
    "without an interval, because there are fewer than two paired repetitions, the error over units is unknown, or "
    "nothing varies"
)


@dataclass(frozen=True)
class DatasetHeadline:
    """Sentences about the leader of a dataset. It is the run with the highest mean score.

    `names`, `claim` and `verdict` are the parts of one sentence, such as "A", "is best on D over the
    task that all have (probe):" and "ahead of the best baseline, PCA50 + kNN: 0.912 against 0.874
    (probe accuracy)."
    """

    standing: Standing  # standing of the leader
    names: str  # the leader, or the leader and all runs tied with it, joined by "and"
    claim: str
    verdict: str
    outcomes_sentence: str
    better_runs_sentence: str  # empty if no run is better than the leader in a task
    numbers_sentence: str
    gap: Gap | None  # gap from a trivial method to a ceiling in the metric; None if there is none


def list_headlines(standings: Sequence[Standing]) -> list[DatasetHeadline]:
    """Make the headline of each dataset that has a leader."""
    tied_by_dataset: dict[str, list[Standing]] = {}
    for standing in standings:
        if standing.is_leader_or_tied:
            tied_by_dataset.setdefault(standing.dataset_name, []).append(standing)
    return [_make_headline(tied) for tied in tied_by_dataset.values()]


def _make_headline(tied: Sequence[Standing]) -> DatasetHeadline:
    """Make the headline of a dataset. `tied` are its leader and all runs tied with the leader."""
    standing = next(entry for entry in tied if entry.run.name == entry.ranking.leader)
    return DatasetHeadline(
        standing=standing,
        names=" and ".join(entry.run.name for entry in tied),
        claim=f"{_describe_claim(standing, is_tied=len(tied) > 1)}:",
        verdict=f"{_describe_verdict(standing)}{standing.result.effort_mark}.",
        outcomes_sentence=_describe_outcomes(standing),
        better_runs_sentence=_describe_better_runs(standing.ranking),
        numbers_sentence=_describe_numbers(standing),
        gap=find_gap(standing.result),
    )


def _describe_claim(standing: Standing, is_tied: bool) -> str:
    """Describe the lead of a run: the dataset, the shared tasks, and how certain the lead is.

    The words follow the names of the leader and of the runs tied with it.
    """
    if standing.ranking.n_runs == 1:
        return f"on {standing.dataset_name}"
    tasks = standing.ranking.shared_tasks
    noun = "task" if len(tasks) == 1 else "tasks"
    shared = f"over the {noun} that all have ({', '.join(map(to_words, tasks))})"
    if is_tied:
        return f"cannot be told apart on {standing.dataset_name} {shared}; {standing.run.name} has the highest mean"
    if standing.is_called_best:
        return f"is best on {standing.dataset_name} {shared}"
    if not standing.ranking.has_paired_runs:
        caveat = "but the runs were not scored on the same cells and labels, with the same options"
    elif not standing.ranking.is_clear:
        caveat = "not shown to be beyond chance"
    elif None in standing.step_counts:
        caveat = "but not all numbers of training steps are known"
    else:
        caveat = "but the runs were trained for different numbers of steps"
    return f"has the highest mean on {standing.dataset_name} {shared}, {caveat}"


def _name_task_and_metric(standing: Standing) -> str:
    """The task by which a run is judged, and its metric, such as "probe accuracy"."""
    return to_words(f"{standing.task} {standing.metric}")


def _format_score(standing: Standing, row: Row) -> str:
    """Value of a row in the metric that ranks the rows, with three decimals."""
    return f"{standing.result.rank_value(row):.3f}"


def _describe_verdict(standing: Standing) -> str:
    """Describe how a run compares with the best baseline, with the scores of both."""
    metric = _name_task_and_metric(standing)
    score = _format_score(standing, standing.best_row)
    baseline = standing.baseline
    if baseline is None:
        return f"{metric} {score}, without a baseline"
    name = baseline.method.name
    baseline_score = _format_score(standing, baseline)
    if standing.verdict is None:
        return f"{metric} {score}; the best baseline, {name}, has {baseline_score}"
    relation = RELATIONS[standing.verdict.outcome]
    return f"{relation} the best baseline, {name}: {score} against {baseline_score} ({metric})"


def _describe_outcomes(standing: Standing) -> str:
    """Say in how many comparisons a run is ahead, level, behind and undecided.

    The sentence names the tasks in which the run is ahead or behind. It also says if the run is
    ahead or behind in none.
    """
    n_comparisons = len(standing.verdicts)
    if n_comparisons == 0:
        return "No task compares it with a baseline."
    parts = []
    for outcome in RELATIONS:
        n_verdicts = standing.count_verdicts(outcome)
        is_decided = outcome in ("ahead", "behind")
        if not (n_verdicts or is_decided):
            continue
        text = f"{outcome} in {n_verdicts or 'none'}"
        if n_verdicts and is_decided:
            text += f" ({_describe_tasks(standing.verdicts, outcome)})"
        parts.append(text)
    comparisons = with_noun(n_comparisons, "comparison")
    return f"Of {comparisons} with the best baseline of a metric: {', '.join(parts)}."


def _describe_numbers(standing: Standing) -> str:
    """Give the numbers of a run: its score, the difference from the best baseline, and the gap.

    The gap is left out if the task has none.
    """
    score = _format_score(standing, standing.best_row)
    sd = standing.best_row.sd(standing.metric)
    if sd is not None:
        score += f" ± {sd:.3f}"
    parts = [f"{_name_task_and_metric(standing)} {score}, {standing.best_row.method.name}"]
    verdict = standing.verdict
    if verdict is not None:
        difference = f"difference from the best baseline {verdict.difference:+.3f}"
        if verdict.interval is not None:
            difference += ", 95 % interval {:+.3f} to {:+.3f}".format(*verdict.interval)
        parts.append(difference)
    gap = find_gap(standing.result)
    if gap is not None:
        parts.append(gap.words)
    return "; ".join(parts) + "."


def _describe_better_runs(ranking: Ranking) -> str:
    """Name the runs that are better than the leader in single tasks. Empty if there are none.

    The first sentence has the differences with an interval, the second the differences without an
    interval.
    """
    # wins in words, by the phrase that their sentence has on intervals
    wins_by_phrase: dict[str, list[str]] = {WITH_INTERVAL: [], WITHOUT_INTERVAL: []}
    for win in ranking.wins_over_leader:
        phrase = WITH_INTERVAL if win.difference.has_interval else WITHOUT_INTERVAL
        words = f"{win.run} in {to_words(win.task)} (+{win.difference.value:.3f})"
        wins_by_phrase[phrase].append(words)
    return " ".join(
        f"Better than {ranking.leader} in single tasks, {phrase}: {', '.join(wins)}."
        for phrase, wins in wins_by_phrase.items()
        if wins
    )


def _describe_tasks(task_verdicts: Sequence[TaskVerdict], outcome: Outcome) -> str:
    """Name the tasks with a verdict of this outcome, each with its largest difference."""
    verdicts_by_task: dict[str, list[Verdict]] = {}
    for task, verdict in task_verdicts:
        if verdict.outcome == outcome:
            verdicts_by_task.setdefault(task, []).append(verdict)
    parts = []
    for task, verdicts in verdicts_by_task.items():
        largest = max(verdicts, key=lambda verdict: abs(verdict.difference))
        more = f" and {len(verdicts) - 1} more" if len(verdicts) > 1 else ""
        parts.append(f"{to_words(task)}: {largest.metric} {largest.difference:+.3f}{more}")
    return "; ".join(parts)


def describe_missing(runs: Sequence[ReportedRun]) -> str:
    """Name the runs without an evaluation in a sentence. Empty if there are no such runs."""
    missing = [run.name for run in runs if run.evaluation is None]
    if not missing:
        return ""
    verb = "has" if len(missing) == 1 else "have"
    return (
        f"{len(missing)} of {with_noun(len(runs), 'run')} {verb} no result: {', '.join(missing)}."
    )


def describe_unscored(runs: Sequence[ReportedRun]) -> list[str]:
    """Make a sentence for each run and dataset on which nothing was scored."""
    sentences = []
    for run, dataset_name, dataset_result in list_results(runs):
        results = dataset_result.tasks
        if any(result.skipped is None for result in results.values()):
            continue
        reasons = [f"{to_words(task)}: {result.skipped}" for task, result in results.items()]
        skipped = "; ".join(reasons)
        cause = f"every task was skipped ({skipped})" if reasons else "no task is configured"
        sentences.append(f"{run.name} on {dataset_name}: nothing was scored, because {cause}.")
    return sentences


def group_by_advice(runs: Sequence[ReportedRun]) -> dict[str, list[str]]:
    """Group the names of runs by the most urgent advice for each run.

    Advice for runs with a collapsed embedding comes first.
    """
    names_by_advice: dict[str, list[str]] = {}
    for run in sorted(runs, key=lambda run: not run.has_collapsed):
        outcomes: list[str] = []
        for _, _, dataset_result in list_results([run]):
            outcomes += [entry.verdict.outcome for entry in list_verdicts(dataset_result.tasks)]
        names_by_advice.setdefault(find_advice(run, outcomes), []).append(run.name)
    return names_by_advice


def list_verdict_sentences(
    runs: Sequence[ReportedRun], *outcomes: Outcome
) -> list[tuple[str, str]]:
    """List (name of the run, sentence) for each verdict with one of `outcomes`.

    A sentence begins with the dataset.
    """
    sentences = []
    for run, dataset_name, dataset_result in list_results(runs):
        for result in dataset_result.tasks.values():
            for verdict in result.verdicts:
                if verdict.outcome in outcomes:
                    sentences.append((run.name, f"{dataset_name}: {verdict.sentence}"))
    # two tasks on the same cells may have the same sentence, which is listed only once
    return list(dict.fromkeys(sentences))


def summarise_behind(runs: Sequence[ReportedRun]) -> list[tuple[str, str]]:
    """List (name of the run, sentence) that say where runs are behind.

    First comes a sentence for each run and dataset on which the run is behind a best baseline. Then
    come the tasks that have no verdict against a best baseline. For such a task, there is a sentence
    for each verdict "behind".
    """
    summaries = []
    further_sentences = []
    for run, dataset_name, dataset_result in list_results(runs):
        verdicts = list_verdicts(dataset_result.tasks)
        n_behind = sum(entry.verdict.outcome == "behind" for entry in verdicts)
        if n_behind:
            tasks = _describe_tasks(verdicts, "behind")
            comparisons = with_noun(len(verdicts), "comparison")
            sentence = f"{dataset_name}: behind in {n_behind} of {comparisons} ({tasks})."
            summaries.append((run.name, sentence))
        for result in dataset_result.tasks.values():
            if result.best_verdicts():
                continue
            for verdict in result.verdicts:
                if verdict.outcome == "behind":
                    further_sentences.append((run.name, f"{dataset_name}: {verdict.sentence}"))
    return summaries + list(dict.fromkeys(further_sentences))
