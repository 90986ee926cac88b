"""The HTML page (overview, training curves, scores of checkpoints), rendered from the files of
stages. It loads nothing from elsewhere.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from cellmill import __version__
from cellmill.errors import DataError
from cellmill.files import span
from cellmill.report import drawing, figures
from cellmill.report.advice import advise
from cellmill.report.collect import ReportedCorpus, ReportedRun
from cellmill.report.standings import Standing, list_comparisons, list_standings, list_unscored
from cellmill.report.tables import (
    bar_half_width,
    compare_runs,
    find_best_baselines,
    find_gap,
    flatten,
    list_columns,
    make_grid,
    to_text,
    to_words,
)
from cellmill.report.training import (
    compare_with_plan,
    describe_cost,
    draw_checkpoints,
    draw_training,
    measure_energy,
)

MEASURES = {
    "n_genes": "genes per cell",
    "n_counts": "counts per cell",
    "mito_frac": "mitochondrial fraction",
    "n_residues": "residues per sequence",
}
"""Histograms of a QC report and their names, in the order of the page."""


def render(
    title: str,
    runs: list[ReportedRun],
    corpora: list[ReportedCorpus],
    sweeps: Sequence[Mapping[str, Any]] = (),
    drawings: drawing.Drawings | None = None,
) -> str:
    """The page as HTML; its figures are added to `drawings`. Raises DataError when two runs or
    corpora share a name.
    """
    _check_unique("runs", [run.name for run in runs])
    _check_unique("corpora", [corpus.name for corpus in corpora])
    standings = list_standings(runs)
    context = {
        "title": title,
        "version": __version__,
        "runs": runs,
        "corpora": corpora,
        "sweeps": sweeps,
        "standings": standings,
        "unscored": list_unscored(runs),
        "comparisons": compare_runs(runs),
        "training": draw_training(runs),
        "measures": MEASURES,
        "figures": figures,
        "drawings": drawing.Drawings() if drawings is None else drawings,
        "list_labels": _list_labels,
        "draw_checkpoints": draw_checkpoints,
        "style": Markup(drawing.read_asset("page.css")),
        "scripts": drawing.load_scripts(),
        "allowed": drawing.hash_scripts(),
    }
    context |= _describe_runs(runs, standings)
    return _make_environment().get_template("page.html").render(context)


def _describe_runs(
    runs: Sequence[ReportedRun], standings: Sequence[Standing]
) -> dict[str, dict[str, Any]]:
    """Variables of the page that have a value for each run, by run."""
    outcomes: dict[str, list[str]] = {run.name: [] for run in runs}
    for standing in standings:
        outcomes[standing.run] += [outcome for outcome, n in standing.outcomes.items() if n]
    return {
        "advice": {run.name: next(advise(run, outcomes[run.name]), "") for run in runs},
        "supervised": {run.name: run.supervised_by for run in runs},
        "costs": {run.name: describe_cost(run) for run in runs},
        "energy": {run.name: measure_energy(run) for run in runs},
        "behind": {run.name: list_comparisons(run, ["behind"]) for run in runs},
        "level": {run.name: list_comparisons(run, ["level", "undecided"]) for run in runs},
        "planned": {run.name: compare_with_plan(run) for run in runs},
    }


def _make_environment() -> Environment:
    """Jinja's environment with the filters of page.html. An undefined variable is an error."""
    environment = Environment(
        loader=PackageLoader("cellmill", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": to_text,
        "flat": flatten,
        "heading": to_words,
        "table_columns": list_columns,
        "best_baselines": find_best_baselines,
        "grid": make_grid,
        "gap": find_gap,
        "bar_half_width": bar_half_width,
        "highest": lambda rows, result: max(rows, key=result.rank_value),
        "short": lambda digest: str(digest)[:12],
        "brief": lambda name: name.replace("logistic regression", "LR"),
        "span": lambda seconds: "–" if seconds is None else span(seconds),
        "percent": lambda share: "–" if share is None else f"{100 * share:.0f} %",
    }
    return environment


def _check_unique(kind: str, names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"two {kind} are called {twice[0]!r}; rename one of their folders")


def _list_labels(cells: list[dict[str, str]], column: str = "label") -> list[str]:
    """Labels, or batches, of a UMAP, the most frequent first."""
    counts = Counter(sorted(cell[column] for cell in cells if cell[column]))
    return [label for label, _ in counts.most_common()]
