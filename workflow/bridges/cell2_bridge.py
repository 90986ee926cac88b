"""Metrics of cell-eval2's profile vcc2026 on predicted cells of held-out perturbations (`perturbed_cells`), by method.

The package's preset, but for log-normalised cells, since nothing predicts counts: expression is compared by the mean
over cells, and no gene is left out for few counts. A perturbation not named after a measured gene leaves none out.

The package takes the sampling noise of both sides' means off squared errors, so predicted cells are `sampled`: cells
with exactly the predicted means would have an error that is too small, in another measure for each method. Differential
expression is scanpy's and everything is computed on the CPU, which the file says: by itself the package takes what is
installed, and fails where a GPU is visible without its own package for it.
"""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

from missing import end_without

try:
    from bridge_result import write_rows
    from cell_eval2 import EvalConfig, aggregate_metrics, compute_metrics
    from perturbed_cells import COLUMN, FEWEST_TO_RANK, PerturbedCells, read_arguments, read_changes
except ImportError as error:
    end_without("cell-eval2", "0.20.0", error)

PACKAGE = "cell_eval2"
DE_BACKEND, DEVICE = "scanpy", "cpu"
RANKS = "pds_"  # beginning of the metrics that rank perturbations among each other


class Sentences(logging.Handler):
    """Keeps what the package's loggers warn of, each sentence once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.lines[" ".join(record.getMessage().split())] = None


@contextmanager
def own_warnings() -> Iterator[list[str]]:
    """What the package warns of inside, by its logger or by Python's warnings; those of other packages are shown."""
    found: list[str] = []
    handler, logger = Sentences(), logging.getLogger(PACKAGE)
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            yield found
    finally:
        logger.removeHandler(handler)
    found += handler.lines
    for one in caught:
        if PACKAGE in one.filename:
            found.append(" ".join(str(one.message).split()))


def options_of(cells: PerturbedCells, threads: int, folder: str) -> dict[str, Any]:
    """The preset's options, with those that the cells need."""
    preset: dict[str, Any] = EvalConfig.from_preset("vcc2026").to_dict()
    own_gene = {
        name: name if name in cells.measured.var_names else None for name in cells.perturbations
    }
    changed = {
        "pert_col": COLUMN,
        "control": cells.control,
        "input_type": "lognorm",
        "target_sum": 1e4,
    }
    changed |= {
        "target_gene_map": own_gene,
        "num_threads": threads,
        "cache_real": folder,
        "device": DEVICE,
    }
    return preset | changed | {"de": preset["de"] | {"backend": DE_BACKEND}}


def count_of(found: Any, metric: str) -> int | None:
    """Number of perturbations that a metric's mean is over; None for a ratio of other metrics' sums."""
    of_metric = found.filter(metric=metric)["value"]
    return int(of_metric.is_finite().sum()) if len(of_metric) else None


def main() -> None:
    given = read_arguments()
    cells = read_changes(given.changes)
    values: dict[str, dict[str, float]] = {}
    counts: dict[str, dict[str, int | None]] = {}
    warned: dict[str, list[str]] = {}
    with TemporaryDirectory() as folder:  # keeps what is computed of the measured cells
        config = EvalConfig.from_dict(options_of(cells, given.threads, folder))
        for method in cells.changes:
            try:
                with own_warnings() as warned[method]:
                    found = compute_metrics(cells.sampled(method), cells.measured, config=config)
                    means = dict(
                        sorted(aggregate_metrics(found).select("metric", "mean").iter_rows())
                    )
            except ValueError as error:  # as of a screen without a measurable change
                sys.exit(f"cellmill: {method}: cell-eval2 refuses the cells: {error}")
            counts[method] = {metric: count_of(found, metric) for metric in means}
            if len(cells.perturbations) < FEWEST_TO_RANK:
                means = {
                    name: float("nan") if name.startswith(RANKS) else mean
                    for name, mean in means.items()
                }
            values[method] = means
    about = {
        "dataset": given.changes.stem,
        "model_digest": cells.model_digest,
        "n_perturbations": len(cells.perturbations),
        "n_genes": cells.measured.n_vars,
        "de_backend": DE_BACKEND,
        "device": DEVICE,
        "warnings": {method: lines for method, lines in warned.items() if lines},
    }
    write_rows(given.out, "cell-eval2", about, cells.kinds, values, counts)


if __name__ == "__main__":
    main()
