"""A gene's value is its log-normalised count."""

from typing import Any

import numpy as np

from cellmill.data.count_matrix import scale_per_10k
from cellmill.data.tokenizers.first_genes import FirstGenes
from cellmill.data.tokens import Prefixes


class ContinuousTokenizer(FirstGenes):
    """Values are log(1 + counts per 10,000), float32."""

    dtype, needs_counts = np.dtype(np.float32), True

    def _values(self, kept: Prefixes, counts: Any, starts: np.ndarray) -> np.ndarray:
        values = kept.copy(counts, self.dtype)
        values *= np.repeat(scale_per_10k(counts, starts, np.float32), kept.lengths)
        return np.log1p(values, out=values)
