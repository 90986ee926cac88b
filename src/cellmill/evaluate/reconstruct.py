"""How well a model fills in what is hidden, beside what needs no model.

Genes differ far more in their mean than cells differ in a gene, so predicting each gene's mean already looks good:
values are judged by R² *over the gene mean*, 1 - SSE(model) / SSE(gene mean), and by the correlation of what is left
when the gene mean is taken off both. Hidden genes are judged beside the genes' frequency. Means and frequencies come
from tokens of training cells alone; masks are keyed by cell and position, so they are the same at every evaluation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from cellmill.config.tokens import SPECIAL, Tokens
from cellmill.data.counts_reader import CountsReader
from cellmill.data.manifest import Manifest
from cellmill.data.shard_file import open_shards
from cellmill.data.tokens import tokenize
from cellmill.data.vocabulary import Vocabulary
from cellmill.evaluate.embed import pack, place_genes, read_tokens
from cellmill.models.batch import to_tensors
from cellmill.models.family import Model
from cellmill.models.objective import GeneStatistics

MAX_CELLS = 10_000
"""Held-out cells used at most; R² then has a standard error below 0.001."""
MAX_TRAIN_CELLS = 200_000
"""Training cells that means are taken over; shards are preshuffled, so the first of them are a random draw."""
_ROWS = 4096


def read_train_tokens(manifest: Manifest, tokens: Tokens, max_cells: int = MAX_TRAIN_CELLS) -> GeneStatistics:
    """Frequencies and means over the tokens of the training shards."""
    n_genes, n_cells = int(manifest.vocabulary["n_genes"]), 0
    n, total = np.zeros(n_genes, np.int64), np.zeros(n_genes)
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
            ids, values, _ = tokenize(genes, counts, starts - starts[0], tokens)
            rows = ids - len(SPECIAL)
            n += np.bincount(rows, minlength=n_genes)
            total += np.bincount(rows, weights=values, minlength=n_genes)
            n_cells += len(starts) - 1
        shard.close()
    overall = float(total.sum() / max(n.sum(), 1))
    return GeneStatistics(n, np.where(n > 0, total / np.maximum(n, 1), overall), overall, n_cells)


def reconstruct(
    model: Model,
    reader: CountsReader,
    vocabulary: Vocabulary,
    tokens: Tokens,
    train: GeneStatistics,
    *,
    chosen: np.ndarray,
    objective: str,
    seed: int,
    token_budget: int,
) -> dict[str, Any]:
    """What the model makes of hidden tokens of the cells where `chosen` (bool, one for each cell of the file).

    Returns `objective` (masked_value or masked_gene), `n_cells`, and what `judge_values` or `judge_genes` gives;
    a hidden bin is predicted by its expectation. At most MAX_CELLS cells, by a seeded draw.
    """
    cells = np.flatnonzero(chosen)
    if len(cells) > MAX_CELLS:
        cells = np.random.Generator(np.random.Philox(key=[seed, 2])).permutation(cells)[:MAX_CELLS]
    mask = np.zeros(reader.n_obs, dtype=bool)
    mask[cells] = True
    device, places = next(model.parameters()).device, place_genes(reader, vocabulary)
    parts: list[tuple[np.ndarray, ...]] = []
    model.eval()
    with torch.inference_mode():
        for block in read_tokens(reader, places, vocabulary, tokens, mask, np.zeros(2, np.int64)):
            for part in pack(block, token_budget):
                batch = to_tensors(part, device)
                prepared = model.prepare(batch, seed=seed, step=0)
                observed = model.objective.observe(model, prepared)
                parts.append(tuple(tensor.cpu().numpy() for tensor in observed))
    if not parts:
        return {"objective": objective, "n_cells": 0, "verdict": ["No cell could be judged."]}
    figures = model.objective.judge(*(np.concatenate(column) for column in zip(*parts)), train=train)
    return {"objective": objective, "n_cells": len(cells), **figures}
