"""The table of a task: its columns, its best baselines, and its rows by features and classifier."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from cellmill.runs.results import Gap, Row, TaskResult, Verdict


def list_columns(rows: Sequence[Row]) -> list[str]:
    """Columns of a task's table that are shown, by heading."""
    headings: dict[str, None] = {}
    for row in rows:
        headings |= dict.fromkeys([*row.scores, *row.numbers])
    return [heading for heading in headings if _is_shown(rows, heading)]


def _is_shown(rows: Sequence[Row], column: str) -> bool:
    """False if the column has lists, or only counts of 0 and missing values."""
    is_shown = False
    for row in rows:
        value = row.cell(column)
        if isinstance(value, list):
            return False
        if isinstance(value, float) or value:  # also a mean of 0.0
            is_shown = True
    return is_shown


def find_best_baselines(result: TaskResult) -> set[tuple[str, str]]:
    """(name of the row, heading) of the best baseline of each column of means: the lowest in a
    column of errors, else the highest.
    """
    baselines = [row for row in result.rows if row.method.kind == "baseline"]
    best = set()
    for column in list_columns(result.rows):
        means: dict[str, float] = {}
        for row in baselines:
            score = row.scores.get(column)
            if score is not None and score.mean is not None:
                means[row.method.name] = score.mean
        if means:
            choose = min if column in result.lower_is_better else max
            best.add((choose(means, key=means.__getitem__), column))
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


def find_highest(rows: Iterable[Row], result: TaskResult) -> Row:
    """The row of a task's result with the highest value in the metric that ranks them."""
    return max(rows, key=result.rank_value)


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


def select_numbers(result: TaskResult) -> dict[str, float]:
    """Single values of a task that are numbers."""
    return {key: value for key, value in result.figures.items() if isinstance(value, int | float)}
