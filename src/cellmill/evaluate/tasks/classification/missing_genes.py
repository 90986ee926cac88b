"""Task `missing_genes`: classifiers of labels on cells of which few genes are measured
(docs/evaluation.md).
"""

from dataclasses import replace
from functools import partial

import numpy as np
import scipy.sparse as sp

from cellmill.config.parts.tasks import MissingGenesConfig
from cellmill.evaluate.features.cell_features import keep_columns
from cellmill.evaluate.features.components import COMPONENTS
from cellmill.evaluate.methods import ALL_GENES, EMBEDDING
from cellmill.evaluate.task import Skipped
from cellmill.evaluate.tasks.classification.degraded import (
    ComponentFitter,
    CountsByLevel,
    Degradation,
    Degraded,
    FeaturesByLevel,
)
from cellmill.runs.results import ScoredMethod

PANEL_EMBEDDING = replace(EMBEDDING, features="embedding of the panel")
PANEL_COMPONENTS = ScoredMethod(f"PCA{COMPONENTS} of the panel")
PANEL_GENES = ScoredMethod("all genes of the panel")


class MissingGenes(Degraded):
    config: MissingGenesConfig

    def degradations(self) -> list[Degradation]:
        return [partial(keep_genes, n) for n in self.config.genes]

    def absent_levels(self, whole: sp.csr_matrix) -> dict[str, str]:
        n_expressed = len(np.unique(whole.indices))
        genes = self.config.genes
        if min(genes) > n_expressed:
            raise Skipped(
                f"the cells express {n_expressed:,} genes, and genes keeps {min(genes):,} or more; set fewer"
            )
        return {
            level: f"No column for {level}: the cells express {n_expressed:,}."
            for level, n in zip(self.config.levels(), genes)
            if n > n_expressed
        }

    def adapt_features(
        self,
        level: str,
        counts: CountsByLevel,
        features: FeaturesByLevel,
        fitter: ComponentFitter | None,
        generator: np.random.Generator,
    ) -> FeaturesByLevel:
        """Features of the cells at `level`, under names "of the panel".

        Without features of whole cells under these names, classifiers are fitted on the panel only.
        """
        panel_features = {PANEL_EMBEDDING: features[level][EMBEDDING]}
        if fitter is not None:
            panel_features[PANEL_COMPONENTS] = fitter.fit_panel(counts[level])(counts[level])
        panel_features[PANEL_GENES] = features[level][ALL_GENES]
        return {level: panel_features}


def keep_genes(n: int, counts: sp.csr_matrix, generator: np.random.Generator) -> sp.csr_matrix:
    """Keep the counts of `n` genes, the same for all cells, drawn from those with any count; all genes
    if these are fewer.
    """
    drawn = generator.permutation(np.unique(counts.indices))[:n]
    return keep_columns(counts, np.isin(np.arange(counts.shape[1]), drawn))
