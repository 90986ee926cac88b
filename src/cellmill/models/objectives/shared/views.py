"""Views of a cell: which part of the cell's expression the model is given, and which part it predicts.

A view hides whole genes (`drop`), a binomial part of each count (`thin`), or both (`drop_thin`). A token
that is not in the view is not in the batch. The run's tokenizer computes the values of a view from the
counts in the view alone. So neither the values nor the library size reveal what is hidden.

With a view loss the hidden part of each cell is a second view, in the same batch. The two parts of a
count that `thin` divides are independent, if the count has a Poisson distribution and the cell's
expression is given (Neufeld et al. 2022, count splitting). Two separate draws from the same count would
not be independent.

A view is a function of (seed, step, cell) and of the cell's counts in their order. So it is the same in
every layout and in every batch. The random number of a token is keyed by the token's position in the
cell. So shards whose genes are in another order (`shard.order`) have other views.

In the shapes below, "cells" are all cells of a batch and "tokens" their tokens, one cell after another.
`cell_rng_states` (cells,) uint64 are the states of the random numbers of each cell: the keys cell id, seed
and step are already in these states.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cellmill.config.parts.objectives import (
    CellDecodingConfig,
    DenoiseConfig,
    HiddenFracConfig,
    PerturbationResponseConfig,
)
from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.rows import SparseCounts, positions_in_rows, row_numbers
from cellmill.data.stream.batch import Batch
from cellmill.data.stream.tokenizer import Tokenizer
from cellmill.models.counter_rng import host_state, host_uniform
from cellmill.models.draws import DROPPED_FRAC_KEY, HIDDEN_FRAC_KEY, HIDE_KEY

ViewConfig = CellDecodingConfig | DenoiseConfig | PerturbationResponseConfig
HIDDEN_GENE_STRIDE = 5
"""Metric hidden_genes hides the genes whose token id is a multiple of this number, from all cells."""


class TokenCounts(NamedTuple):
    """Tokens of cells with their counts, one cell after another.

    These are `SparseCounts` with token ids instead of vocabulary rows.
    """

    offsets: np.ndarray  # (cells + 1,): the first token of each cell, then the number of tokens
    token_ids: np.ndarray  # (tokens,) int64
    counts: np.ndarray  # (tokens,) int64; a token with count 0 is hidden


@dataclass(frozen=True, kw_only=True)
class ViewBatch(Batch):
    """The shown tokens of each cell, and the profile of each cell to predict.

    A profile consists of entries. An entry is one gene of one cell with the count to predict. The entries
    of all cells follow each other, in the order of the cells.
    """

    entry_cells: Tensor  # (entries,) int64: the index of the entry's cell in the batch
    entry_token_ids: Tensor  # (entries,) int64
    entry_counts: Tensor  # (entries,) int64: at least 1
    n_second_views: int = 0
    """Number of second views, which follow the first views as further cells of the batch.

    Cell i + n_second_views is the hidden part of the cell whose shown part is cell i.
    """


def draw_view(
    batch: Batch,
    tokenizer: Tokenizer,
    config: ViewConfig,
    *,
    seed: int,
    step: int,
    hides_metric_genes: bool = False,
) -> ViewBatch:
    """Draw the view of each cell of a batch with counts, on the CPU.

    With `hides_metric_genes` nothing is drawn. Each view then hides the genes of metric hidden_genes, and
    the whole cell is to be predicted.
    """
    assert batch.counts is not None, "the batch has no counts"

    # divide the counts of each token: the shown part, and the part to predict
    whole = TokenCounts(batch.cu_seqlens.numpy(), batch.token_ids.numpy(), batch.counts.numpy())
    if hides_metric_genes:
        shown = whole.counts * (whole.token_ids % HIDDEN_GENE_STRIDE != 0)
        to_predict = whole.counts
    else:
        cell_rng_states = host_state(batch.cell_ids.numpy(), seed, step)
        shown = _draw_shown_counts(whole, config, cell_rng_states)
        to_predict = whole.counts if config.target == "all" else whole.counts - shown

    # with a view loss the batch also has the second views, as further cells
    if config.view_loss is None:
        views = TokenCounts(whole.offsets, whole.token_ids, shown)
        cell_fields = batch.arrays("cell")
        n_second_views = 0
    else:
        views = _append_second_views(whole, shown)
        cell_fields = {name: torch.cat([a, a]) for name, a in batch.arrays("cell").items()}
        # a second view has a negative cell id, so that its dropout differs from the first view's
        cell_fields["cell_ids"] = torch.cat([batch.cell_ids, ~batch.cell_ids])
        n_second_views = len(batch.lengths)

    entries = np.flatnonzero(to_predict)  # an entry for each token with something to predict
    return ViewBatch(
        **tokenize_counts(views, tokenizer),
        **cell_fields,
        entry_cells=torch.from_numpy(row_numbers(whole.offsets)[entries]),
        entry_token_ids=torch.from_numpy(whole.token_ids[entries]),
        entry_counts=torch.from_numpy(to_predict[entries]),
        n_second_views=n_second_views,
    )


def _append_second_views(whole: TokenCounts, shown: np.ndarray) -> TokenCounts:
    """Return the first views, which have the counts `shown`, followed by the second views.

    The second views have the same tokens in the same order, with the hidden part of each count.
    """
    return TokenCounts(
        offsets=np.concatenate([whole.offsets, whole.offsets[1:] + whole.offsets[-1]]),
        token_ids=np.concatenate([whole.token_ids, whole.token_ids]),
        counts=np.concatenate([shown, whole.counts - shown]),
    )


def _draw_shown_counts(
    cells: TokenCounts, config: ViewConfig, cell_rng_states: np.ndarray
) -> np.ndarray:
    """Draw the shown part of each count, (tokens,) int64."""
    shown = cells.counts
    drops_genes = config.view in ("drop", "drop_thin")
    thins_counts = config.view in ("thin", "drop_thin")
    if drops_genes:
        # In drop_thin a cell has two hidden fractions, one of genes and one of counts. Each has its own
        # key, so the two fractions are independent
        frac_key = DROPPED_FRAC_KEY if thins_counts else HIDDEN_FRAC_KEY
        hidden_gene_frac = draw_hidden_frac(cell_rng_states, config, frac_key)
        token_cells = row_numbers(cells.offsets)
        position = positions_in_rows(cells.offsets)
        is_hidden, _ = draw_hidden_genes(token_cells, position, hidden_gene_frac, cell_rng_states)
        shown = shown * ~is_hidden
    if thins_counts:
        hidden_count_frac = draw_hidden_frac(cell_rng_states, config, HIDDEN_FRAC_KEY)
        shown = _thin_counts(shown, cells.offsets, hidden_count_frac, cell_rng_states)
    return shown


def _thin_counts(
    counts: np.ndarray,
    offsets: np.ndarray,
    hidden_count_frac: np.ndarray,
    cell_rng_states: np.ndarray,
) -> np.ndarray:
    """Hide a binomial part of each count, and return the part that is left, (tokens,) int64.

    `counts` (tokens,) are divided into cells by `offsets` (cells + 1,). `hidden_count_frac` (cells,) is the
    expected hidden fraction of each count of a cell.
    """
    # counts of 0 are left out: nothing of them can be hidden, and their draws would use no random number
    nonzero = np.flatnonzero(counts)
    nonzero_offsets = np.searchsorted(nonzero, offsets)
    draw_states = host_state(HIDE_KEY, state=cell_rng_states)
    hidden = _draw_binomials(counts[nonzero], nonzero_offsets, hidden_count_frac, draw_states)
    shown = counts.copy()
    shown[nonzero] -= hidden
    return shown


def _draw_binomials(
    counts: np.ndarray, offsets: np.ndarray, probability: np.ndarray, draw_states: np.ndarray
) -> np.ndarray:
    """Draw a binomial part of each count, (counts,) int64.

    `counts` (counts,) are divided into cells by `offsets` (cells + 1,). `probability` (cells,) is the
    expected fraction that is drawn from each count of a cell. `draw_states` (cells,) uint64 are the states
    that key the random numbers of a cell.
    """
    draws = np.empty_like(counts)
    # All cells use one generator, which gets the key of each cell in turn. A new generator for each cell
    # would read entropy from the system, which is slow
    philox = np.random.Philox(key=0)
    generator = np.random.Generator(philox)
    initial_state = philox.state  # the state before any draw
    # a key has 63 bits, as in `keyed_bits`; another number of bits would change every training
    keys = (draw_states >> np.uint64(1)).tolist()
    for (first, end), p, key in zip(pairwise(offsets.tolist()), probability.tolist(), keys):
        initial_state["state"]["key"][0] = key
        philox.state = initial_state
        draws[first:end] = generator.binomial(counts[first:end], p)
    return draws


def draw_hidden_frac(cell_rng_states: np.ndarray, config: HiddenFracConfig, key: int) -> np.ndarray:
    """Draw the hidden fraction of each cell, (cells,) float64, uniformly between two bounds.

    The bounds are options `min_hidden_frac` and `max_hidden_frac`. `key` is added to the keys of
    `cell_rng_states`, so that fractions with different keys are independent.
    """
    low = config.min_hidden_frac
    high = config.max_hidden_frac
    return low + (high - low) * host_uniform(host_state(key, state=cell_rng_states))


def draw_hidden_genes(
    token_cells: np.ndarray,
    position: np.ndarray,
    hidden_frac: np.ndarray,
    cell_rng_states: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw which tokens are hidden as whole genes.

    Return which tokens are hidden, (tokens,) bool, and the random state of each token that decided whether
    the token is hidden, (tokens,) uint64.

    `token_cells` (tokens,) is the index of each token's cell, and `position` (tokens,) the position of the
    token in its cell. `hidden_frac` (cells,) is the probability that a token of the cell is hidden.
    """
    token_states = host_state(position, HIDE_KEY, state=cell_rng_states[token_cells])
    return host_uniform(token_states) < hidden_frac[token_cells], token_states


def tokenize_counts(cells: TokenCounts, tokenizer: Tokenizer) -> dict[str, Any]:
    """Tokenize the counts of cells, and return the fields of a `Batch` that describe tokens, by name.

    The values of tokens are computed from these counts alone. A token with count 0 is left out.
    """
    shown = np.flatnonzero(cells.counts)
    counts = cells.counts[shown]
    offsets = np.searchsorted(shown, cells.offsets)
    genes = (cells.token_ids[shown] - len(SPECIAL)).astype(np.int32)  # vocabulary rows of the genes
    token_ids, values, cu_seqlens = tokenizer.tokenize(SparseCounts(offsets, genes, counts))
    value_tensor = torch.from_numpy(values)
    if not value_tensor.is_floating_point():
        value_tensor = value_tensor.long()
    return {
        "token_ids": torch.from_numpy(token_ids).long(),
        "values": value_tensor,
        "counts": torch.from_numpy(counts),
        "cu_seqlens": torch.from_numpy(cu_seqlens),
        "lengths": np.diff(offsets).tolist(),
    }
