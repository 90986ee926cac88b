"""Views of a cell: the part of its expression that a model is given, and the part that it has to predict.

Tokens that are not in the view are not in the batch: half of a cell hidden halves the encoder's work. Values of the
view are computed by the run's own tokenizer from the counts in it, so neither values nor the library size reveal the
rest. Thinning alone is what cells of low depth look like, dropping alone what panels of few genes do; with both, an
embedding withstands either.

With a view loss the hidden part is a second view of the cell, in the same batch. Binomial parts of Poisson counts are
independent given the cell's expression (Neufeld et al. 2022, count splitting), which two draws of the whole are not.

A view is a function of (seed, step, cell, place in the cell): equal in every layout and in every batch.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from cellmill.config.parts.objectives import (
    CellDecodingConfig,
    DenoiseConfig,
    HiddenShareConfig,
    PerturbationResponseConfig,
)
from cellmill.config.parts.tokens import SPECIAL
from cellmill.data.stream.batch import Batch, Tokenizer
from cellmill.models.batch import positions
from cellmill.models.counter_rng import keyed_bits, keyed_token_bits

SHARE, HIDE, DROP_SHARE = 2, 3, 4  # last keys of the draws: of a cell's shares, and of what is hidden


@dataclass(frozen=True, kw_only=True)
class ViewBatch(Batch):
    """The shown tokens, and the profile to predict: entries in the order of their cells."""

    profile_cell: torch.Tensor  # (entries,) int64: index of the cell in the batch
    profile_gene: torch.Tensor  # (entries,) int64: token id
    profile_count: torch.Tensor  # (entries,) int64, above 0
    paired: int = 0
    """Cells whose hidden part is in the batch too: that of cell i is cell i + paired. 0 without second views."""


def draw_view(
    batch: Batch,
    tokenizer: Tokenizer,
    config: CellDecodingConfig | DenoiseConfig | PerturbationResponseConfig,
    *,
    seed: int,
    step: int,
) -> ViewBatch:
    """Return the view of each cell of a batch with counts, on the CPU."""
    assert batch.counts is not None, "the batch has no counts"
    cell, place = positions(batch)
    hidden = torch.zeros_like(batch.counts)
    if config.view != "thin":
        share = draw_share(batch.cells, config, seed, step, SHARE if config.view == "drop" else DROP_SHARE)
        drawn = uniform(keyed_token_bits(batch.cells, cell, seed, step, place, HIDE))
        hidden = torch.where(drawn < share[cell], batch.counts, 0)
    if config.view != "drop":
        left = batch.counts - hidden
        hidden = hidden + _thinned(batch, left, draw_share(batch.cells, config, seed, step), seed, step)
    shown = batch.counts - hidden
    predicted = batch.counts if config.target == "all" else hidden
    at = predicted.nonzero().flatten()
    n_cells = len(batch.lengths)
    of_token, genes, per_cell, paired = cell, batch.genes, batch.arrays("cell"), 0
    if config.view_loss is not None:
        of_token, genes, shown = (torch.cat(pair) for pair in ((cell, cell + n_cells), (genes, genes), (shown, hidden)))
        paired = n_cells
        per_cell = {name: torch.cat([array, array]) for name, array in per_cell.items()}
        # ids of second views differ, and with them the keys of their dropout
        per_cell["cells"] = torch.cat([batch.cells, ~batch.cells])
    return ViewBatch(
        **tokens_of(of_token, genes, shown, n_cells + paired, tokenizer),
        **per_cell,
        paired=paired,
        counts=shown[shown > 0],
        profile_cell=cell[at],
        profile_gene=batch.genes[at],
        profile_count=predicted[at],
    )


def first_views(batch: Batch) -> Batch:
    """Return the cells of a batch without their second views and padding; the batch itself if it has none."""
    if not isinstance(batch, ViewBatch) or not batch.paired:
        return batch
    return replace(batch.cut(0, batch.paired), paired=0)


def draw_share(cells: torch.Tensor, config: HiddenShareConfig, seed: int, step: int, key: int = SHARE) -> torch.Tensor:
    """(cells,) float64: the share of each cell that is hidden; `cells` are stable ids."""
    low, high = config.min_hidden_frac, config.max_hidden_frac
    return low + (high - low) * uniform(keyed_bits(cells, seed, step, key))


def visible_values(batch: Batch, cell: torch.Tensor, visible: torch.Tensor, tokenizer: Tokenizer) -> torch.Tensor:
    """(tokens,): values of the `visible` tokens, (tokens,) bool, made from their counts alone; 0 elsewhere."""
    assert batch.counts is not None, "the batch has no counts"
    shown = batch.counts * visible
    values = torch.zeros_like(batch.values)
    values[shown > 0] = tokens_of(cell, batch.genes, shown, len(batch.lengths), tokenizer)["values"]
    return values


def tokens_of(
    cell: torch.Tensor, gene: torch.Tensor, count: torch.Tensor, n_cells: int, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Genes, values and lengths of the tokens of `n_cells` cells, from counts alone, (n,) int64 each; 0 is no token."""
    at = count.nonzero().flatten()
    starts = np.zeros(n_cells + 1, np.int64)
    np.cumsum(np.bincount(cell[at].numpy(), minlength=n_cells), out=starts[1:])
    rows = (gene[at] - len(SPECIAL)).to(torch.int32).numpy()
    genes, values, cu_seqlens = tokenizer.tokenize(rows, count[at].numpy(), starts)
    numbers = torch.from_numpy(values)
    return {
        "genes": torch.from_numpy(genes).long(),
        "values": numbers if numbers.is_floating_point() else numbers.long(),
        "cu_seqlens": torch.from_numpy(cu_seqlens),
        "lengths": np.diff(starts).tolist(),
    }


def uniform(bits: torch.Tensor) -> torch.Tensor:
    """63 random bits as float64 in [0, 1)."""
    return (bits >> 10).double() * 2.0**-53


def _thinned(batch: Batch, left: torch.Tensor, share: torch.Tensor, seed: int, step: int) -> torch.Tensor:
    """(tokens,) int64: a binomial draw of each count in `left` with its cell's probability `share`, (cells,)."""
    counts, out = left.numpy(), np.empty(len(batch.genes), np.int64)
    keys = keyed_bits(batch.cells, seed, step, HIDE).tolist()
    # one generator that is given each cell's key: a new one draws entropy of the system first, which is not used
    philox = np.random.Philox(key=0)
    generator, start = np.random.Generator(philox), philox.state
    first = 0
    for length, probability, key in zip(batch.lengths, share.tolist(), keys):
        end = first + length
        start["state"]["key"][0] = key
        philox.state = start
        out[first:end] = generator.binomial(counts[first:end], probability)
        first = end
    return torch.from_numpy(out)
