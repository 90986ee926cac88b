"""Task `missing_genes`: classification of cells with few measured genes, drawn at random."""

from functools import partial

import numpy as np
import scipy.sparse as sp

from cellmill.config.evaluate import MissingGenesConfig
from cellmill.evaluate.degraded import classify_degraded
from cellmill.evaluate.task import Context, TaskResult


class MissingGenes:
    def __init__(self, config: MissingGenesConfig) -> None:
        self.config = config

    def run(self, context: Context) -> TaskResult:
        """Accuracy with each number of genes, matched and shifted; see `evaluate.degraded`."""
        levels = {f"{n:,} genes": partial(keep_genes, n) for n in self.config.genes}
        return classify_degraded(context, "missing_genes", levels, self.config.neighbors, self.config.repeats)


def keep_genes(n: int, counts: sp.csr_matrix, generator: np.random.Generator) -> sp.csr_matrix:
    """Keep the counts of `n` genes, the same for all cells, drawn from those with any count."""
    expressed = np.unique(counts.indices)
    kept = np.zeros(counts.shape[1], bool)
    kept[generator.permutation(expressed)[:n]] = True
    few = sp.csr_matrix((counts.data * kept[counts.indices], counts.indices.copy(), counts.indptr.copy()), counts.shape)
    few.eliminate_zeros()
    return few
