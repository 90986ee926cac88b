"""Views of objective query_decoding: a share of the vocabulary is hidden in each cell, and some of it is asked.

A gene of the vocabulary is hidden with the probability that its cell drew, whether the cell has it or not. Hidden genes
are therefore detected as often as genes of whole cells, which a mean over training cells, zeros included, foretells.
All of them would be most of the vocabulary: of the detected ones at most `max_asked` are asked, of the undetected ones
as many times `undetected_ratio`, and `weight` is the number of hidden genes for which an asked one stands.

Only the shown tokens are in the batch, with values made from their own counts: no value or library size that the model
sees tells anything of the hidden ones. Genes that `tokens.max_tokens` cuts from a cell count as undetected.

All draws are functions of (seed, step, cell, place): equal in every layout and in every batch.
"""

from dataclasses import dataclass

import torch

from cellmill.config.tokens import SPECIAL
from cellmill.data.tokens import Tokenizer
from cellmill.models.batch import TensorBatch, positions
from cellmill.models.counter_rng import keyed_bits
from cellmill.models.objectives.config import QueryDecodingConfig
from cellmill.models.objectives.views import HIDE, CellCounts, draw_share, tokens_of, uniform

UNDETECTED = 4  # last key of the draws, after those of `views`


@dataclass(frozen=True, kw_only=True)
class AskedBatch(TensorBatch):
    """The shown tokens, and the asked genes: the detected ones, then the others."""

    asked_cell: torch.Tensor
    """(asked,) int64: index of the cell in the batch."""
    asked_gene: torch.Tensor
    """(asked,) int64: token id."""
    asked_value: torch.Tensor
    """(asked,) float32: value of the gene in the whole cell, 0 where it is not detected."""
    asked_weight: torch.Tensor
    """(asked,) float32: number of hidden genes for which this one stands."""


def draw_asked(
    batch: TensorBatch, tokenizer: Tokenizer, config: QueryDecodingConfig, n_genes: int, *, seed: int, step: int
) -> AskedBatch:
    """Return the view of each cell of a batch with counts, on the CPU, over a vocabulary of `n_genes` genes."""
    assert batch.counts is not None, "the batch has no counts"
    cell, place = positions(batch)
    share = draw_share(batch.cells, config, seed, step)
    keys = keyed_bits(batch.cells[cell], seed, step, place, HIDE)
    hidden = uniform(keys) < share[cell]
    asked = _lowest(hidden.nonzero().flatten(), keys, cell, config.max_asked)
    n_hidden, n_asked = (torch.bincount(cell[at], minlength=len(batch.lengths)) for at in (hidden, asked))
    free = n_genes - batch.cu_seqlens.diff().long()
    n_drawn = torch.where(free > 0, (n_asked * config.undetected_ratio).ceil().long(), 0)
    of, gene = _undetected(batch, n_drawn, free, n_genes, seed, step)
    weights = (n_hidden / n_asked.clamp(min=1))[cell[asked]], (share * free / n_drawn.clamp(min=1))[of]
    return AskedBatch(
        **tokens_of(CellCounts(cell, batch.genes, torch.where(hidden, 0, batch.counts)), len(batch.lengths), tokenizer),
        cells=batch.cells,
        levels=batch.levels,
        numbers=batch.numbers,
        asked_cell=torch.cat([cell[asked], of]),
        asked_gene=torch.cat([batch.genes[asked], gene]),
        asked_value=torch.cat([batch.values[asked], torch.zeros(len(of))]),
        asked_weight=torch.cat(weights).float(),
    )


def _lowest(at: torch.Tensor, keys: torch.Tensor, cell: torch.Tensor, most: int) -> torch.Tensor:
    """Those of the tokens `at` that are among the `most` lowest `keys` of their cell, in order."""
    order = at[keys[at].argsort()]
    order = order[cell[order].argsort(stable=True)]  # by cell, then by key
    counts = torch.bincount(cell[at])
    rank = torch.arange(len(at)) - (counts.cumsum(0) - counts)[cell[order]]
    return order[rank < most].sort().values


def _undetected(
    batch: TensorBatch, n_drawn: torch.Tensor, free: torch.Tensor, n_genes: int, seed: int, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cell and token id of `n_drawn` (cells,) draws, with replacement, of the `free` genes that a cell lacks.

    The k-th gene that a cell lacks is in row k + d, where d of its detected genes come before.
    """
    of = torch.repeat_interleave(n_drawn)
    place = torch.arange(len(of)) - (n_drawn.cumsum(0) - n_drawn)[of]
    k = keyed_bits(batch.cells[of], seed, step, place, UNDETECTED) % free[of]
    cell, place = positions(batch)
    rows = (cell * n_genes + batch.genes - len(SPECIAL)).sort().values - cell * n_genes
    lacking = rows - place + cell * (n_genes + 1)  # genes that the cell lacks before each of its own, by cell
    before = torch.searchsorted(lacking, k + of * (n_genes + 1), right=True) - batch.cu_seqlens[of]
    return of, k + before + len(SPECIAL)
