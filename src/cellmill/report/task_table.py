"""Contents of a task's table on the page.

These are the columns, the best baselines, the grid of ranked rows, the gap, and the values of rows.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from cellmill.runs.results import Gap, Row, TaskResult, Verdict


def list_columns(rows: Sequence[Row]) -> list[str]:
    """Columns of a task's table that the page shows, in the order of their first appearance."""
    columns: dict[str, None] = {}
    for row in rows:
        columns |= dict.fromkeys([*row.scores, *row.numbers])
    return [column for column in columns if _is_shown(rows, column)]


def _is_shown(rows: Sequence[Row], column: str) -> bool:
    """True if at least one row has a value worth showing in the column.

    Missing and empty values, False and the integer 0 are not worth showing. A float, such as a mean,
    is worth showing even if it is 0.0. A column with lists is never shown.
    """
    values = [row.cell(column) for row in rows]
    if any(isinstance(value, list) for value in values):
        return False
    return any(isinstance(value, float) or value for value in values)


def find_best_baselines(result: TaskResult) -> set[tuple[str, str]]:
    """Find the best baseline in each column of scores. Return pairs (name of its row, column)."""
    best = set()
    for column in dict.fromkeys(chain.from_iterable(row.scores for row in result.rows)):
        row = result.best_baseline(column)
        if row is not None:
            best.add((row.method.name, column))
    return best


class Grid(NamedTuple):
    """Ranked rows of a task, in a table with features down the side and classifiers across the top."""

    classifiers: list[str]  # names of the columns
    rows: dict[str, dict[str, Row]]  # the row in each cell, by features, then by classifier
    # features that were scored without a classifier; their score is in the first column
    without_classifier: list[str]


def make_grid(result: TaskResult) -> Grid | None:
    """Make the grid of ranked rows. Return None if a grid does not suit the rows.

    A grid does not suit the rows in two cases. In the first case, no features have several
    classifiers. In the second case, some features were scored both without a classifier and with
    the first classifier, so that two scores would be in one cell.
    """
    rows_by_features: dict[str, dict[str, Row]] = {}
    for row in result.ranked_rows:
        row_by_classifier = rows_by_features.setdefault(row.method.features_name, {})
        row_by_classifier[row.method.classifier] = row
    if all(len(row_by_classifier) == 1 for row_by_classifier in rows_by_features.values()):
        return None
    names = dict.fromkeys(chain.from_iterable(rows_by_features.values()))
    classifiers = [name for name in names if name]
    # move each score without a classifier, whose name is empty, to the first column
    without_classifier = []
    for features, row_by_classifier in rows_by_features.items():
        if "" in row_by_classifier:
            if classifiers[0] in row_by_classifier:
                return None
            row_by_classifier[classifiers[0]] = row_by_classifier.pop("")
            without_classifier.append(features)
    return Grid(classifiers, rows_by_features, without_classifier)


def find_best_row(rows: Iterable[Row], result: TaskResult) -> Row:
    """Find the best of `rows` in the metric that ranks the rows of `result`."""
    return max(rows, key=result.rank_value)


def find_gap(result: TaskResult) -> Gap | None:
    """Find the gap in the metric that ranks the rows of `result`. Return None if it has no gap."""
    for gap in result.gaps:
        if gap.column == result.metric:
            return gap
    return None


def find_largest_difference(verdicts: Sequence[Verdict]) -> float:
    """Find the largest absolute value among the differences and the ends of their intervals.

    The page scales the bars of a task's verdicts by this value. It is 1 if all differences are 0.
    """
    ends = [0.0]
    for verdict in verdicts:
        ends += [verdict.difference, *(verdict.interval or ())]
    return max(map(abs, ends)) or 1


def list_row_values(row: Row) -> dict[str, float]:
    """The numbers of a row by column: means of scores, and single values."""
    pairs = [(column, row.value(column)) for column in [*row.scores, *row.numbers]]
    return {column: value for column, value in pairs if value is not None}


def list_figures(result: TaskResult) -> dict[str, float]:
    """Figures of the task that are numbers, by key.

    The duration `seconds` is left out, because it is not a result.
    """
    figures = {key: value for key, value in result.figures.items() if key != "seconds"}
    return {key: value for key, value in figures.items() if isinstance(value, int | float)}
