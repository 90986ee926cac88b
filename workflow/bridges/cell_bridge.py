"""Metrics of cell-eval on predicted cells of held-out perturbations (`perturbed_cells`), for each method.

All of its metrics by its own functions and defaults, each a mean over the perturbations that have it, and its own
ceiling, of halves of the measured cells. Differential expression of the measured cells is computed once.
"""

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from missing import end_without

os.environ.setdefault("TQDM_DISABLE", "1")  # bars of progress in the log
try:
    import anndata as ad
    import numpy as np
    from bridge_result import write_rows
    from cell_eval import MetricsEvaluator
    from cell_eval.metrics import metrics_registry
    from cell_eval.utils import guess_is_lognorm
    from perturbed_cells import COLUMN, FEWEST_TO_RANK, PerturbedCells, read_arguments, read_changes
except ImportError as error:
    end_without("cell-eval", "0.8.2", error)

CEILING = "split halves"
MAX_CONTROLS = 10_000  # a half; pearson_edistance takes memory for their square
COUNTS = "de_nsig_counts"  # two metrics in one
RANKS = "discrimination_score"  # beginning of the metrics that rank perturbations among each other


def measure(cells: PerturbedCells, method: str, folder: Path, threads: int) -> dict[str, float]:
    """Metrics of a method by name; `folder` keeps differential expression of the measured cells."""
    predicted, known = cells.predicted(method), folder / "first" / "real_de.csv"
    check_scale(method, predicted)
    evaluator = MetricsEvaluator(
        predicted,
        cells.measured,
        de_real=str(known) if known.exists() else None,
        control_pert=cells.control,
        pert_col=COLUMN,
        num_threads=threads,
        outdir=str(folder / (method if known.exists() else "first")),
    )
    return means_of(
        evaluator.compute(write_csv=False, skip_metrics=skipped(cells))[0], len(cells.perturbations)
    )


def ceiling(cells: PerturbedCells, folder: Path, threads: int) -> dict[str, float]:
    """The package's own ceiling: one half of the measured cells as the prediction of the other, for twice the cells."""
    evaluator = MetricsEvaluator(
        None,
        cells.measured,
        control_pert=cells.control,
        pert_col=COLUMN,
        num_threads=threads,
        outdir=str(folder / "ceiling"),
    )
    made = evaluator.compute_ceiling(write_csv=False, skip_metrics=skipped(cells), seed=cells.seed)[
        1
    ]
    means = means_of(made, len(cells.perturbations))
    return {name: value for name, value in means.items() if np.isfinite(value)}


def skipped(cells: PerturbedCells) -> list[str]:
    """Metrics that are not computed."""
    n_controls = max(cells.start.n_obs, int((cells.measured.obs[COLUMN] == cells.control).sum()))
    return ["pearson_edistance"] if n_controls > MAX_CONTROLS else []


def check_scale(name: str, cells: ad.AnnData) -> None:
    """End the process with a line if the package would take the values for anything but log-normalised ones."""
    try:
        taken = guess_is_lognorm(cells)
    except ValueError as error:
        sys.exit(f"cellmill: {name}: cell-eval refuses the values: {error}")
    if not taken:
        sys.exit(f"cellmill: {name}: cell-eval takes the values for counts: none has a fraction")


def means_of(results: Any, n_perturbations: int) -> dict[str, float]:
    """Mean of each metric of a polars table over the perturbations that have it; NaN if none has.

    Of one perturbation, those that rank it among the others are NaN as well: they are perfect for every method.
    """
    names = [name for name in metrics_registry.list_metrics() if name != COUNTS]
    names += [name for name in results.columns if name.startswith(COUNTS)]
    values = {}
    for name in names:
        of_name = (
            np.asarray(results[name].to_numpy(), float) if name in results.columns else np.array([])
        )
        values[name] = (
            float(of_name[np.isfinite(of_name)].mean())
            if np.isfinite(of_name).any()
            else float("nan")
        )
        if name.startswith(RANKS) and n_perturbations < FEWEST_TO_RANK:
            values[name] = float("nan")
    return values


def main() -> None:
    given = read_arguments()
    cells, threads = read_changes(given.changes), min(given.threads, len(os.sched_getaffinity(0)))
    check_scale("measured cells", cells.measured)
    with TemporaryDirectory() as folder:
        values = {method: measure(cells, method, Path(folder), threads) for method in cells.changes}
        values[CEILING] = ceiling(cells, Path(folder), threads)
    is_control = (cells.measured.obs[COLUMN] == cells.control).to_numpy()
    about = {
        "dataset": given.changes.stem,
        "model_digest": cells.model_digest,
        "n_perturbations": len(cells.perturbations),
        "n_cells": int((~is_control).sum()),
        "n_controls": int(is_control.sum()),
        "n_start_controls": cells.start.n_obs,
        "n_genes": cells.measured.n_vars,
        "below_zero_frac": {
            method: float((cells.profiles(method) < 0).mean()) for method in cells.changes
        },
    }
    write_rows(given.out, "cell-eval", about, cells.kinds | {CEILING: "ceiling"}, values)


if __name__ == "__main__":
    main()
