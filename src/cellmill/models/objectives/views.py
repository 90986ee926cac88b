"""Views of a cell: the part of its expression that a model is given, and the part that it has to predict.

Tokens that are not in the view are not in the batch: half of a cell hidden halves the encoder's work. Values of the
view are made by the run's own tokenizer from the counts in it alone, so neither a value nor the library size tells
anything about the rest.

A view is a function of (seed, step, cell, place in the cell): equal in every layout and in every batch.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cellmill.config.tokens import SPECIAL
from cellmill.data.tokens import Tokenizer
from cellmill.models.batch import TensorBatch, positions
from cellmill.models.counter_rng import keyed_bits
from cellmill.models.objectives.config import CellDecodingConfig, DenoiseConfig

SHARE, HIDE = 2, 3  # last keys of the draws: of a cell's share, and of what is hidden


@dataclass(frozen=True, kw_only=True)
class ViewBatch(TensorBatch):
    """The shown tokens, and the profile to predict: entries in the order of their cells."""

    profile_cell: torch.Tensor
    """(entries,) int64: index of the cell in the batch."""
    profile_gene: torch.Tensor
    """(entries,) int64: token id."""
    profile_count: torch.Tensor
    """(entries,) int64, above 0."""


def draw_view(
    batch: TensorBatch, tokenizer: Tokenizer, config: CellDecodingConfig | DenoiseConfig, *, seed: int, step: int
) -> ViewBatch:
    """Return the view of each cell of a batch with counts, on the CPU."""
    assert batch.counts is not None, "the batch has no counts"
    cell, place = positions(batch)
    low, high = config.min_hidden_frac, config.max_hidden_frac
    share = low + (high - low) * _uniform(keyed_bits(batch.cells, seed, step, SHARE))
    if config.view == "drop":
        drawn = _uniform(keyed_bits(batch.cells[cell], seed, step, place, HIDE))
        hidden = torch.where(drawn < share[cell], batch.counts, 0)
    else:
        hidden = _thinned(batch, share, seed, step)
    shown = batch.counts - hidden
    predicted = batch.counts if config.target == "all" else hidden
    at = predicted.nonzero().flatten()
    return ViewBatch(
        **_tokens_of(batch, cell, shown, tokenizer),
        cells=batch.cells,
        counts=shown[shown > 0],
        profile_cell=cell[at],
        profile_gene=batch.genes[at],
        profile_count=predicted[at],
    )


def visible_values(batch: TensorBatch, cell: torch.Tensor, visible: torch.Tensor, tokenizer: Tokenizer) -> torch.Tensor:
    """(tokens,): values of the `visible` tokens, (tokens,) bool, made from their counts alone; 0 elsewhere."""
    assert batch.counts is not None, "the batch has no counts"
    shown = batch.counts * visible
    values = torch.zeros_like(batch.values)
    values[shown > 0] = _tokens_of(batch, cell, shown, tokenizer)["values"]
    return values


def _tokens_of(batch: TensorBatch, cell: torch.Tensor, shown: torch.Tensor, tokenizer: Tokenizer) -> dict[str, Any]:
    """Genes, values and lengths of the tokens with shown counts."""
    at = shown.nonzero().flatten()
    starts = np.zeros(len(batch.lengths) + 1, np.int64)
    np.cumsum(np.bincount(cell[at].numpy(), minlength=len(batch.lengths)), out=starts[1:])
    rows = (batch.genes[at] - len(SPECIAL)).to(torch.int32).numpy()
    genes, values, cu_seqlens = tokenizer.tokenize(rows, shown[at].numpy(), starts)
    numbers = torch.from_numpy(values)
    return {
        "genes": torch.from_numpy(genes).long(),
        "values": numbers if numbers.is_floating_point() else numbers.long(),
        "cu_seqlens": torch.from_numpy(cu_seqlens),
        "lengths": np.diff(starts).tolist(),
    }


def _uniform(bits: torch.Tensor) -> torch.Tensor:
    """63 random bits as float64 in [0, 1)."""
    return (bits >> 10).double() * 2.0**-53


def _thinned(batch: TensorBatch, share: torch.Tensor, seed: int, step: int) -> torch.Tensor:
    """(tokens,) int64: a binomial draw of each count with its cell's probability `share`, (cells,)."""
    counts, out = batch.counts.numpy(), np.empty(len(batch.genes), np.int64)  # type: ignore[union-attr]
    states = keyed_bits(batch.cells, seed, step, HIDE).tolist()
    first = 0
    for length, probability, state in zip(batch.lengths, share.tolist(), states):
        end = first + length
        out[first:end] = np.random.Generator(np.random.Philox(key=state)).binomial(counts[first:end], probability)
        first = end
    return torch.from_numpy(out)
