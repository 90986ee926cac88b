"""Genes in rank order, without values."""

import numpy as np

from cellmill.data.rows import SparseCounts
from cellmill.data.stream.tokenizer import CellTokens, KeptGenes
from cellmill_toy.options import ToyGenes


class GenesOnly:
    """Values are zeros that no model reads."""

    dtype = np.dtype(np.int8)
    needs_counts = False

    def __init__(self, options: ToyGenes) -> None:
        self._max_tokens = options.max_tokens

    def tokenize(self, cells: SparseCounts) -> CellTokens:
        """Token ids and zeros."""
        kept = KeptGenes(cells, self._max_tokens)
        token_ids = kept.token_ids()
        return CellTokens(token_ids, np.zeros(len(token_ids), self.dtype), kept.cu_seqlens)
