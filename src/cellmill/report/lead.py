"""Sentences at the top of the page: the best run on each dataset, and what to change next."""

from collections.abc import Sequence
from dataclasses import dataclass

from cellmill.report.advice import advise
from cellmill.report.collect import ReportedRun, list_results
from cellmill.report.standings import Standing
from cellmill.report.tables import find_gap, to_words

RELATIONS = {
    "ahead": "ahead of",
    "behind": "behind",
    "level": "level with",
    "undecided": "undecided against",
}


@dataclass(frozen=True)
class DatasetLead:
    """The best run on a dataset, in words. Of runs that are tied for best, the first is described."""

    standing: Standing  # of the described run
    names: str  # the best run, or all that are tied
    is_tied: bool

    @property
    def subject(self) -> str:
        """The described run, as the subject of a sentence."""
        return self.standing.run.name if self.is_tied else "the run"

    @property
    def phrase(self) -> str:
        """The phrase after the names: what they are best in."""
        relation = "on"
        if self.is_tied:
            relation = "are tied for best on"
        elif self.standing.n_runs > 1:
            relation = "is best on"
        phrase = f"{relation} {self.standing.dataset}"
        tasks = self.standing.ranking.tasks
        if self.standing.n_runs > 1 and tasks:
            noun = "task" if len(tasks) == 1 else "tasks"
            phrase += f" over the {noun} that all have ({', '.join(map(to_words, tasks))})"
        return phrase

    @property
    def score_sentence(self) -> str:
        """The score of the described run, and the gap that it closes."""
        standing = self.standing
        metric = standing.result.metric or ""
        score = f"{standing.result.rank_value(standing.row):.3f}"
        sd = standing.row.sd(metric)
        if sd:
            score += f" ± {sd:.3f}"
        sentence = f"{self.subject} has " if self.is_tied else ""
        sentence += f"{to_words(standing.task)} {to_words(metric)} {score}"
        sentence += f" ({standing.row.method.name})"
        gap = find_gap(standing.result)
        if gap is not None:
            sentence += f"; {gap.words}" if gap.model is None else f", which {gap.words}"
        return f"{sentence}."

    @property
    def verdict_sentence(self) -> str:
        """How the described run compares with the best baseline; empty without a baseline."""
        baseline = self.standing.baseline
        verdict = self.standing.verdict
        if baseline is None:
            return ""
        name = baseline.method.name
        score = f"{self.standing.result.rank_value(baseline):.3f}"
        if verdict is None:
            return f"The best baseline, {name}, has {score}."
        subject = self.subject if self.is_tied else "The run"
        interval = ""
        if verdict.interval is not None:
            interval = ", 95 % interval {:+.3f} to {:+.3f}".format(*verdict.interval)
        return (
            f"{subject} is {RELATIONS[verdict.outcome]} the best baseline, {name} ({score}): "
            f"{verdict.difference:+.3f}{interval}."
        )

    @property
    def comparisons_sentence(self) -> str:
        """The tasks where the described run is ahead and behind; empty without comparisons."""
        standing = self.standing
        n = len(standing.verdicts)
        if n == 0:
            return ""
        noun = "comparison" if n == 1 else "comparisons"
        parts = []
        for outcome in ("ahead", "behind"):
            n_verdicts = standing.outcomes[outcome]
            tasks = f" ({standing.describe_tasks(outcome)})" if n_verdicts else ""
            parts.append(f"{outcome} in {n_verdicts or 'none'}{tasks}")
        return (
            f"In {n} {noun} with the best baseline of a metric, {self.subject} is {' and '.join(parts)}, beyond the "
            "95 % interval."
        )

    @property
    def better_sentence(self) -> str:
        """Tasks in which another run is better than the best run; empty without any."""
        ranking = self.standing.ranking
        runs = [f"{run} in {to_words(task)} (+{size:.3f})" for run, task, size in ranking.better]
        if not runs:
            return ""
        return f"Better than {ranking.best[0]} in one task, by more than the interval between runs: {', '.join(runs)}."


def list_leads(standings: Sequence[Standing]) -> list[DatasetLead]:
    """The lead of each dataset with a best run."""
    best: dict[str, list[Standing]] = {}
    for standing in standings:
        if standing.is_best:
            best.setdefault(standing.dataset, []).append(standing)
    leads = []
    for tied in best.values():
        names = " and ".join(standing.run.name for standing in tied)
        leads.append(DatasetLead(tied[0], names, len(tied) > 1))
    return leads


def count_missing(runs: Sequence[ReportedRun]) -> str:
    """Sentence that names the runs that were not evaluated; empty if all were."""
    missing = [run.name for run in runs if run.evaluation is None]
    if not missing:
        return ""
    noun = "run" if len(runs) == 1 else "runs"
    verb = "has" if len(missing) == 1 else "have"
    return f"{len(missing)} of {len(runs)} {noun} {verb} no result: {', '.join(missing)}"


def list_unscored(runs: Sequence[ReportedRun]) -> list[str]:
    """Sentences about evaluations in which every task was skipped."""
    sentences = []
    for run, dataset, result in list_results(runs):
        reasons = {to_words(task): outcome.skipped for task, outcome in result.tasks.items()}
        if None in reasons.values():
            continue
        skipped = "; ".join(f"{task}: {reason}" for task, reason in reasons.items())
        sentences.append(
            f"{run.name} on {dataset}: nothing was scored, all {len(reasons)} tasks were skipped "
            f"({skipped or 'none is configured'})."
        )
    return sentences


def list_next_steps(standings: Sequence[Standing]) -> dict[str, list[str]]:
    """The most urgent advice for each best run: names of runs by advice."""
    best = {standing.run.name: standing.run for standing in standings if standing.is_best}
    next_steps: dict[str, list[str]] = {}
    for name, run in best.items():
        outcomes: list[str] = []
        for standing in standings:
            if standing.run.name == name:
                outcomes += [outcome for outcome, n in standing.outcomes.items() if n]
        sentence = next(advise(run, outcomes), None)
        if sentence is not None:
            next_steps.setdefault(sentence, []).append(name)
    return next_steps
