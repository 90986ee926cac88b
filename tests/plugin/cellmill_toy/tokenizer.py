"""Genes in rank order, without values."""

import numpy as np

from cellmill.data.stream.batch import Prefixes
from cellmill_toy.options import ToyGenes


class GenesOnly:
    """Values are zeros that no model reads."""

    dtype = np.dtype(np.int8)
    needs_counts = False

    def __init__(self, options: ToyGenes) -> None:
        self._max_tokens = options.max_tokens

    def tokenize(
        self, genes: np.ndarray, counts: np.ndarray | None, starts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token ids, zeros and `cu_seqlens`."""
        kept = Prefixes(starts, self._max_tokens)
        genes = kept.token_ids(genes)
        return genes, np.zeros(len(genes), self.dtype), kept.cu_seqlens
