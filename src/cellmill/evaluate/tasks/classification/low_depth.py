"""Task `low_depth`: classifiers of labels, tested on cells that keep a fraction of their counts.

docs/evaluation.md describes the task. `degraded.py` has most of the work.
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

    def make_degradations(self) -> list[Degradation]:
        return [partial(thin, frac) for frac in self.config.count_fracs]

    def adapt_features(
        self,
        level: str,
        counts_by_level: CountsByLevel,
        features_by_level: FeaturesByLevel,
        fitter: ComponentFitter | None,
        generator: np.random.Generator,
    ) -> FeaturesByLevel:
        """Compute components of the cells at WHOLE and at every level.

        The components are fitted to training cells that are thinned to `level`.
        """
        if fitter is None:
            return {}
        thin_to_level = self.make_degradations()[self.config.levels().index(level)]
        project = fitter.fit_thinned(thin_to_level, generator)
        return {
            name: {THINNED_COMPONENTS: project(counts)} for name, counts in counts_by_level.items()
        }


def thin(frac: float, counts: sp.csr_matrix, generator: np.random.Generator) -> sp.csr_matrix:
    """Keep each molecule of `counts`, `(cells, genes)`, with probability `frac`."""
    thinned = counts.copy()
    thinned.data = generator.binomial(counts.data, frac).astype(counts.dtype)
    thinned.eliminate_zeros()
    return thinned
