"""Sizes of a dataset under evaluation, and CPU-seconds of work that several tasks do.

Tasks estimate their seconds from both (`Task.estimate_s`). All seconds are of a reference core, which
multiplies float32 matrices at REFERENCE_FLOPS_PER_S; `planned.py` converts them to this machine.
The factors were measured: column *over plan* of `benchmarks/evaluation.py` compares estimates with
measured seconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cellmill.evaluate.evaluated_model import PCA_CELLS

REFERENCE_FLOPS_PER_S = 80e9


@dataclass(frozen=True)
class DatasetSizes:
    """Sizes of one dataset, the speed of the model, and the seconds of common work: a
    method for each kind, where `n` is the number of cells that the work reads.
    """

    dataset: str
    n_cells: int  # scored cells
    n_obs: int  # cells of the file, all of which tasks read
    n_genes: int  # columns of the file
    genes_per_cell: float  # genes with counts
    n_training: int  # training cells of the model
    n_values: Mapping[str, int]  # different values by role, such as label and donor
    n_external: int  # models of `evaluate.external`
    folds: int  # `evaluate.folds`
    forward_s: float  # seconds in which the model embeds a cell

    def count_cells(self, max_cells: int) -> int:
        """Number of cells of a task that draws at most `max_cells`."""
        return min(self.n_cells, max_cells)

    def count_folds(self, roles: Sequence[str], max_values: int) -> int:
        """Number of folds that leave out values of `roles`, at most `max_values` of each role;
        none of a role with one value.
        """
        n_values = [self.n_values.get(role, 0) for role in roles]
        return sum(min(n, max_values) for n in n_values if n > 1)

    def read_s(self) -> float:
        """Seconds to read the counts of all cells of the file."""
        return 2e-8 * self.n_obs * self.genes_per_cell

    def features_s(self, n: int) -> float:
        """Seconds to read the file, embed `n` cells with the untrained model, and fit components of
        training cells.
        """
        return self.read_s() + n * self.forward_s + self.training_components_s()

    def components_s(self, n: int) -> float:
        """Seconds to fit principal components to `n` sparse cells."""
        return 4e-7 * n * self.genes_per_cell

    def training_components_s(self) -> float:
        """Seconds to fit principal components to the model's training cells."""
        return self.components_s(min(self.n_training, PCA_CELLS))

    def products_s(self, n: int) -> float:
        """Seconds to compute the products of all pairs of `n` sparse cells."""
        return 5e-11 * n**2 * self.genes_per_cell

    def regressions_s(self, n: int) -> float:
        """Seconds to fit both regressions to all genes of `n` cells, whose products are known."""
        if n <= self.n_genes:
            return 4.5e-11 * n**3
        # with more cells than genes, fits do not use products of cells
        return 3.6e-10 * n * self.n_genes**2

    def halves_s(self, n: int) -> float:
        """Seconds to fit a regression to each half of `n` cells, for ceilings."""
        return self.products_s(n) + self.regressions_s(n // 2)

    def folds_s(self, n: int, n_fitted: int, n_folds: int) -> float:
        """Seconds to classify `n` cells by all features, in folds that are fitted on `n_fitted` cells each."""
        fold_s = 0.05 + 2.5e-4 * n + self.regressions_s(n_fitted) + 2.5e-8 * n * n_fitted
        return 2 * self.products_s(n) + n_folds * fold_s
