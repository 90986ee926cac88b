"""Task `missing_genes`: classifiers of labels on cells of which few genes are measured
(docs/evaluation.md).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import scipy.sparse as sp

from cellmill.config.parts.tasks import MissingGenesConfig
from cellmill.evaluate.features.cell_features import keep_columns
from cellmill.evaluate.features.components import COMPONENTS
from cellmill.evaluate.methods import ALL_GENES, EMBEDDING, Features
from cellmill.evaluate.tasks.classification.degraded import ComponentFitter, Degrade, Degraded
from cellmill.runs.results import ScoredMethod

PANEL_EMBEDDING = replace(EMBEDDING, features="embedding of the panel")
PANEL_COMPONENTS = ScoredMethod(f"PCA{COMPONENTS} of the panel")
PANEL_GENES = ScoredMethod("all genes of the panel")


class MissingGenes(Degraded):
    config: MissingGenesConfig

    def losses(self) -> list[Degrade]:
        return [partial(keep_genes, n) for n in self.config.genes]

    def fit_to_level(
        self,
        level: str,
        counts: Mapping[str, sp.csr_matrix],
        by_level: Mapping[str, Features],
        fitter: ComponentFitter,
        generator: np.random.Generator,
    ) -> dict[str, Features]:
        """Features of the panel of `level`, which only the cells of this level have; the model's
        features take part.
        """
        panel_features = {
            PANEL_EMBEDDING: by_level[level][EMBEDDING],
            PANEL_COMPONENTS: fitter.project_panel(counts[level]),
            PANEL_GENES: by_level[level][ALL_GENES],
        }
        return {level: panel_features}


def keep_genes(n: int, counts: sp.csr_matrix, generator: np.random.Generator) -> sp.csr_matrix:
    """Keep the counts of `n` genes, the same for all cells, drawn from those with any count."""
    drawn = generator.permutation(np.unique(counts.indices))[:n]
    return keep_columns(counts, np.isin(np.arange(counts.shape[1]), drawn))
