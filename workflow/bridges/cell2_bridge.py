"""Metrics of cell-eval2's profile vcc2026 on predicted cells of held-out perturbations (`perturbed_cells`), by method.

The package's preset, but for log-normalised cells, since nothing predicts counts: expression is compared by the mean
over cells, and no gene is left out for few counts. A perturbation not named after a measured gene leaves none out.
"""

import sys
from tempfile import TemporaryDirectory

from missing import end_without

try:
    from bridge_result import write_rows
    from cell_eval2 import EvalConfig, aggregate_metrics, compute_metrics
    from perturbed_cells import COLUMN, read_arguments, read_changes
except ImportError as error:
    end_without("cell-eval2", "0.20.0", error)

given = read_arguments()
cells = read_changes(given.changes)
own_gene = {name: name if name in cells.measured.var_names else None for name in cells.perturbations}
values = {}
with TemporaryDirectory() as folder:  # keeps what is computed of the measured cells
    options = {"pert_col": COLUMN, "control": cells.control, "input_type": "lognorm", "target_sum": 1e4}
    options |= {"target_gene_map": own_gene, "num_threads": given.threads, "cache_real": folder}
    config = EvalConfig.from_dict(EvalConfig.from_preset("vcc2026").to_dict() | options)
    for method in cells.changes:
        try:
            found = aggregate_metrics(compute_metrics(cells.predicted(method), cells.measured, config=config))
        except ValueError as error:  # as of a screen without a measurable change
            sys.exit(f"cellmill: {method}: cell-eval2 refuses the cells: {error}")
        values[method] = dict(sorted(found.select("metric", "mean").iter_rows()))
about = {"dataset": given.changes.stem, "n_perturbations": len(own_gene), "n_genes": cells.measured.n_vars}
write_rows(given.out, "cell-eval2", about, cells.kinds, values)
