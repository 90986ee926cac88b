"""Coverage of a model's genes by a file: an embedding without most of them does not represent the whole cell.

Measured on 700 PBMC: with half of the genes gone the cosine to the whole cell's vector is .97, with nine tenths .81.
"""

from dataclasses import dataclass

import numpy as np

from cellmill.data.genes import GeneColumns
from cellmill.data.vocabulary import Vocabulary

FEW = 0.5  # share of the expression below which a file is warned about
_EXAMPLES = 3


@dataclass(frozen=True)
class GeneCoverage:
    """Genes of the vocabulary with a column in the file."""

    n_present: int
    n_genes: int
    expressed_frac: float
    """Share of a training cell's genes that are measured, on average: genes weighted by the cells that express them."""
    absent: tuple[str, ...]
    """Symbols of the most widely expressed genes that the file lacks."""

    def __str__(self) -> str:
        lacks = f" (without {', '.join(self.absent)}, ...)" if self.absent else ""
        return (
            f"{self.n_present:,} of the model's {self.n_genes:,} genes, "
            f"{self.expressed_frac:.1%} of what a cell expresses{lacks}"
        )


def gene_coverage(columns: GeneColumns, vocabulary: Vocabulary) -> GeneCoverage:
    """Coverage of `vocabulary` by a file with these columns; imported models count every gene alike."""
    present = np.zeros(vocabulary.n_genes, dtype=bool)
    present[columns.target[columns.target >= 0]] = True
    cells = vocabulary.n_cells.astype(np.float64)
    weights = cells if cells.any() else np.ones(vocabulary.n_genes)
    absent = np.flatnonzero(~present)
    common = absent[np.argsort(-weights[absent], kind="stable")][:_EXAMPLES]
    frac = float(weights[present].sum() / weights.sum())
    return GeneCoverage(int(present.sum()), vocabulary.n_genes, frac, tuple(vocabulary.symbols[row] for row in common))
