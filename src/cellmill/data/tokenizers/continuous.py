"""A gene's value is its log-normalised count."""

from typing import Any

import numpy as np

from cellmill.data.log_values import log_values
from cellmill.data.tokenizers.first_genes import FirstGenes
from cellmill.data.tokens import Prefixes


class ContinuousTokenizer(FirstGenes):
    """Values are log(1 + counts per 10,000), float32."""

    dtype, needs_counts = np.dtype(np.float32), True

    def _values(self, kept: Prefixes, counts: Any, starts: np.ndarray) -> np.ndarray:
        return log_values(kept, counts, starts)
