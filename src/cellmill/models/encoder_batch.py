"""The batch as an encoder sees it: tokens whose hidden content is replaced, and what its layers need beside them."""

from dataclasses import dataclass

import torch

from cellmill.models.batch import PAD_TOKEN, TensorBatch, positions
from cellmill.models.counter_rng import keyed_bits
from cellmill.parallel.segments import segment_sum


@dataclass(frozen=True, kw_only=True)
class EncoderBatch:
    """Base of what objectives for encoders prepare."""

    genes: torch.Tensor
    """(tokens,) int64; `<mask>` where the gene is hidden."""
    values: torch.Tensor
    """(tokens,); 0 where the value is hidden."""
    value_hidden: torch.Tensor
    """(tokens,) bool."""
    center: torch.Tensor
    """(cells,) float32: mean of a cell's visible continuous values; 0 for other tokenizers."""
    cell: torch.Tensor
    """(tokens,) int64: index of the token's cell in the batch."""
    cu_seqlens: torch.Tensor
    lengths: list[int]
    token_keys: torch.Tensor
    """(tokens,) int64: keys of the dropout."""
    cell_keys: torch.Tensor
    """(cells,) int64: keys of the dropout in layers whose rows are cells."""
    levels: torch.Tensor | None = None
    """(cells, columns) int64: as in the batch."""
    covariate_rows: torch.Tensor | None = None
    """(tokens,) int64: as in the batch."""


def whole(batch: TensorBatch, keys: tuple[int, int] | None = None) -> EncoderBatch:
    """Return the batch with nothing hidden.

    `keys`, seed and step, key the dropout; None where there is no dropout, as in evaluation.
    """
    cell, place = positions(batch)
    visible = torch.ones_like(place, dtype=torch.bool)
    return EncoderBatch(
        genes=batch.genes,
        values=batch.values,
        value_hidden=~visible,
        center=center_of(batch, cell, visible),
        cell=cell,
        cu_seqlens=batch.cu_seqlens,
        lengths=batch.lengths,
        token_keys=place if keys is None else keyed_bits(keyed_bits(batch.cells[cell], *keys, place), 1),
        cell_keys=batch.cells if keys is None else keyed_bits(batch.cells, *keys),
        levels=batch.levels,
        covariate_rows=batch.covariate_rows,
    )


def center_of(batch: TensorBatch, cell: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """(cells,) float32: mean of the visible genes' values only, so that hidden ones cannot leak."""
    if not batch.values.is_floating_point():
        return torch.zeros(len(batch.lengths), device=cell.device)
    visible = visible & (batch.genes != PAD_TOKEN)  # a token without a gene has no value
    sums, n = (segment_sum(part, cell, batch.cu_seqlens) for part in (batch.values * visible, visible.float()))
    return sums / n.clamp(min=1)
