"""report: one self-contained page over all runs and corpora. It reads what stages wrote and draws it; no number is
computed here, and nothing on the page is fetched from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from cellmill import __version__
from cellmill.config.options import ReportOptions
from cellmill.errors import DataError
from cellmill.files import read_json, write_text
from cellmill.report import figures
from cellmill.report.collect import ReportedCorpus, ReportedRun, largest_memory, losses, read_corpus, read_run
from cellmill.runs.run_cost import span

MEASURES = {"n_genes": "genes of a cell", "n_counts": "counts of a cell", "mito_frac": "mitochondrial fraction"}


def run(*, options: ReportOptions, runs: list[Path], corpora: list[Path], out: Path) -> None:
    """Writes the page over the folders `runs` and `corpora` to `out` (index.html)."""
    costs = {path.resolve().name: read_cost(path) for path in runs}
    page = render(
        options.report.title, [read_run(path) for path in runs], [read_corpus(path) for path in corpora], costs
    )
    write_text(out, page)
    print(f"report of {', '.join(path.resolve().name for path in runs)} -> {out}")


def read_cost(run: Path) -> dict[str, Any] | None:
    """cost.json of the run in a folder; None where no training has ended yet."""
    file = run / "train" / "cost.json"
    return read_json(file) if file.exists() else None


def render(
    title: str,
    runs: list[ReportedRun],
    corpora: list[ReportedCorpus],
    costs: Mapping[str, dict[str, Any] | None] | None = None,
) -> str:
    """The page as HTML; whatever users named is escaped. Raises DataError when two runs or corpora share a name."""
    for kind, names in (("runs", [r.name for r in runs]), ("corpora", [c.name for c in corpora])):
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise DataError(f"two {kind} are called {twice[0]!r}; give their folders different names")
    environment = Environment(
        loader=PackageLoader("cellmill", "report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters.update(number=number, flat=flat, short=short, span=lapse, percent=percent)
    return environment.get_template("page.html").render(
        title=title,
        version=__version__,
        runs=runs,
        corpora=corpora,
        losses={r.name: losses(r.evaluation) for r in runs},
        seen={r.name: seen(r) for r in runs},
        costs={r.name: cost for r in runs if (cost := (costs or {}).get(r.name))},
        measures=MEASURES,
        colour=figures.colour,
        best=best_row,
        figure=_Figures(runs),
    )


class _Figures:
    """The figures of the page, each drawn when the template asks for it."""

    def __init__(self, runs: list[ReportedRun]) -> None:
        self._runs = runs

    def loss(self, run: ReportedRun) -> Markup:
        return Markup(figures.loss_curve(run.lines))

    def validation(self) -> Markup:
        return Markup(figures.compare_validation({r.name: r.lines for r in self._runs}))

    def probe(self, rows: list[dict[str, Any]]) -> Markup:
        return Markup(figures.probe_dots(rows))

    def qc(self, histogram: Mapping[str, Any], name: str) -> Markup:
        return Markup(figures.histogram(histogram["edges"], histogram["before"], histogram["after"], name))

    def umap(self, rows: list[dict[str, str]], legend: list[dict[str, Any]]) -> Markup:
        place = {entry["label"]: number for number, entry in enumerate(legend)}
        classes = np.array([place.get(row["label"], -1) for row in rows])
        x, y = (np.array([float(row[axis]) for row in rows]) for axis in ("x", "y"))
        return Markup(figures.scatter(x, y, classes))

    def legend(self, rows: list[dict[str, str]]) -> list[dict[str, Any]]:
        """Labels of a UMAP, the most frequent first, with their colour and number of cells."""
        tally: dict[str, int] = {}
        for row in rows:
            if row["label"]:
                tally[row["label"]] = tally.get(row["label"], 0) + 1
        ordered = sorted(tally.items(), key=lambda item: (-item[1], item[0]))
        return [{"label": label, "n": n, "colour": figures.colour(i)} for i, (label, n) in enumerate(ordered)]


def best_row(rows: list[dict[str, Any]]) -> str:
    """Name of the row with the highest accuracy."""
    return str(max(rows, key=lambda row: row["accuracy_mean"])["name"])


def seen(run: ReportedRun) -> list[tuple[str, Any, Any]]:
    """What was planned of a run beside what was seen: (what, planned, seen); None where it is not known."""
    plan, status = run.plan or {}, run.status or {}
    fastest = max((line["cells_per_s"] for line in run.lines if "cells_per_s" in line), default=None)
    memory, rank = largest_memory(run.lines) or (None, None)
    waits = [line["data_wait_frac"] for line in run.lines if "data_wait_frac" in line]
    wall_s = status.get("wall_s")
    rows = [
        ("steps", plan.get("steps"), status.get("step")),
        ("hours", plan.get("hours"), None if wall_s is None else wall_s / 3600),
        ("memory of the largest process, GB", _planned_memory(plan), memory),
        ("its rank", None, rank),
        ("steps skipped, not finite", None, status.get("skipped_steps")),
        ("cells, with repetition", plan.get("cells_seen"), status.get("cells")),
        ("processes", plan.get("world_size"), status.get("world_size")),
        ("best cells/s", None, fastest),
        ("data wait, fraction", None, sum(waits) / len(waits) if waits else None),
    ]
    return [row for row in rows if row[1] is not None or row[2] is not None]


def _planned_memory(plan: Mapping[str, Any]) -> float | None:
    """GB of tensors; what is seen on a CPU is the whole process, libraries included."""
    return plan["memory"]["total_bytes"] / 1e9 if "memory" in plan else None


def number(value: Any) -> str:
    """A figure as it is printed: thousands set apart, four significant digits, a dash for none."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return str(value)


def lapse(seconds: float | None) -> str:
    """A length of time in its largest unit; a dash where it is not known."""
    return "–" if seconds is None else span(seconds)


def percent(fraction: float | None) -> str:
    """A fraction as whole percent; a dash where it is not known."""
    return "–" if fraction is None else f"{100 * fraction:.0f} %"


def short(digest: Any) -> str:
    """The first twelve characters of a digest."""
    return str(digest)[:12]


def flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Pairs of dotted key and value of nested options, in their order; a list is joined by commas."""
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping):
            yield from flat(item, f"{name}.")
        elif isinstance(item, list):
            yield name, ", ".join(number(part) for part in item) or "none"
        else:
            yield name, item
