"""Genes in rank order, without values."""

import numpy as np

from cellmill.data.stream.batch import Prefixes, Tokenized
from cellmill_toy.options import ToyGenes


class GenesOnly:
    """Values are zeros that no model reads."""

    dtype = np.dtype(np.int8)
    needs_counts = False

    def __init__(self, options: ToyGenes) -> None:
        self._max_tokens = options.max_tokens

    def tokenize(
        self, genes: np.ndarray, counts: np.ndarray | None, starts: np.ndarray
    ) -> Tokenized:
        """Token ids and zeros."""
        kept = Prefixes(starts, self._max_tokens)
        genes = kept.token_ids(genes)
        return Tokenized(genes, np.zeros(len(genes), self.dtype), kept.cu_seqlens)
