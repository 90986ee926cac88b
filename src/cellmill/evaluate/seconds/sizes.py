"""Sizes of a dataset under evaluation, and CPU-seconds of work that several tasks do.

Tasks estimate their own seconds from these sizes and seconds (`Task.estimate_s`). All seconds are for a
reference core, which multiplies float32 matrices at REFERENCE_FLOPS_PER_S. `planned.py` converts the
seconds to this machine.

The factors in this file were measured. `benchmarks/evaluation.py` compares estimates with measured
seconds, in its column *over plan*.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cellmill.evaluate.evaluated_model import PCA_CELLS

REFERENCE_FLOPS_PER_S = 80e9  # speed of the reference core, in float32 operations per second


@dataclass(frozen=True)
class DatasetSizes:
    """Sizes of one dataset, and the speed of the model.

    Each method that ends in `_s` returns the seconds of one kind of work. Its argument `n` is the number of
    cells that the work reads.
    """

    dataset: str
    n_cells: int  # scored cells
    n_obs: int  # cells of the file; tasks read all of these to find theirs
    n_genes: int  # columns of the file
    genes_per_cell: float  # mean number of genes with counts in a cell
    n_training: int  # training cells of the model
    n_values: Mapping[str, int]  # number of different values by role, such as label and donor
    n_external: int  # models in option `evaluate.external`
    folds: int  # option `evaluate.folds`
    forward_s: float  # seconds to embed a cell with the model

    def count_cells(self, max_cells: int) -> int:
        """Number of cells that a task uses if it draws at most `max_cells`."""
        return min(self.n_cells, max_cells)

    def count_folds(self, roles: Sequence[str], max_values: int) -> int:
        """Number of folds if each fold leaves out a value of one of `roles`.

        A role has at most `max_values` folds. A role with a single value has none.
        """
        n_values = [self.n_values.get(role, 0) for role in roles]
        return sum(min(n, max_values) for n in n_values if n > 1)

    def read_s(self) -> float:
        """Seconds to read the counts of all cells of the file."""
        return 2e-8 * self.n_obs * self.genes_per_cell

    def features_s(self, n: int) -> float:
        """Seconds to compute the usual features of `n` cells.

        They are the seconds to read the file, to embed the cells with the untrained model, and to fit
        principal components to the training cells.
        """
        return self.read_s() + n * self.forward_s + self.training_components_s()

    def components_s(self, n: int) -> float:
        """Seconds to fit principal components to `n` sparse cells."""
        return 4e-7 * n * self.genes_per_cell

    def training_components_s(self) -> float:
        """Seconds to fit principal components to the model's training cells."""
        return self.components_s(min(self.n_training, PCA_CELLS))

    def products_s(self, n: int) -> float:
        """Seconds to compute the dot products of all pairs of `n` sparse cells."""
        return 5e-11 * n**2 * self.genes_per_cell

    def regressions_s(self, n: int) -> float:
        """Seconds to fit both regressions to all genes of `n` cells, if the products of cells are known."""
        if n <= self.n_genes:
            return 4.5e-11 * n**3
        # with more cells than genes, the fits do not use products of cells
        return 3.6e-10 * n * self.n_genes**2

    def halves_s(self, n: int) -> float:
        """Seconds to compute a ceiling of `n` cells, with a regression fitted to each half of the cells."""
        return self.products_s(n) + self.regressions_s(n // 2)

    def folds_s(self, n: int, n_fitted: int, n_folds: int) -> float:
        """Seconds to classify `n` cells by all features, in folds with `n_fitted` fitted cells each."""
        fold_s = 0.05 + 2.5e-4 * n + self.regressions_s(n_fitted) + 2.5e-8 * n * n_fitted
        return 2 * self.products_s(n) + n_folds * fold_s
