"""Stages report (one page over all runs and corpora) and sweep (results of its runs side by side).

results.csv has one row for each run and each value by which it was judged: `run`, the sweep's axes,
`parameters`, `cells` (for training), `steps`, `cells_seen`, `gpu_hours`, `cpu_core_hours`,
`dataset`, `task`, `name`, `kind` (model or baseline), `metric`, `value`, `sd`. curves.json next to
it has what the report draws (`report.sweep.SweepCurves`).
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
from cellmill.report.sweep import SweepCurves, list_rows, make_scalings, read_sweep


def report(
    *,
    options: ReportOptions,
    runs: list[Path],
    corpora: list[Path],
    out: Path,
    sweeps: Sequence[Path] = (),
) -> None:
    """Write the page over `runs`, `corpora` and the curves of `sweeps` to `out` (index.html).

    Each chart is in figures/ next to the page, as SVG and its data as CSV. Raise DataError for a
    damaged file.
    """
    reported = [*map(read_run, runs)]
    described = [*map(read_corpus, corpora)]
    swept = [*map(read_sweep, sweeps)]
    missing = describe_missing(reported)
    if missing:
        print(missing)
    page_charts = PageCharts(len(runs))
    page = render(options.report.title, reported, described, swept, page_charts)
    write_text(out, page)
    page_charts.save(out.parent / "figures")
    print(f"report of {', '.join(run.name for run in reported)} -> {out}")


def sweep(*, values: Path, runs: Path, out: Path) -> None:
    """Write results.csv to `out`, and curves.json to its folder.

    `values` is a JSON file: values by axis of each run.
    """
    values_by_run = read_json(values)
    axes = list(next(iter(values_by_run.values()), {}))
    rows = []
    for name, values_of_run in values_by_run.items():
        rows += list_rows(read_run(runs / name), values_of_run)
    if not rows:
        raise DataError(f"{runs}: no run of the sweep has a result; train and evaluate them first")
    scalings = make_scalings(rows, axes)
    about = SweepCurves(out.parent.name, axes, len(values_by_run), scalings)
    write_json(out.parent / "curves.json", asdict(about))
    csv_rows = [row.to_csv_row() for row in rows]
    with atomic_path(out) as path, open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(csv_rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(csv_rows)
    print(f"{len(values_by_run)} runs, {len(rows):,} values -> {out}")
