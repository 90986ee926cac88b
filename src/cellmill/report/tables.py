"""Tables of tasks, generic over their rows, and values as text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from cellmill.report.collect import ReportedRun, evaluated_datasets
from cellmill.runs.results import Gap, Row, Score, TaskResult, Verdict
from cellmill.track.follow import flat as values_by_path


class TableColumn(NamedTuple):
    """Column of means, or of single values."""

    heading: str

    def score(self, row: Row) -> Score | None:
        """The row's mean with a standard deviation; None if it has no such score."""
        score = row.scores.get(self.heading)
        if score is None or score.sd is None or score.mean is None:
            return None
        return score

    def value(self, row: Row) -> Any:
        score = row.scores.get(self.heading)
        return row.numbers.get(self.heading) if score is None else score.mean


def table_columns(rows: Sequence[Row]) -> list[TableColumn]:
    """Columns over all rows, without lists and without counts that are 0 in all rows."""
    headings: dict[str, None] = {}
    for row in rows:
        headings |= dict.fromkeys([*row.scores, *row.numbers])
    columns = []
    for column in map(TableColumn, headings):
        values = [column.value(row) for row in rows]
        has_list = any(isinstance(value, list) for value in values)
        if not has_list and any(isinstance(value, float) or value for value in values):
            columns.append(column)
    return columns


def make_grid(result: TaskResult) -> dict[str, dict[str, Row]]:
    """Ranked rows by features, then by classifier ("" without one); empty unless features have
    several classifiers.
    """
    grid: dict[str, dict[str, Row]] = {}
    for row in result.ranked_rows:
        by_classifier = grid.setdefault(row.method.features_name, {})
        by_classifier[row.method.classifier] = row
    has_several = any(len(by_classifier) > 1 for by_classifier in grid.values())
    return grid if has_several else {}


def best_baselines(result: TaskResult) -> set[tuple[str, str]]:
    """(name of the row, heading) of the highest baseline of each column of means."""
    baselines = [row for row in result.rows if row.method.kind == "baseline"]
    best = set()
    for column in table_columns(result.rows):
        scored = [row for row in baselines if column.score(row)]
        if scored:
            highest = max(scored, key=column.value)
            best.add((highest.method.name, column.heading))
    return best


def gap_of_metric(result: TaskResult) -> Gap | None:
    return next((gap for gap in result.gaps if gap.column == result.metric), None)


def reach(verdicts: Sequence[Verdict]) -> float:
    """Largest distance from 0 of the differences and the ends of their intervals.

    It is half the width of the task's bars.
    """
    ends = [0.0]
    for verdict in verdicts:
        ends += [verdict.difference, *(verdict.interval or ())]
    return max(map(abs, ends)) or 1


@dataclass
class Comparison:
    """A task side by side in several runs."""

    task: str
    metric: str  # empty if no metric ranks rows: the columns are single numbers
    # (run, dataset, value by column); a column is a set of features with its best classifier
    lines: list[tuple[str, str, dict[str, float]]] = field(default_factory=list)
    best_of: bool = False  # True if some features have classifiers

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(chain.from_iterable(values for _, _, values in self.lines)))


def compare_runs(runs: list[ReportedRun]) -> list[Comparison]:
    """Each task side by side: its rows by their metric, or its single numbers if no metric ranks
    rows.
    """
    tasks: dict[str, list[tuple[str, str, TaskResult]]] = {}
    for run, name, dataset in evaluated_datasets(runs):
        for task, result in dataset.tasks.items():
            if result.skipped is None:
                tasks.setdefault(task, []).append((run.name, name, result))
    comparisons = []
    for task, results in tasks.items():
        metric = next((result.metric for _, _, result in results if result.metric), "")
        comparison = Comparison(task, metric)
        for run_name, dataset_name, result in results:
            values = best_by_features(result) if metric else single_numbers(result)
            comparison.lines.append((run_name, dataset_name, values))
            comparison.best_of |= any(row.method.classifier for row in result.rows)
        if comparison.columns:
            comparisons.append(comparison)
    return comparisons


def single_numbers(result: TaskResult) -> dict[str, float]:
    """Single values of a task that are numbers."""
    return {key: value for key, value in result.figures.items() if isinstance(value, int | float)}


def best_by_features(result: TaskResult) -> dict[str, float]:
    """The metric of each set of features with its best classifier."""
    best: dict[str, float] = {}
    for row in result.ranked_rows:
        features = row.method.features_name
        value = result.rank_value(row)
        best[features] = max(value, best.get(features, value))
    return best


def number(value: Any) -> str:
    """A value as text: 1,234 or four significant digits; a dash for None; `key value` pairs of a
    mapping.
    """
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {number(item)}" for key, item in value.items()) or "–"
    return str(value)


def flat(tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) pairs of nested options in their order; lists are joined by commas."""
    for name, value in values_by_path(tree).items():
        if isinstance(value, list):
            yield name, ", ".join(map(number, value)) or "none"
        else:
            yield name, value
