"""Views of a cell: the part of its expression that a model is given, and the part to predict.

A view hides whole genes (`drop`), a binomial part of each count (`thin`), or both (`drop_thin`).
Tokens that are not in the view are not in the batch. Values of the view are computed by the run's
tokenizer from the counts in it, so neither values nor the library size reveal the rest. With a view
loss the hidden part is a second view of the cell, in the same batch. Complementary binomial parts of
Poisson counts are independent given the cell's expression (Neufeld et al. 2022, count splitting).
Two separate draws from the same counts are not.

A view is a function of (seed, step, cell) and the cell's counts in their order: equal in every layout
and in every batch. The draw of a token is keyed by its position in the cell, so shards whose genes have
another order (`shard.order`) have other views.
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
# for metric hidden_genes: genes whose token id is a multiple of this are hidden from all cells
HIDDEN_GENE_STRIDE = 5


class TokenCounts(NamedTuple):
    """Tokens of cells and their counts, cell after cell: `SparseCounts` with token ids."""

    offsets: np.ndarray  # `(cells + 1,)`: first token of each cell, and the end
    token_ids: np.ndarray  # `(tokens,)` int64
    counts: np.ndarray  # `(tokens,)` int64; 0 hides the token


@dataclass(frozen=True, kw_only=True)
class ViewBatch(Batch):
    """The shown tokens, and the profile to predict: entries in the order of their cells.

    An entry is one gene of one cell with the count to predict.
    """

    entry_cells: Tensor  # `(entries,)` int64: index of the cell in the batch
    entry_token_ids: Tensor  # `(entries,)` int64
    entry_counts: Tensor  # `(entries,)` int64, above 0
    n_second_views: int = 0
    """Number of second views: cell i + n_second_views is the hidden part of cell i."""


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

    With `hides_metric_genes` nothing is drawn: the genes of metric hidden_genes are hidden, and whole
    cells predicted.
    """
    assert batch.counts is not None, "the batch has no counts"
    whole = TokenCounts(batch.cu_seqlens.numpy(), batch.token_ids.numpy(), batch.counts.numpy())
    if hides_metric_genes:
        shown = whole.counts * (whole.token_ids % HIDDEN_GENE_STRIDE != 0)
        to_predict = whole.counts
    else:
        cell_rng_states = host_state(batch.cell_ids.numpy(), seed, step)
        shown = _draw_shown_counts(whole, config, cell_rng_states)
        to_predict = whole.counts if config.target == "all" else whole.counts - shown
    if config.view_loss is None:
        views = TokenCounts(whole.offsets, whole.token_ids, shown)
        cell_fields = batch.arrays("cell")
        n_second_views = 0
    else:
        views = _append_second_views(whole, shown)
        cell_fields = {name: torch.cat([a, a]) for name, a in batch.arrays("cell").items()}
        # negative ids, so that second views have dropout of their own
        cell_fields["cell_ids"] = torch.cat([batch.cell_ids, ~batch.cell_ids])
        n_second_views = len(batch.lengths)
    entries = np.flatnonzero(to_predict)
    return ViewBatch(
        **tokenize_counts(views, tokenizer),
        **cell_fields,
        entry_cells=torch.from_numpy(row_numbers(whole.offsets)[entries]),
        entry_token_ids=torch.from_numpy(whole.token_ids[entries]),
        entry_counts=torch.from_numpy(to_predict[entries]),
        n_second_views=n_second_views,
    )


def _append_second_views(whole: TokenCounts, shown: np.ndarray) -> TokenCounts:
    """Return the first views, with counts `shown`, then the same tokens with their hidden counts."""
    return TokenCounts(
        offsets=np.concatenate([whole.offsets, whole.offsets[1:] + whole.offsets[-1]]),
        token_ids=np.concatenate([whole.token_ids, whole.token_ids]),
        counts=np.concatenate([shown, whole.counts - shown]),
    )


def _draw_shown_counts(
    cells: TokenCounts, config: ViewConfig, cell_rng_states: np.ndarray
) -> np.ndarray:
    """Draw the shown part of each count, `(tokens,)` int64.

    `cell_rng_states` `(cells,)` uint64 have the keys (cell, seed, step).
    """
    shown = cells.counts
    drops_genes = config.view in ("drop", "drop_thin")
    thins_counts = config.view in ("thin", "drop_thin")
    if drops_genes:
        # in drop_thin the fractions of genes and of counts have two keys, so they are independent
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
    """Hide a binomial part of each count and return the rest, `(tokens,)`.

    - `counts`, `(tokens,)`, are cut into cells by `offsets`, `(cells + 1,)`
    - `hidden_count_frac`, `(cells,)`: the expected hidden part
    - `cell_rng_states`, `(cells,)` uint64: states with the keys (cell, seed, step)
    """
    nonzero = np.flatnonzero(counts)  # a binomial draw from 0 takes no random number
    nonzero_offsets = np.searchsorted(nonzero, offsets)
    draw_states = host_state(HIDE_KEY, state=cell_rng_states)
    hidden = _draw_binomials(counts[nonzero], nonzero_offsets, hidden_count_frac, draw_states)
    shown = counts.copy()
    shown[nonzero] -= hidden
    return shown


def _draw_binomials(
    counts: np.ndarray, offsets: np.ndarray, probability: np.ndarray, draw_states: np.ndarray
) -> np.ndarray:
    """Draw a binomial part of each count, `(counts,)` int64.

    - `counts` are cut into cells by `offsets`, `(cells + 1,)`
    - `probability` and `draw_states`, `(cells,)`: the expected part, and the state that keys the draws
    """
    draws = np.empty_like(counts)
    # one generator gets the key of each cell in turn: a new one would read entropy from the system,
    # which is slow
    philox = np.random.Philox(key=0)
    generator = np.random.Generator(philox)
    initial_state = philox.state  # before any draw
    # 63 bits, as in `keyed_bits`; another shift would change every training
    keys = (draw_states >> np.uint64(1)).tolist()
    for (first, end), p, key in zip(pairwise(offsets.tolist()), probability.tolist(), keys):
        initial_state["state"]["key"][0] = key
        philox.state = initial_state
        draws[first:end] = generator.binomial(counts[first:end], p)
    return draws


def draw_hidden_frac(cell_rng_states: np.ndarray, config: HiddenFracConfig, key: int) -> np.ndarray:
    """Draw the hidden fraction of each cell, `(cells,)` float64.

    `cell_rng_states` `(cells,)` uint64 have the keys (cell, seed, step); `key` keys the draw in addition.
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

    Return `(tokens,)` bool, and the random state that each draw was made from, `(tokens,)` uint64.

    - `token_cells` and `position`, `(tokens,)`: each token's cell, and its position in the cell
    - `hidden_frac`, `(cells,)`: the probability with which a token of the cell is hidden
    - `cell_rng_states`, `(cells,)` uint64: states with the keys (cell, seed, step)
    """
    token_states = host_state(position, HIDE_KEY, state=cell_rng_states[token_cells])
    return host_uniform(token_states) < hidden_frac[token_cells], token_states


def tokenize_counts(cells: TokenCounts, tokenizer: Tokenizer) -> dict[str, Any]:
    """Tokenize counts of cells: return the fields of a `Batch` that describe tokens, by name.

    Values are computed from these counts only; a token with count 0 is left out.
    """
    shown = np.flatnonzero(cells.counts)
    counts = cells.counts[shown]
    offsets = np.searchsorted(shown, cells.offsets)
    genes = (cells.token_ids[shown] - len(SPECIAL)).astype(np.int32)  # vocabulary rows
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
