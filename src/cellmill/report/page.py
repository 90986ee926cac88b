"""The HTML page and its tables, rendered from what stages wrote: computes no result, loads nothing from elsewhere."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from cellmill import __version__
from cellmill.errors import DataError
from cellmill.report import figures
from cellmill.report.collect import ReportedCorpus, ReportedRun, largest_memory, losses
from cellmill.runs.metrics import COLLAPSED
from cellmill.runs.run_cost import span

MEASURES = {"n_genes": "genes per cell", "n_counts": "counts per cell", "mito_frac": "mitochondrial fraction"}
MEASURES |= {"n_residues": "residues per sequence"}


def render(
    title: str, runs: list[ReportedRun], corpora: list[ReportedCorpus], sweeps: Sequence[Mapping[str, Any]] = ()
) -> str:
    """The page as HTML, with user text escaped. Raises DataError when two runs or corpora share a name."""
    for kind, names in (("runs", [r.name for r in runs]), ("corpora", [c.name for c in corpora])):
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise DataError(f"two {kind} are called {twice[0]!r}; rename one of their folders")
    loader = PackageLoader("cellmill", "report")
    environment = Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.filters.update(
        number=number,
        flat=flat,
        task_table=TaskTable,
        short=lambda digest: str(digest)[:12],
        heading=lambda key: key.replace("_", " "),
        span=lambda seconds: "–" if seconds is None else span(seconds),
        percent=lambda fraction: "–" if fraction is None else f"{100 * fraction:.0f} %",
    )
    return environment.get_template("page.html").render(
        title=title,
        version=__version__,
        runs=runs,
        corpora=corpora,
        sweeps=sweeps,
        comparisons=compare_runs(runs),
        supervised={r.name: r.supervised_by for r in runs},
        losses={r.name: losses(r.evaluation) for r in runs},
        planned={r.name: planned_and_measured(r) for r in runs},
        measures=MEASURES,
        figures=figures,
        lines={r.name: r.lines for r in runs},
        umap=_umap,
        legend_of=_legend,
    )


def _umap(rows: list[dict[str, str]], legend: list[dict[str, Any]]) -> Markup:
    index = {entry["label"]: number for number, entry in enumerate(legend)}
    classes = np.array([index.get(row["label"], -1) for row in rows])
    x, y = (np.array([float(row[axis]) for row in rows]) for axis in ("x", "y"))
    return figures.scatter(x, y, classes)


def _legend(rows: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Labels of a UMAP, the most frequent first, with colour and number of cells."""
    tally = Counter(row["label"] for row in rows if row["label"])
    ordered = sorted(tally.items(), key=lambda item: (-item[1], item[0]))
    return [{"label": label, "n": n, "colour": figures.colour(i)} for i, (label, n) in enumerate(ordered)]


def planned_and_measured(run: ReportedRun) -> list[tuple[str, Any, Any]]:
    """(quantity, planned, measured) of a run, None where unknown; rows without either are left out."""
    plan, status = run.plan or {}, run.status or {}
    fastest = max((line["cells_per_s"] for line in run.lines if "cells_per_s" in line), default=None)
    memory, rank = largest_memory(run.lines) or (None, None)
    waits = [line["data_wait_frac"] for line in run.lines if "data_wait_frac" in line]
    wall_s = status.get("wall_s")
    # the plan counts tensors; on a CPU the measured memory is the whole process, libraries included
    planned_gb = plan["memory"]["total_bytes"] / 1e9 if "memory" in plan else None
    directions = _last(run.lines, "effective_rank")
    collapsed = ": collapsed to one direction" if directions is not None and directions < COLLAPSED else ""
    rows = [
        ("steps", plan.get("steps"), status.get("step")),
        ("hours", plan.get("hours"), None if wall_s is None else wall_s / 3600),
        ("largest memory of a rank, GB (measured on a CPU: with all libraries)", planned_gb, memory),
        ("rank with the largest memory", None, rank),
        ("steps skipped as not finite", None, status.get("skipped_steps")),
        ("cells, all epochs", plan.get("cells_seen"), status.get("cells")),
        ("processes", plan.get("world_size"), status.get("world_size")),
        ("highest cells/s", None, fastest),
        ("fraction of time waiting for data", None, sum(waits) / len(waits) if waits else None),
        (f"effective rank of the embedding, last validation{collapsed}", None, directions),
        ("R² of log depth from the embedding, last validation", None, _last(run.lines, "depth_r2")),
        ("share of the embedding explained by the batch, last validation", None, _last(run.lines, "batch_r2")),
    ]
    return [row for row in rows if row[1] is not None or row[2] is not None]


def _last(lines: list[dict[str, Any]], key: str) -> float | None:
    return next((line[key] for line in reversed(lines) if key in line), None)


@dataclass(frozen=True)
class Column:
    heading: str
    key: str
    sd_key: str | None = None  # key of the standard deviation shown beside it


class TaskTable:
    """Rows of one task on one dataset, as the page shows them."""

    MOST_WITH_SD = 3  # tables with more columns show means alone

    def __init__(self, result: dict[str, Any]) -> None:
        self.rows: list[dict[str, Any]] = result["rows"]
        self.columns = list(columns(self.rows))
        self.metric: str = result["metric"] or ""

    @property
    def best(self) -> str | None:
        """Name of the row with the highest metric; None where no metric ranks the rows."""
        return max(self.points(), key=lambda point: point[1])[0] if self.points() else None

    @property
    def compact(self) -> bool:
        """True where deviations are left out."""
        return sum(column.sd_key is not None for column in self.columns) > self.MOST_WITH_SD

    @property
    def best_baselines(self) -> set[tuple[str, str]]:
        """(name of the row, key of the column) of the highest baseline of each column of means."""
        baselines = [row for row in self.rows if row.get("kind") == "baseline"]
        best = set()
        for key in (column.key for column in self.columns if column.sd_key is not None):
            if having := [row for row in baselines if row.get(key) is not None]:
                best.add((str(max(having, key=lambda row: row[key])["name"]), key))
        return best

    def points(self) -> list[tuple[str, float, float, bool]]:
        """(name, value, sd, is a baseline) of each row by the metric; none where no metric ranks the rows."""
        ranking = [column for column in self.columns if column.heading == self.metric][:1]
        return [
            (str(row["name"]), row[column.key], row.get(column.sd_key or "", 0.0), row.get("kind") == "baseline")
            for column in ranking
            for row in self.rows
            if row.get(column.key) is not None and row.get("kind") != "ceiling"
        ]


def columns(rows: list[dict[str, Any]]) -> Iterator[Column]:
    """Columns over the keys of all rows: `x_mean` and `x_sd` as one; no lists, and no counts that are 0 in all rows."""
    keys = dict.fromkeys(key for row in rows for key in row if key not in ("name", "kind"))
    for key in keys:
        values = [row.get(key) for row in rows]
        if any(isinstance(value, list) for value in values) or not any(
            isinstance(value, float) or value for value in values
        ):
            continue
        if key.endswith("_mean"):
            stem = key.removesuffix("_mean")
            yield Column(stem, key, f"{stem}_sd" if f"{stem}_sd" in keys else None)
        elif not (key.endswith("_sd") and f"{key.removesuffix('_sd')}_mean" in keys):
            yield Column(key, key)


def compare_runs(runs: list[ReportedRun]) -> list[dict[str, Any]]:
    """Each task side by side: its rows by their metric, or its figures where no metric ranks rows (`metric` is empty).

    `lines` are (run, dataset, value by column). Rows called "features + classifier" are one column for each features,
    with the value of the best classifier.
    """
    tasks: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for run in runs:
        for dataset, entry in ((run.evaluation or {}).get("datasets") or {}).items():
            for task, result in entry["tasks"].items():
                if result["skipped"] is None:
                    tasks.setdefault(task, []).append((run.name, dataset, result))
    comparisons = []
    for task, results in tasks.items():
        metric = next((result["metric"] for _, _, result in results if result["metric"]), "")
        lines = [(run, dataset, _values(result, metric)) for run, dataset, result in results]
        names = list(dict.fromkeys(name for _, _, values in lines for name in values))
        if names:
            best_of = any(" + " in row["name"] for _, _, result in results for row in result["rows"])
            comparisons.append({"task": task, "metric": metric, "columns": names, "lines": lines, "best_of": best_of})
    return comparisons


def _values(result: dict[str, Any], metric: str) -> dict[str, Any]:
    if metric:
        best: dict[str, float] = {}
        for name, value, _, _ in TaskTable(result).points():
            features = name.partition(" + ")[0]
            best[features] = max(value, best.get(features, value))
        return best
    return {key: value for key, value in result["figures"].items() if isinstance(value, int | float)}


def number(value: Any) -> str:
    """A value as text: 1,234 or four significant digits; a dash for None; `key value` pairs of a mapping."""
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


def flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) pairs of nested options in their order; lists are joined by commas."""
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping):
            yield from flat(item, f"{name}.")
        elif isinstance(item, list):
            yield name, ", ".join(number(part) for part in item) or "none"
        else:
            yield name, item
