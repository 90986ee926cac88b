"""Base of the built-in tokenizers."""

from typing import Any

import numpy as np

from cellmill.data.tokens import Prefixes


class FirstGenes:
    """Tokens of the first `max_tokens` genes of each cell."""

    dtype: np.dtype
    needs_counts: bool

    def __init__(self, options: Any) -> None:
        self._options = options

    def tokenize(
        self, genes: np.ndarray, counts: np.ndarray | None, starts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        assert counts is not None or not self.needs_counts
        kept = Prefixes(starts, self._options.max_tokens)
        return kept.token_ids(genes), self._values(kept, counts, starts), kept.cu_seqlens

    def _values(self, kept: Prefixes, counts: Any, starts: np.ndarray) -> np.ndarray:
        raise NotImplementedError
