"""Continuous tokenizer: a gene's value is its log-normalised count."""

from __future__ import annotations

import numpy as np

from cellmill.config.tokens import ContinuousTokens
from cellmill.data.count_matrix import counts_per_10k
from cellmill.data.tokens import Prefixes


class ContinuousTokenizer:
    """Values are log(1 + counts per 10,000), float32; the library is that of the whole cell, also where it is cut."""

    dtype = np.dtype(np.float32)
    needs_counts = True

    def __init__(self, options: ContinuousTokens) -> None:
        self._max_tokens = options.max_tokens

    def tokenize(
        self, genes: np.ndarray, counts: np.ndarray | None, starts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        assert counts is not None, "needs_counts"
        kept = Prefixes(starts, self._max_tokens)
        values = counts_per_10k(counts, starts, np.float32)
        return kept.token_ids(genes), kept.of(np.log1p(values, out=values)), kept.cu_seqlens
