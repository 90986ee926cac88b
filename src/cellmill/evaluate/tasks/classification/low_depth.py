"""Task `low_depth`: classifiers of labels on cells with a share of their counts
(docs/evaluation.md).
"""

from collections.abc import Mapping
from functools import partial

import numpy as np
import scipy.sparse as sp

from cellmill.config.parts.tasks import LowDepthConfig
from cellmill.evaluate.features.components import COMPONENTS
from cellmill.evaluate.methods import Features
from cellmill.evaluate.tasks.classification.degraded import ComponentFitter, Degrade, Degraded
from cellmill.runs.results import ScoredMethod

THINNED_COMPONENTS = ScoredMethod(f"PCA{COMPONENTS} of thinned cells")


class LowDepth(Degraded):
    config: LowDepthConfig

    def losses(self) -> list[Degrade]:
        return [partial(thin, frac) for frac in self.config.count_fracs]

    def fit_to_level(
        self,
        level: str,
        counts: Mapping[str, sp.csr_matrix],
        by_level: Mapping[str, Features],
        fitter: ComponentFitter,
        generator: np.random.Generator,
    ) -> dict[str, Features]:
        """Components at every level, fitted on training cells with the depth of `level`."""
        degrade = self.losses()[self.config.levels().index(level)]
        project = fitter.fit_thinned(degrade, generator)
        return {name: {THINNED_COMPONENTS: project(cells)} for name, cells in counts.items()}


def thin(frac: float, counts: sp.csr_matrix, generator: np.random.Generator) -> sp.csr_matrix:
    """Keep each count with probability `frac`."""
    thinned = counts.copy()
    thinned.data = generator.binomial(counts.data, frac).astype(counts.dtype)
    thinned.eliminate_zeros()
    return thinned
