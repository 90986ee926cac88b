"""Task `low_depth`: classification of cells with a fraction of their counts, by binomial thinning."""

from functools import partial

import numpy as np
import scipy.sparse as sp

from cellmill.config.evaluate import LowDepthConfig
from cellmill.evaluate.degraded import classify_degraded
from cellmill.evaluate.task import Context, TaskResult


class LowDepth:
    def __init__(self, config: LowDepthConfig) -> None:
        self.config = config

    def run(self, context: Context) -> TaskResult:
        """Accuracy at each depth, matched and shifted; see `evaluate.degraded`."""
        levels = {f"{100 * frac:g} % of counts": partial(thin, frac) for frac in self.config.count_fracs}
        return classify_degraded(context, "low_depth", levels, self.config.neighbors, self.config.repeats)


def thin(frac: float, counts: sp.csr_matrix, generator: np.random.Generator) -> sp.csr_matrix:
    """Keep each count with probability `frac`."""
    kept = generator.binomial(counts.data, frac).astype(counts.dtype)
    thinned = sp.csr_matrix((kept, counts.indices.copy(), counts.indptr.copy()), shape=counts.shape)
    thinned.eliminate_zeros()
    return thinned
