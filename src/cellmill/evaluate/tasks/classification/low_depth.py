"""Task `low_depth`: classifiers of labels on cells with a share of their counts
(docs/evaluation.md).
"""

from functools import partial

import numpy as np
import scipy.sparse as sp

from cellmill.config.parts.tasks import LowDepthConfig
from cellmill.evaluate.features.components import COMPONENTS
from cellmill.evaluate.tasks.classification.degraded import (
    ComponentFitter,
    CountsByLevel,
    Degradation,
    Degraded,
    FeaturesByLevel,
)
from cellmill.runs.results import ScoredMethod

THINNED_COMPONENTS = ScoredMethod(f"PCA{COMPONENTS} of thinned cells")


class LowDepth(Degraded):
    config: LowDepthConfig

    def degradations(self) -> list[Degradation]:
        return [partial(thin, frac) for frac in self.config.count_fracs]

    def adapt_features(
        self,
        level: str,
        counts: CountsByLevel,
        features: FeaturesByLevel,
        fitter: ComponentFitter | None,
        generator: np.random.Generator,
    ) -> FeaturesByLevel:
        """Components of the cells at every level, fitted on training cells that are thinned to `level`."""
        if fitter is None:
            return {}
        thin_to_level = self.degradations()[self.config.levels().index(level)]
        project = fitter.fit_thinned(thin_to_level, generator)
        return {
            other: {THINNED_COMPONENTS: project(other_counts)}
            for other, other_counts in counts.items()
        }


def thin(frac: float, counts: sp.csr_matrix, generator: np.random.Generator) -> sp.csr_matrix:
    """Keep each count with probability `frac`."""
    thinned = counts.copy()
    thinned.data = generator.binomial(counts.data, frac).astype(counts.dtype)
    thinned.eliminate_zeros()
    return thinned
