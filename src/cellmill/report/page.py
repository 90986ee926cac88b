"""The HTML page, rendered from what stages wrote: it computes no result and loads nothing from elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from cellmill import __version__
from cellmill.errors import DataError
from cellmill.report import figures
from cellmill.report.collect import ReportedCorpus, ReportedRun, largest_memory, losses
from cellmill.report.task_table import TaskTable, compare_runs
from cellmill.runs.run_cost import span

MEASURES = {"n_genes": "genes per cell", "n_counts": "counts per cell", "mito_frac": "mitochondrial fraction"}


def render(title: str, runs: list[ReportedRun], corpora: list[ReportedCorpus]) -> str:
    """The page as HTML, with user text escaped. Raises DataError when two runs or corpora share a name."""
    for kind, names in (("runs", [r.name for r in runs]), ("corpora", [c.name for c in corpora])):
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise DataError(f"two {kind} are called {twice[0]!r}; rename one of their folders")
    loader = PackageLoader("cellmill", "report")
    environment = Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.filters.update(
        number=number, flat=flat, short=short, span=duration, percent=percent, heading=heading, task_table=TaskTable
    )
    return environment.get_template("page.html").render(
        title=title,
        version=__version__,
        runs=runs,
        corpora=corpora,
        comparisons=compare_runs(runs),
        losses={r.name: losses(r.evaluation) for r in runs},
        planned={r.name: planned_and_measured(r) for r in runs},
        measures=MEASURES,
        colour=figures.colour,
        figure=_Figures(runs),
    )


class _Figures:
    """Figures of the page, drawn when the template asks for them."""

    def __init__(self, runs: list[ReportedRun]) -> None:
        self._runs = runs

    def loss(self, run: ReportedRun) -> Markup:
        return Markup(figures.loss_curve(run.lines))

    def validation(self) -> Markup:
        return Markup(figures.compare_validation({r.name: r.lines for r in self._runs}))

    def ranking(self, table: TaskTable) -> Markup:
        return Markup(figures.dots(table.points(), table.metric))

    def qc(self, histogram: Mapping[str, Any], name: str) -> Markup:
        return Markup(figures.histogram(histogram["edges"], histogram["before"], histogram["after"], name))

    def umap(self, rows: list[dict[str, str]], legend: list[dict[str, Any]]) -> Markup:
        index = {entry["label"]: number for number, entry in enumerate(legend)}
        classes = np.array([index.get(row["label"], -1) for row in rows])
        x, y = (np.array([float(row[axis]) for row in rows]) for axis in ("x", "y"))
        return Markup(figures.scatter(x, y, classes))

    def legend(self, rows: list[dict[str, str]]) -> list[dict[str, Any]]:
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
    rows = [
        ("steps", plan.get("steps"), status.get("step")),
        ("hours", plan.get("hours"), None if wall_s is None else wall_s / 3600),
        ("largest memory of a rank, GB", planned_gb, memory),
        ("rank with the largest memory", None, rank),
        ("steps skipped as not finite", None, status.get("skipped_steps")),
        ("cells, all epochs", plan.get("cells_seen"), status.get("cells")),
        ("processes", plan.get("world_size"), status.get("world_size")),
        ("highest cells/s", None, fastest),
        ("fraction of time waiting for data", None, sum(waits) / len(waits) if waits else None),
    ]
    return [row for row in rows if row[1] is not None or row[2] is not None]


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


def duration(seconds: float | None) -> str:
    """A time span in its largest unit; a dash for None."""
    return "–" if seconds is None else span(seconds)


def percent(fraction: float | None) -> str:
    """A fraction as whole percent; a dash for None."""
    return "–" if fraction is None else f"{100 * fraction:.0f} %"


def short(digest: Any) -> str:
    """The first twelve characters of a digest."""
    return str(digest)[:12]


def heading(key: str) -> str:
    """A key as words."""
    return key.replace("_", " ")


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
