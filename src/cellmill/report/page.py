"""The HTML page, rendered from what stages wrote: computes no result, loads nothing from elsewhere."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from cellmill import __version__
from cellmill.errors import DataError
from cellmill.report import figures
from cellmill.report.collect import ReportedCorpus, ReportedRun, sentences_of
from cellmill.report.drawing import Drawings, allowed, scripts, text_of
from cellmill.report.over_steps import scores_over_steps
from cellmill.report.overview import standings
from cellmill.report.remake import remake_commands
from cellmill.report.tables import TaskTable, compare_runs, flat, number
from cellmill.report.training import energy_kwh, planned_and_measured, training_figures
from cellmill.runs.run_cost import span

MEASURES = {"n_genes": "genes per cell", "n_counts": "counts per cell", "mito_frac": "mitochondrial fraction"}
MEASURES |= {"n_residues": "residues per sequence"}


def render(
    title: str,
    runs: list[ReportedRun],
    corpora: list[ReportedCorpus],
    sweeps: Sequence[Mapping[str, Any]] = (),
    drawings: Drawings | None = None,
) -> str:
    """The page as HTML, with user text escaped; its figures are added to `drawings`.

    Raises DataError when two runs or corpora share a name.
    """
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
    drawings = Drawings() if drawings is None else drawings
    return environment.get_template("page.html").render(
        title=title,
        version=__version__,
        runs=runs,
        corpora=corpora,
        sweeps=sweeps,
        standings=standings(runs),
        comparisons=compare_runs(runs),
        supervised={r.name: r.supervised_by for r in runs},
        costs={r.name: _cost(r) for r in runs},
        energy={r.name: energy_kwh(r) for r in runs},
        behind={r.name: sentences_of("behind", r.evaluation) for r in runs},
        level={r.name: sentences_of("level", r.evaluation) + sentences_of("undecided", r.evaluation) for r in runs},
        planned={r.name: planned_and_measured(r) for r in runs},
        training=training_figures(runs),
        measures=MEASURES,
        figures=figures,
        drawings=drawings,
        labels_in=_labels,
        remake_commands=remake_commands,
        over_steps=scores_over_steps,
        style=Markup(text_of("page.css")),
        scripts=scripts(),
        allowed=allowed(),
    )


def _cost(run: ReportedRun) -> str | None:
    """GPU-hours of a run, or core-hours where it had no GPU; None before its training has ended."""
    totals = (run.cost or {}).get("totals") or {}
    for key, unit in (("gpu_hours", "GPU-hours"), ("cpu_core_hours", "core-hours")):
        if totals.get(key):
            return f"{float(f'{totals[key]:.2g}'):g} {unit}"
    return None


def _labels(rows: list[dict[str, str]], by: str = "label") -> list[str]:
    """Labels, or batches, of a UMAP, the most frequent first."""
    tally = Counter(row[by] for row in rows if row[by])
    return sorted(tally, key=lambda label: (-tally[label], label))
