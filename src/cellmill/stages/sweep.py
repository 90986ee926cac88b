"""sweep: what the runs of a sweep gave, side by side.

results.csv has one row for each run and each value that it was judged by: `run`, the sweep's axes, `parameters`,
`cells` (for training), `steps`, `cells_seen`, `gpu_hours`, `cpu_core_hours`, `dataset`, `task`, `name`, `kind`
(model or baseline), `metric`, `value`, `sd`. curves.json beside it has what the report draws (`report.sweep.curves`).
"""

import csv
import io
from pathlib import Path

from cellmill.errors import DataError
from cellmill.files import read_json, write_json, write_text
from cellmill.report.collect import read_run
from cellmill.report.sweep import curves, rows_of


def run(*, values: Path, runs: Path, out: Path) -> None:
    """Write results.csv to `out`, and curves.json beside it.

    `values` is a JSON file with the values by axis of each run, `runs` the folder of all runs.
    """
    of_runs = read_json(values)
    axes = list(next(iter(of_runs.values()), {}))
    rows = [row for name, of_run in of_runs.items() for row in rows_of(read_run(runs / name), of_run)]
    if not rows:
        raise DataError(f"{runs}: no run of the sweep has a result; train and evaluate them first")
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_json(
        out.parent / "curves.json",
        {"name": out.parent.name, "axes": axes, "n_runs": len(of_runs), "curves": curves(rows, axes)},
    )
    write_text(out, text.getvalue())
    print(f"{len(of_runs)} runs, {len(rows):,} values -> {out}")
