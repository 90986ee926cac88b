"""Tables of tasks, generic over their rows, and values as text."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from cellmill.report.collect import ReportedRun, evaluated_datasets
from cellmill.runs.verdict import compare
from cellmill.track.follow import flat as values_by_path

# the model's own network with initial weights: rows of `evaluate.scores.UNTRAINED`
UNTRAINED = "untrained"


class Column(NamedTuple):
    heading: str
    key: str
    sd_key: str | None = None  # key of the standard deviation shown beside it


class Point(NamedTuple):
    """A row by the metric of its task."""

    name: str
    value: float
    sd: float
    kind: str  # baseline, external, variant or, for all others, model


class TaskTable:
    """Rows of one task on one dataset, as the page shows them."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.rows: list[dict[str, Any]] = result["rows"]
        self.columns = list(columns(self.rows))
        self.metric: str = result["metric"] or ""
        gaps = (gap for gap in result.get("gaps") or [] if gap["column"] == self.metric)
        self.gap: dict[str, Any] | None = next(gaps, None)  # of the metric

    @property
    def best(self) -> str | None:
        """Name of the row with the highest metric; None where no metric ranks the rows."""
        best = self.best_of("model", "baseline", "external", "variant")
        return best and best.name

    def best_of(self, *kinds: str) -> Point | None:
        """The row of these kinds with the highest metric; None without one."""
        rows = [point for point in self.points() if point.kind in kinds]
        return max(rows, key=lambda point: point.value, default=None)

    @property
    def grid(self) -> dict[str, dict[str, Point]]:
        """Points by features, then by classifier ("" without one); empty unless rows are features
        with classifiers.
        """
        found: dict[str, dict[str, Point]] = {}
        for point in self.points():
            features, _, classifier = point.name.partition(" + ")
            found.setdefault(features, {})[classifier] = point
        return found if any(len(of) > 1 for of in found.values()) else {}

    @property
    def best_baselines(self) -> set[tuple[str, str]]:
        """(name of the row, key of the column) of the highest baseline of each column of means."""
        baselines = [row for row in self.rows if row.get("kind") == "baseline"]
        best = set()
        for key in (column.key for column in self.columns if column.sd_key is not None):
            having = [row for row in baselines if row.get(key) is not None]
            if having:
                best.add((max(having, key=lambda row: row[key])["name"], key))
        return best

    def points(self) -> list[Point]:
        """A point for each row, but for ceilings; none where no metric ranks the rows."""
        key, sd_key = next(
            ((c.key, c.sd_key) for c in self.columns if c.heading == self.metric), ("", None)
        )
        rows = [
            row for row in self.rows if row.get(key) is not None and row.get("kind") != "ceiling"
        ]
        kinds = [
            kind if (kind := row.get("kind")) in ("baseline", "external", "variant") else "model"
            for row in rows
        ]
        return [
            Point(row["name"], row[key], row.get(sd_key or "", 0.0), kind)
            for row, kind in zip(rows, kinds)
        ]


def columns(rows: list[dict[str, Any]]) -> Iterator[Column]:
    """Columns over the keys of all rows: `x_mean` and `x_sd` as one; no lists, and no counts that
    are 0 in all rows.
    """
    keys = dict.fromkeys(key for row in rows for key in row if key not in ("name", "kind"))
    for key in keys:
        values = [row.get(key) for row in rows]
        stem = key.removesuffix("_mean")
        if any(isinstance(value, list) for value in values):
            continue
        if not any(isinstance(value, float) or value for value in values):
            continue
        if key != stem:
            yield Column(stem, key, f"{stem}_sd" if f"{stem}_sd" in keys else None)
        elif not (key.endswith("_sd") and f"{key.removesuffix('_sd')}_mean" in keys):
            yield Column(key, key)


def against_best(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Verdicts against the best baseline, one for each metric of a task: its first, by the order of
    tasks.

    `columns` are those of its difference. The model's untrained network is not a baseline to be
    ahead of: such a verdict is replaced by that against the best of the others.
    """
    baselines = {row["name"] for row in result["rows"] if row.get("kind") == "baseline"}
    first: dict[str, Mapping[str, Any]] = {}
    for verdict in result["verdicts"]:
        if verdict["against"] in baselines:
            first.setdefault(verdict["metric"], verdict)
    found = []
    for verdict in first.values():
        lines = [
            line
            for line in result.get("differences") or []
            if line["compared"] == verdict["compared"]
        ]
        same = [
            line
            for line in lines
            if (line["against"], line["mean"]) == (verdict["against"], verdict["difference"])
        ]
        best = {**verdict, "columns": {line["column"] for line in same}}
        if verdict["outcome"] == "ahead" and verdict["against"].startswith(UNTRAINED):
            names = {name for name in baselines if not name.startswith(UNTRAINED)}
            others = [
                line
                for line in lines
                if line["column"] in best["columns"] and line["against"] in names
            ]
            if not others:
                continue
            # all are worse than the untrained network
            line = min(others, key=lambda line: abs(line["mean"]))
            between = (verdict["compared"], line["against"], verdict["metric"])
            lower = verdict["difference"] < 0
            best |= asdict(
                compare(*between, line["mean"], (line["low"], line["high"]), lower_is_better=lower)
            )
        found.append(best)
    return found


def reach(verdicts: Sequence[Mapping[str, Any]]) -> float:
    """Largest distance from 0 of differences and ends of their intervals: half the width of the
    task's bars.
    """
    ends = (
        end for verdict in verdicts for end in (verdict["difference"], *(verdict["interval"] or ()))
    )
    return max(map(abs, ends), default=0) or 1


def compare_runs(runs: list[ReportedRun]) -> list[dict[str, Any]]:
    """Each task side by side: its rows by their metric, or its single numbers if no metric ranks
    rows (`metric` is "").

    `lines` are (run, dataset, value by column). Rows called "features + classifier" are one column
    for each features, with the value of the best classifier.
    """
    tasks: dict[str, list[tuple[str, str, dict[str, Any]]]] = defaultdict(list)
    for run, dataset, entry in evaluated_datasets(runs):
        for task, result in entry["tasks"].items():
            if result["skipped"] is None:
                tasks[task].append((run.name, dataset, result))
    comparisons = []
    for task, results in tasks.items():
        metric = next((result["metric"] for _, _, result in results if result["metric"]), "")
        lines: list[tuple[str, str, dict[str, Any]]] = []
        for run_name, dataset, result in results:
            values = {
                key: value
                for key, value in result["figures"].items()
                if isinstance(value, int | float)
            }
            if metric:
                values = {}
                for name, value, _, _ in TaskTable(result).points():
                    features = name.partition(" + ")[0]
                    values[features] = max(value, values.get(features, value))
            lines.append((run_name, dataset, values))
        names = list(dict.fromkeys(name for _, _, values in lines for name in values))
        if names:
            best_of = any(
                " + " in row["name"] for _, _, result in results for row in result["rows"]
            )
            comparisons.append(
                {
                    "task": task,
                    "metric": metric,
                    "columns": names,
                    "lines": lines,
                    "best_of": best_of,
                }
            )
    return comparisons


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
        yield name, (", ".join(map(number, value)) or "none") if isinstance(value, list) else value
