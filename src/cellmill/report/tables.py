"""Tables of tasks, generic over their rows, and values as text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from cellmill.report.collect import EvaluatedDataset, ReportedRun, evaluated_datasets
from cellmill.runs.results import Gap, Row, Score, TaskResult, Verdict
from cellmill.track.follow import flat as values_by_path


class TableColumn(NamedTuple):
    """Column of a task's table: means, or single values."""

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


def list_columns(rows: Sequence[Row]) -> list[TableColumn]:
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


def find_best_baselines(result: TaskResult) -> set[tuple[str, str]]:
    """(name of the row, heading) of the best baseline of each column of means: the lowest in a
    column of errors, else the highest.
    """
    baselines = [row for row in result.rows if row.method.kind == "baseline"]
    best = set()
    for column in list_columns(result.rows):
        scored = [row for row in baselines if column.score(row)]
        if scored:
            choose = min if column.heading in result.lower_is_better else max
            best.add((choose(scored, key=column.value).method.name, column.heading))
    return best


def find_gap(result: TaskResult) -> Gap | None:
    """The gap in the metric that ranks the rows; None if the task has none."""
    return next((gap for gap in result.gaps if gap.column == result.metric), None)


def bar_half_width(verdicts: Sequence[Verdict]) -> float:
    """Half the width of a task's bars: the largest distance from 0 of the differences and the ends of
    their intervals.
    """
    ends = [0.0]
    for verdict in verdicts:
        ends += [verdict.difference, *(verdict.interval or ())]
    return max(map(abs, ends)) or 1


class ComparisonLine(NamedTuple):
    """Values of a run on one dataset by column."""

    run: str
    dataset: str
    values: dict[str, float]


@dataclass
class Comparison:
    """A task side by side in several runs.

    Columns are sets of features, each with its best classifier; without a metric that ranks rows,
    they are the task's single numbers.
    """

    task: str
    metric: str  # empty if no metric ranks rows
    lines: list[ComparisonLine] = field(default_factory=list)
    has_classifiers: bool = False  # True if some features have classifiers

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(chain.from_iterable(line.values for line in self.lines)))


def compare_runs(runs: list[ReportedRun]) -> list[Comparison]:
    """Comparison of the runs in each task that is not skipped and has a value."""
    evaluated_by_task: dict[str, list[EvaluatedDataset]] = {}
    for evaluated in evaluated_datasets(runs):
        for task, result in evaluated.result.tasks.items():
            if result.skipped is None:
                evaluated_by_task.setdefault(task, []).append(evaluated)
    comparisons = []
    for task, datasets in evaluated_by_task.items():
        results = [evaluated.result.tasks[task] for evaluated in datasets]
        metric = next((result.metric for result in results if result.metric), "")
        comparison = Comparison(task, metric)
        for evaluated, result in zip(datasets, results):
            values = _best_by_features(result) if metric else select_numbers(result)
            comparison.lines.append(ComparisonLine(evaluated.run.name, evaluated.name, values))
            comparison.has_classifiers |= any(row.method.classifier for row in result.rows)
        if comparison.columns:
            comparisons.append(comparison)
    return comparisons


def select_numbers(result: TaskResult) -> dict[str, float]:
    """Single values of a task that are numbers."""
    return {key: value for key, value in result.figures.items() if isinstance(value, int | float)}


def _best_by_features(result: TaskResult) -> dict[str, float]:
    """The metric of each set of features with its best classifier."""
    best: dict[str, float] = {}
    for row in result.ranked_rows:
        features = row.method.features_name
        value = result.rank_value(row)
        best[features] = max(value, best.get(features, value))
    return best


def to_words(key: str) -> str:
    """A key as words."""
    return key.replace("_", " ")


def to_text(value: Any) -> str:
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
        return ", ".join(f"{key} {to_text(item)}" for key, item in value.items()) or "–"
    return str(value)


def flatten(tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) pairs of nested options in their order; lists are joined by commas."""
    for name, value in values_by_path(tree).items():
        if isinstance(value, list):
            yield name, ", ".join(map(to_text, value)) or "none"
        else:
            yield name, value
