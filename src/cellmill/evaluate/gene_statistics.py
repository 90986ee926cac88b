"""Gene statistics of training cells: what a model is compared with when it predicts masked tokens."""

from __future__ import annotations

import numpy as np

from cellmill.config.tokens import SPECIAL, Tokens
from cellmill.data.manifest import Manifest
from cellmill.data.shard_file import open_shards
from cellmill.data.tokens import Tokenizer
from cellmill.models.objective import GeneStatistics

MAX_TRAIN_CELLS = 200_000
"""Training cells read at most; shards are preshuffled, so the first ones are a random sample."""
_ROWS = 4096


def read_gene_statistics(manifest: Manifest, tokens: Tokens, max_cells: int = MAX_TRAIN_CELLS) -> GeneStatistics:
    """Statistics over the first `max_cells` cells of the training shards."""
    n_genes, n_cells = manifest.n_genes, 0
    n, total = np.zeros(n_genes, np.int64), np.zeros(n_genes)
    tokenizer: Tokenizer = tokens.load()(tokens)
    shards = open_shards(manifest, "train")
    for shard in shards:
        for first in range(0, shard.n_obs, _ROWS):
            if n_cells >= max_cells:
                break
            starts = shard.indptr[first : first + _ROWS + 1]
            genes = np.empty(int(starts[-1] - starts[0]), np.int32)
            counts = np.empty(len(genes), shard.dtype)
            if len(genes):
                shard.read_genes(int(starts[0]), [genes])
                shard.read_counts(int(starts[0]), [counts])
            ids, values, _ = tokenizer.tokenize(genes, counts, starts - starts[0])
            rows = ids - len(SPECIAL)
            n += np.bincount(rows, minlength=n_genes)
            total += np.bincount(rows, weights=values, minlength=n_genes)
            n_cells += len(starts) - 1
        shard.close()
    overall = float(total.sum() / max(n.sum(), 1))
    return GeneStatistics(n, np.where(n > 0, total / np.maximum(n, 1), overall), overall, n_cells)
