"""Overview: the best run, its difference from plain logistic regression, and its cost."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cellmill.report.collect import ReportedRun, outcomes_of
from cellmill.report.tables import TaskTable
from cellmill.runs.verdict import Outcome

SHOWN = ("ahead", "level", "behind")
REGRESSION = "all genes + logistic regression"


@dataclass(frozen=True)
class PairedDifference:
    """Paired difference from logistic regression on all genes, with its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def outcome(self) -> Outcome:
        return "ahead" if self.low > 0 else "behind" if self.high < 0 else "level"


@dataclass(frozen=True)
class Standing:
    """A run on one dataset: its best row of the task that ranks runs, and its verdicts over all tasks."""

    run: str
    dataset: str
    task: str
    metric: str
    row: str
    value: float
    sd: float
    regression: PairedDifference | None  # None where the task has no such baseline
    baseline: tuple[str, float] | None  # the best baseline of the task, and its value
    outcomes: Mapping[str, int]  # verdicts by outcome
    best: bool = False  # highest of the dataset's runs, by the same task and metric


def standings(runs: list[ReportedRun]) -> list[Standing]:
    """Standings of all runs that were evaluated by a task with a metric, the best of each dataset marked."""
    found = [standing for run in runs for standing in _of_run(run)]
    top: dict[tuple[str, str, str], float] = {}
    for one in found:
        key = (one.dataset, one.task, one.metric)
        top[key] = max(one.value, top.get(key, one.value))
    return [Standing(**{**one.__dict__, "best": one.value == top[one.dataset, one.task, one.metric]}) for one in found]


def _of_run(run: ReportedRun) -> Iterator[Standing]:
    for dataset, entry in ((run.evaluation or {}).get("datasets") or {}).items():
        tasks = {"probe": entry["tasks"].get("probe"), **entry["tasks"]}  # probe ranks runs where it ran
        outcomes = Counter(outcomes_of(entry).values())
        for task, result in tasks.items():
            if result is None or not (points := TaskTable(result).points()):
                continue
            own = [point for point in points if point[3] == "model"]
            others = [point for point in points if point[3] == "baseline"]
            if own:
                row, value, sd, _ = max(own, key=lambda point: point[1])
                best = max(others, key=lambda point: point[1])[:2] if others else None
                yield Standing(
                    *(run.name, dataset, task, result["metric"], row, value, sd or 0.0),
                    regression=_difference(result, row),
                    baseline=best,
                    outcomes={outcome: outcomes[outcome] for outcome in SHOWN},
                )
                break


def _difference(result: Mapping[str, Any], row: str) -> PairedDifference | None:
    """Of `row` to logistic regression by the task's metric, of paired differences or else of verdicts."""
    for line in result.get("differences") or []:
        if (line["column"], line["compared"], line["against"]) == (result["metric"], row, REGRESSION):
            return PairedDifference(line["mean"], line["low"], line["high"])
    for verdict in result["verdicts"]:
        named = (verdict["compared"], verdict["against"], verdict["metric"])
        if named == (row, REGRESSION, result["metric"]) and verdict["interval"] is not None:
            return PairedDifference(verdict["difference"], *verdict["interval"])
    return None
