"""Task `missing_genes`: classifiers of labels, tested on cells that keep the counts of few genes.

docs/evaluation.md describes the task. `degraded.py` has most of the work. The genes that cells keep are
called a panel.
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

# features of cells that have only the genes of a panel
PANEL_EMBEDDING = replace(EMBEDDING, features="embedding of the panel")
PANEL_COMPONENTS = ScoredMethod(f"PCA{COMPONENTS} of the panel")
PANEL_GENES = ScoredMethod("all genes of the panel")


class MissingGenes(Degraded):
    config: MissingGenesConfig

    def make_degradations(self) -> list[Degradation]:
        return [partial(keep_genes, n_genes) for n_genes in self.config.genes]

    def explain_absent_levels(self, whole: sp.csr_matrix) -> dict[str, str]:
        n_expressed = len(np.unique(whole.indices))
        genes = self.config.genes
        if min(genes) > n_expressed:
            raise Skipped(
                f"the cells express {n_expressed:,} genes, and genes keeps {min(genes):,} or more; set fewer"
            )
        return {
            level: f"No column for {level}: the cells express {n_expressed:,}."
            for level, n_genes in zip(self.config.levels(), genes)
            if n_genes > n_expressed
        }

    def adapt_features(
        self,
        level: str,
        counts_by_level: CountsByLevel,
        features_by_level: FeaturesByLevel,
        fitter: ComponentFitter | None,
        generator: np.random.Generator,
    ) -> FeaturesByLevel:
        """Return the features of the cells at `level`, with names that end in "of the panel".

        There are no features of whole cells with these names, so classifiers are fitted on cells of the
        panel only.
        """
        features = features_by_level[level]
        panel_features = {PANEL_EMBEDDING: features[EMBEDDING]}
        if fitter is not None:
            panel = counts_by_level[level]
            panel_features[PANEL_COMPONENTS] = fitter.fit_panel(panel)(panel)
        panel_features[PANEL_GENES] = features[ALL_GENES]
        return {level: panel_features}


def keep_genes(
    n_genes: int, counts: sp.csr_matrix, generator: np.random.Generator
) -> sp.csr_matrix:
    """Keep the counts of `n_genes` genes, and drop all other counts. All cells keep the same genes.

    The genes are drawn from the genes that have a count in any cell of `counts`, `(cells, genes)`. If there
    are fewer such genes than `n_genes`, all counts are kept.
    """
    drawn = generator.permutation(np.unique(counts.indices))[:n_genes]
    return keep_columns(counts, np.isin(np.arange(counts.shape[1]), drawn))
