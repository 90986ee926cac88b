"""The HTML page of runs, corpora and sweeps.

The page contains all its scripts and data, so it needs no network.
"""

import base64
import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from typing import Any, NamedTuple

import vl_convert
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from cellmill import __version__
from cellmill.errors import DataError
from cellmill.files import user_cache, write_text
from cellmill.report.checkpoints import make_checkpoint_charts
from cellmill.report.collect import ReportedCorpus, ReportedRun
from cellmill.report.drawing.cell_counts import make_confusion_chart, make_histogram_chart
from cellmill.report.drawing.chart import choose_colour
from cellmill.report.drawing.curves import make_scaling_chart
from cellmill.report.drawing.page_charts import PageCharts
from cellmill.report.drawing.umap import find_max_cells, list_categories, make_umap_chart
from cellmill.report.overview import (
    RELATIONS,
    describe_missing,
    describe_unscored,
    group_by_advice,
    list_headlines,
    list_verdict_sentences,
    summarise_behind,
)
from cellmill.report.side_by_side import compare_runs
from cellmill.report.standings import list_standings
from cellmill.report.sweeps.scalings import SweepCurves
from cellmill.report.task_table import (
    find_best_baselines,
    find_best_row,
    find_gap,
    find_largest_difference,
    list_columns,
    make_grid,
)
from cellmill.report.text import (
    abbreviate_classifiers,
    list_option_pairs,
    to_duration,
    to_percent,
    to_text,
    to_words,
    with_noun,
)
from cellmill.report.training import (
    compare_with_plan,
    describe_cost,
    estimate_energy,
    make_log_charts,
    make_loss_charts,
)
from cellmill.runs.results import TOLERANCE

HISTOGRAMS = {
    "n_genes": "genes per cell",
    "n_counts": "counts per cell",
    "mito_frac": "mitochondrial fraction",
    "n_residues": "residues per sequence",
}
"""Titles of the histograms in a report of quality control (QC), by quantity, in the order of the page."""
FILTERS: tuple[Callable[..., Any], ...] = (
    # values
    to_text,
    with_noun,
    to_words,
    to_duration,
    to_percent,
    list_option_pairs,
    abbreviate_classifiers,
    # runs
    describe_cost,
    estimate_energy,
    compare_with_plan,
    make_checkpoint_charts,
    # results, rows and verdicts of a task
    list_columns,
    find_best_baselines,
    make_grid,
    find_gap,
    find_best_row,
    find_largest_difference,
)
"""Functions that the templates use as filters. A filter has the name of its function.

The filters return texts of values, or contents of a run or of a task's result.
"""
FUNCTIONS: tuple[Callable[..., Any], ...] = (
    choose_colour,
    make_confusion_chart,
    make_histogram_chart,
    make_scaling_chart,
    make_umap_chart,
    list_categories,
)
"""Functions that the templates call by their names. They make single charts, colours and categories."""


class Scripts(NamedTuple):
    """JavaScript of the page."""

    vega: Markup  # Vega, Vega-Lite and vega-embed
    page: Markup  # page.js


def render(
    title: str,
    runs: list[ReportedRun],
    corpora: list[ReportedCorpus],
    sweeps: Sequence[SweepCurves] = (),
    page_charts: PageCharts | None = None,
) -> str:
    """Render the page as HTML. Add its charts to `page_charts`, which the caller may then save.

    Raise DataError if two runs or two corpora have the same name.
    """
    _check_unique("runs", [run.name for run in runs])
    _check_unique("corpora", [corpus.name for corpus in corpora])
    standings = list_standings(runs)
    return (
        _make_environment()
        .get_template("page.html")
        .render(
            title=title,
            version=__version__,
            runs=runs,
            corpora=corpora,
            sweeps=sweeps,
            # overview
            missing_sentence=describe_missing(runs),
            unscored_sentences=describe_unscored(runs),
            headlines=list_headlines(standings),
            names_by_advice=group_by_advice(runs),
            standings=standings,
            outcomes=[*RELATIONS],
            tolerance=TOLERANCE,
            tasks_across_runs=compare_runs(runs),
            behind_summaries=summarise_behind(runs),
            behind_sentences=list_verdict_sentences(runs, "behind"),
            inconclusive_sentences=list_verdict_sentences(runs, "level", "undecided"),
            # charts
            loss_charts=[*make_loss_charts(runs)],
            logged_charts=[*make_log_charts(runs)],
            histogram_names=HISTOGRAMS,
            max_umap_cells=find_max_cells(sum(len(run.umap_by_dataset) for run in runs)),
            page_charts=page_charts or PageCharts(len(runs)),
            # style and scripts
            style=Markup(_read_asset("page.css")),
            scripts=load_scripts(),
            script_sources=make_script_sources(),
        )
    )


def _check_unique(kind: str, names: list[str]) -> None:
    """Raise DataError if a name occurs twice. `kind` is runs or corpora."""
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise DataError(f"two {kind} are called {repeated[0]!r}; rename one of their folders")


@cache
def _make_environment() -> Environment:
    """Make the Jinja environment of the templates. An undefined variable is an error there."""
    environment = Environment(
        loader=PackageLoader("cellmill", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {function.__name__: function for function in FILTERS}
    environment.globals |= {function.__name__: function for function in FUNCTIONS}
    return environment


def _read_asset(name: str) -> str:
    """Read the text of a file next to this module."""
    return files("cellmill.report").joinpath(name).read_text(encoding="utf-8")


@cache
def load_scripts() -> Scripts:
    """Load the scripts of the page.

    Bundling Vega takes two seconds, so the bundle is kept in a cache. Each user has their own cache.
    In a shared cache, a user could put scripts into the pages of other users.
    """
    name = f"vega-{version('vl-convert-python')}.js"
    try:
        bundle = (user_cache() / name).read_text(encoding="utf-8")
    except (OSError, DataError, UnicodeDecodeError):
        # The argument of javascript_bundle is optional, but the package's stub requires it.
        bundle = vl_convert.javascript_bundle()  # type: ignore[call-arg]
        # a bundle that cannot be kept is made again for the next page
        with suppress(OSError, DataError):
            cached = user_cache() / name
            cached.parent.mkdir(parents=True, exist_ok=True)
            write_text(cached, bundle)
    return Scripts(Markup(bundle), Markup(_read_asset("page.js")))


@cache
def make_script_sources() -> str:
    """Make the value of `script-src` in the page's content security policy.

    The value has the digest of each script of the page, so browsers run no other script.
    """
    sources = []
    for script in load_scripts():
        digest = hashlib.sha256(script.encode()).digest()
        sources.append(f"'sha256-{base64.b64encode(digest).decode()}'")
    return " ".join(sources)
