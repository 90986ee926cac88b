"""A gene's value is its place in the cell."""

from typing import Any

import numpy as np

from cellmill.data.recycled import recycled_empty
from cellmill.data.tokenizers.first_genes import FirstGenes
from cellmill.data.tokens import Prefixes


class RankTokenizer(FirstGenes):
    """Values are places in the cell from 0, int32."""

    dtype, needs_counts = np.dtype(np.int32), False

    def _values(self, kept: Prefixes, counts: Any, starts: np.ndarray) -> np.ndarray:
        longest = np.arange(kept.lengths.max(initial=0), dtype=np.int32)  # in cache: half the time of arange - repeat
        places = recycled_empty(kept.cu_seqlens[-1], self.dtype)
        return np.concatenate([longest[:n] for n in kept.lengths.tolist()] or [longest], out=places)
