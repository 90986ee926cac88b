"""Contents of a task's table on the page: columns, best baselines, the grid of ranked rows."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from cellmill.runs.results import Gap, Row, TaskResult, Verdict


def list_columns(rows: Sequence[Row]) -> list[str]:
    """Columns of a task's table that the page shows."""
    columns: dict[str, None] = {}
    for row in rows:
        columns |= dict.fromkeys([*row.scores, *row.numbers])
    return [column for column in columns if _is_shown(rows, column)]


def _is_shown(rows: Sequence[Row], column: str) -> bool:
    """False if the column has lists, or if each of its values is missing, empty, False or integer 0."""
    values = [row.cell(column) for row in rows]
    if any(isinstance(value, list) for value in values):
        return False
    # a float, such as a mean, is shown although it is 0.0
    return any(isinstance(value, float) or value for value in values)


def find_best_baselines(result: TaskResult) -> set[tuple[str, str]]:
    """(name of the row, column) of the best baseline in each column of scores."""
    best = set()
    for column in dict.fromkeys(chain.from_iterable(row.scores for row in result.rows)):
        row = result.best_baseline(column)
        if row is not None:
            best.add((row.method.name, column))
    return best


class Grid(NamedTuple):
    """Ranked rows by features and classifier."""

    classifiers: list[str]  # columns
    rows: dict[str, dict[str, Row]]  # by features, then by classifier
    # features without a classifier, whose score is in the first column
    without_classifier: list[str]


def make_grid(result: TaskResult) -> Grid | None:
    """The grid of ranked rows; None unless some features have several classifiers.

    Also None if a score without a classifier and one with the first would share a cell.
    """
    rows: dict[str, dict[str, Row]] = {}
    for row in result.ranked_rows:
        rows.setdefault(row.method.features_name, {})[row.method.classifier] = row
    if all(len(by_classifier) == 1 for by_classifier in rows.values()):
        return None
    names = dict.fromkeys(chain.from_iterable(rows.values()))
    classifiers = [name for name in names if name]
    without_classifier = []
    for features, by_classifier in rows.items():
        if "" in by_classifier:
            if classifiers[0] in by_classifier:
                return None
            by_classifier[classifiers[0]] = by_classifier.pop("")
            without_classifier.append(features)
    return Grid(classifiers, rows, without_classifier)


def find_best_row(rows: Iterable[Row], result: TaskResult) -> Row:
    """The best of `rows`, by the metric that ranks the rows of `result`."""
    return max(rows, key=result.rank_value)


def find_gap(result: TaskResult) -> Gap | None:
    """The gap in the metric that ranks the rows of `result`; None if there is none."""
    for gap in result.gaps:
        if gap.column == result.metric:
            return gap
    return None


def find_largest_difference(verdicts: Sequence[Verdict]) -> float:
    """Largest absolute value of the differences and the ends of their intervals.

    It scales the bars of a task's verdicts. 1 if all differences are 0.
    """
    ends = [0.0]
    for verdict in verdicts:
        ends += [verdict.difference, *(verdict.interval or ())]
    return max(map(abs, ends)) or 1


def list_values(row: Row) -> dict[str, float]:
    """Means and numbers of a row, by column."""
    pairs = [(column, row.value(column)) for column in [*row.scores, *row.numbers]]
    return {column: value for column, value in pairs if value is not None}


def list_figures(result: TaskResult) -> dict[str, float]:
    """The task's figures that are numbers, by key, without its seconds, which are no result."""
    figures = {key: value for key, value in result.figures.items() if key != "seconds"}
    return {key: value for key, value in figures.items() if isinstance(value, int | float)}
