"""Tables of any task's rows, a task side by side in several runs, and values as text."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from cellmill.report.collect import ReportedRun, RunOnDataset, list_results
from cellmill.runs.results import Gap, Row, TaskResult, Verdict
from cellmill.track.follow import flat as values_by_path


def list_columns(rows: Sequence[Row]) -> list[str]:
    """Columns of a task's table that are shown, by heading."""
    headings: dict[str, None] = {}
    for row in rows:
        headings |= dict.fromkeys([*row.scores, *row.numbers])
    return [heading for heading in headings if _is_shown(rows, heading)]


def _is_shown(rows: Sequence[Row], column: str) -> bool:
    """False if the column has lists, or only counts of 0 and missing values."""
    values = [row.cell(column) for row in rows]
    if any(isinstance(value, list) for value in values):
        return False
    return any(isinstance(value, float) or value for value in values)  # also a mean of 0.0


def find_best_baselines(result: TaskResult) -> set[tuple[str, str]]:
    """(name of the row, heading) of the best baseline of each column of means: the lowest in a
    column of errors, else the highest.
    """
    baselines = [row for row in result.rows if row.method.kind == "baseline"]
    best = set()
    for column in list_columns(result.rows):
        means = {row.method.name: row.cell(column) for row in baselines if column in row.scores}
        known = [name for name, mean in means.items() if mean is not None]
        if known:
            choose = min if column in result.lower_is_better else max
            best.add((choose(known, key=means.__getitem__), column))
    return best


class Grid(NamedTuple):
    """Ranked rows by features and classifier.

    A row without a classifier stands in the first column, unless its features have that classifier
    too: then only the table of all columns shows it.
    """

    classifiers: list[str]  # columns
    rows: dict[str, dict[str, Row]]  # by features, then by classifier


def make_grid(result: TaskResult) -> Grid | None:
    """The ranked rows; None unless some features have several classifiers."""
    rows: dict[str, dict[str, Row]] = {}
    for row in result.ranked_rows:
        rows.setdefault(row.method.features_name, {})[row.method.classifier] = row
    if all(len(by_classifier) == 1 for by_classifier in rows.values()):
        return None
    names = dict.fromkeys(chain.from_iterable(rows.values()))
    classifiers = [name for name in names if name]
    for by_classifier in rows.values():
        if "" in by_classifier:
            row = by_classifier.pop("")
            by_classifier.setdefault(classifiers[0], row)
    return Grid(classifiers, rows)


def find_gap(result: TaskResult) -> Gap | None:
    """The gap in the metric that ranks the rows; None if the task has none."""
    return next((gap for gap in result.gaps if gap.column == result.metric), None)


def find_longest_bar(verdicts: Sequence[Verdict]) -> float:
    """Length that the longest bar of a task needs: the largest distance from 0 of the differences
    and the ends of their intervals; 1 if all are 0.
    """
    ends = [0.0]
    for verdict in verdicts:
        ends += [verdict.difference, *(verdict.interval or ())]
    return max(map(abs, ends)) or 1


class RunValues(NamedTuple):
    """Values of a run on one dataset, by column."""

    run: ReportedRun
    dataset: str
    values: dict[str, float]


class TaskAcrossRuns(NamedTuple):
    """A task side by side in several runs.

    Columns are sets of features, each with its best classifier; without a metric that ranks rows,
    they are the task's single numbers.
    """

    task: str
    metric: str  # empty if no metric ranks rows
    rows: list[RunValues]

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(chain.from_iterable(row.values for row in self.rows)))


def compare_runs(runs: Sequence[ReportedRun]) -> list[TaskAcrossRuns]:
    """Each task that is not skipped and has a value, side by side in the runs."""
    by_task: dict[str, list[RunOnDataset]] = {}
    for evaluated in list_results(runs):
        for task, result in evaluated.results.items():
            if result.skipped is None:
                by_task.setdefault(task, []).append(evaluated)
    tables = [_compare_task(task, evaluated) for task, evaluated in by_task.items()]
    return [table for table in tables if table.columns]


def _compare_task(task: str, evaluated: Sequence[RunOnDataset]) -> TaskAcrossRuns:
    """The task of runs and datasets that all have it, a row for each."""
    metrics = [results[task].metric for _, _, results in evaluated]
    metric = next(filter(None, metrics), "")
    rows = []
    for run, dataset, results in evaluated:
        result = results[task]
        values = _find_highest_by_features(result) if metric else select_numbers(result)
        rows.append(RunValues(run, dataset, values))
    return TaskAcrossRuns(task, metric, rows)


def select_numbers(result: TaskResult) -> dict[str, float]:
    """Single values of a task that are numbers."""
    return {key: value for key, value in result.figures.items() if isinstance(value, int | float)}


def _find_highest_by_features(result: TaskResult) -> dict[str, float]:
    """The highest value of the metric, over classifiers, by features."""
    highest: dict[str, float] = {}
    for row in result.ranked_rows:
        features = row.method.features_name
        value = result.rank_value(row)
        highest[features] = max(value, highest.get(features, value))
    return highest


def to_words(key: str) -> str:
    """A key as words."""
    return key.replace("_", " ")


def to_text(value: Any) -> str:
    """A value as text.

    Integers have commas, and numbers from 10,000 on no digits after the point; other numbers have
    four significant digits. None is a dash, and a mapping is its pairs of key and value.
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
