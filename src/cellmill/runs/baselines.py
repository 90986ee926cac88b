"""Best baselines of a task's result, and the verdicts against them.

A model's untrained network is no baseline to be ahead of. It counts only while the model is not
ahead of it, or if there is no other baseline.
"""

from collections.abc import Sequence
from dataclasses import replace

from cellmill.runs.results import Row, TaskResult, Verdict, compare


def list_baselines(result: TaskResult, column: str) -> list[Row]:
    """Baselines that count in a column, and have a value there."""
    rows = [row for row in result.rows if row.value(column) is not None]
    models = [row for row in rows if row.method.kind == "model"]
    baselines = [row for row in rows if row.method.kind == "baseline"]
    untrained = [row for row in baselines if row.method.network == "untrained"]
    others = [row for row in baselines if row.method.network != "untrained"]
    if not (models and untrained and others):
        return baselines
    compared = _choose_best(result, column, models).method.name
    against = _choose_best(result, column, untrained).method.name
    verdict = _compare(result, column, compared, against)
    return others if verdict is not None and verdict.outcome == "ahead" else baselines


def find_best_baseline(result: TaskResult, column: str) -> Row | None:
    """The best baseline that counts in a column; None if there is none."""
    baselines = list_baselines(result, column)
    return _choose_best(result, column, baselines) if baselines else None


def _choose_best(result: TaskResult, column: str, rows: Sequence[Row]) -> Row:
    """The best of `rows`, all of which have a value in the column."""
    choose = min if column in result.lower_is_better else max
    return choose(rows, key=lambda row: row.value(column) or 0.0)


def _compare(result: TaskResult, column: str, compared: str, against: str) -> Verdict | None:
    """Verdict on two methods in a column; None if the result has no difference of them."""
    wanted = column, compared, against
    for difference in result.differences:
        if (difference.column, difference.compared, difference.against) == wanted:
            return compare(
                compared,
                against,
                column,
                difference.mean,
                (difference.low, difference.high),
                lower_is_better=column in result.lower_is_better,
                n=difference.n,
            )
    return None


def list_best_verdicts(result: TaskResult) -> dict[Verdict, set[str]]:
    """The verdict against the best baseline in each metric, with the columns of its difference.

    It is the first verdict of a metric. If that is against an untrained network that does not
    count, the verdict against the best baseline that counts replaces it.
    """
    methods = {row.method.name: row.method for row in result.rows}
    first_by_metric: dict[str, Verdict] = {}
    for verdict in result.verdicts:
        method = methods.get(verdict.against)
        if method is not None and method.kind == "baseline":
            first_by_metric.setdefault(verdict.metric, verdict)
    columns_by_verdict = {}
    for verdict in first_by_metric.values():
        columns = _find_columns(result, verdict)
        best: Verdict | None = verdict
        if verdict.outcome == "ahead" and methods[verdict.against].network == "untrained":
            best = _replace(result, verdict, columns)
        if best is not None:
            columns_by_verdict[best] = columns
    return columns_by_verdict


def _find_columns(result: TaskResult, verdict: Verdict) -> set[str]:
    """Columns in which the methods of a verdict have its difference."""
    wanted = verdict.compared, verdict.against, verdict.difference
    return {
        difference.column
        for difference in result.differences
        if (difference.compared, difference.against, difference.mean) == wanted
    }


def _replace(result: TaskResult, verdict: Verdict, columns: set[str]) -> Verdict | None:
    """The verdict on the same method against the best baseline that counts in one of `columns`.

    None if the result has no difference from it.
    """
    for column in sorted(columns):
        baseline = find_best_baseline(result, column)
        found = baseline and _compare(result, column, verdict.compared, baseline.method.name)
        if found and found.against != verdict.against:
            return replace(found, metric=verdict.metric, effort=verdict.effort)
    return None
