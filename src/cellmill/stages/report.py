"""Stages report (one page over all runs and corpora) and sweep (results of its runs side by side).

A sweep has two files. results.csv has a row for each run and each value by which it was judged:
`run`, the sweep's axes, `parameters`, `cells` (for training), `steps`, `cells_seen`, `gpu_hours`,
`cpu_core_hours`, `dataset`, `task`, `name`, `kind` (model, variant, baseline or external), `metric`,
`value`, `sd`.
curves.json has the curves that the report draws (`report.sweeps.scalings.SweepCurves`).
"""

import csv
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from cellmill.config.options import ReportOptions
from cellmill.errors import DataError
from cellmill.files import atomic_path, read_json, write_json, write_text
from cellmill.report.collect import read_corpus, read_run
from cellmill.report.drawing.page_charts import PageCharts
from cellmill.report.overview import describe_missing
from cellmill.report.page import render
from cellmill.report.sweeps.rows import list_rows
from cellmill.report.sweeps.scalings import SweepCurves, make_scalings, read_sweep
from cellmill.report.text import with_noun


def report(
    *,
    options: ReportOptions,
    runs: list[Path],
    corpora: list[Path],
    out: Path,
    sweeps: Sequence[Path] = (),
) -> None:
    """Write the page over `runs`, `corpora` and `sweeps` to `out` (index.html).

    `runs` and `corpora` are folders, `sweeps` are files curves.json. Each chart is saved in
    figures/ next to the page, as SVG and with its data as CSV. Raise DataError for a damaged file.
    """
    reported_runs = [*map(read_run, runs)]
    reported_corpora = [*map(read_corpus, corpora)]
    sweep_curves = [*map(read_sweep, sweeps)]
    missing_sentence = describe_missing(reported_runs)
    if missing_sentence:
        print(missing_sentence)
    page_charts = PageCharts(len(runs))
    title = options.report.title
    page = render(title, reported_runs, reported_corpora, sweep_curves, page_charts)
    write_text(out, page)
    page_charts.save(out.parent / "figures")
    print(f"report of {', '.join(run.name for run in reported_runs)} -> {out}")


def sweep(*, values: Path, runs: Path, out: Path) -> None:
    """Write results.csv to `out`, and curves.json to its folder.

    `values` is a JSON file with the value of each axis, by run and axis; `runs` is the folder that
    has the runs. Raise DataError if no run has a result.
    """
    values_by_run = read_json(values)
    axes = list(next(iter(values_by_run.values()), {}))
    rows = []
    for name, axis_values in values_by_run.items():
        rows += list_rows(read_run(runs / name), axis_values)
    if not rows:
        raise DataError(f"{runs}: no run of the sweep has a result; train and evaluate them first")
    curves = SweepCurves(
        name=out.parent.name,
        axes=axes,
        n_runs=len(values_by_run),
        scalings=make_scalings(rows, axes),
    )
    write_json(out.parent / "curves.json", asdict(curves))
    csv_rows = [row.to_csv_row() for row in rows]
    with atomic_path(out) as path, open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(csv_rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(csv_rows)
    n_runs = with_noun(len(values_by_run), "run")
    print(f"{n_runs}, {with_noun(len(rows), 'value')} -> {out}")
