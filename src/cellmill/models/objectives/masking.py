"""Token masks of the masked objectives, and the batch that the encoder sees.

A fraction `mask_frac` of a cell's tokens, and at least one, is drawn by a hash of (seed, step, cell, place), so that a
token is masked in every layout or in none. Hidden content is replaced before the model sees it, so it cannot leak.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cellmill.config.tokens import SPECIAL
from cellmill.models.batch import TensorBatch, positions
from cellmill.models.counter_rng import keyed_bits, threshold

PAD_TOKEN, MASK_TOKEN = (SPECIAL.index(token) for token in ("<pad>", "<mask>"))


@dataclass(frozen=True)
class MaskedBatch:
    """A batch as the encoder sees it, and the answers."""

    genes: torch.Tensor
    """(tokens,) int64; `<mask>` where the gene is hidden."""
    values: torch.Tensor
    """(tokens,); 0 where the value is hidden."""
    value_hidden: torch.Tensor
    """(tokens,) bool."""
    center: torch.Tensor
    """(cells,) float32: mean of a cell's visible continuous values; 0 for other tokens."""
    cell: torch.Tensor
    """(tokens,) int64, number of the cell in the batch."""
    cu_seqlens: torch.Tensor
    lengths: list[int]
    token_keys: torch.Tensor
    """(tokens,) int64, for dropout."""
    targets: torch.Tensor
    """(targets,) int64, ascending: positions of the masked tokens."""
    answers: torch.Tensor
    """(targets,): hidden genes (int64 token ids) or hidden values."""
    n_targets: torch.Tensor


def mask(batch: TensorBatch, hides_gene: bool, mask_frac: float, seed: int, step: int) -> MaskedBatch:
    """Draw the mask of a batch and hide the genes, or else the values, of masked tokens."""
    cell, place = positions(batch)
    keys = keyed_bits(batch.cells[cell], seed, step, place)
    lowest = torch.full((len(batch.lengths),), 2**63 - 1, device=keys.device).scatter_reduce(0, cell, keys, "amin")
    masked = ((keys < threshold(mask_frac)) | (keys == lowest[cell])) & (batch.genes != PAD_TOKEN)
    targets = masked.nonzero().flatten()
    return MaskedBatch(
        genes=batch.genes.masked_fill(masked, MASK_TOKEN) if hides_gene else batch.genes,
        values=batch.values if hides_gene else batch.values.masked_fill(masked, 0),
        value_hidden=torch.zeros_like(masked) if hides_gene else masked,
        center=_center(batch, cell, torch.ones_like(masked) if hides_gene else ~masked),
        cell=cell,
        cu_seqlens=batch.cu_seqlens,
        lengths=batch.lengths,
        token_keys=keyed_bits(keys, 1),  # not the mask's own draw: what is dropped must not depend on it
        targets=targets,
        answers=(batch.genes if hides_gene else batch.values)[targets],
        n_targets=torch.tensor(len(targets), device=keys.device),
    )


def unmasked(batch: TensorBatch) -> MaskedBatch:
    """The batch with nothing masked, for embeddings."""
    cell, place = positions(batch)
    none = torch.zeros(0, dtype=torch.int64, device=place.device)
    return MaskedBatch(
        genes=batch.genes,
        values=batch.values,
        value_hidden=torch.zeros_like(place, dtype=torch.bool),
        center=_center(batch, cell, torch.ones_like(place, dtype=torch.bool)),
        cell=cell,
        cu_seqlens=batch.cu_seqlens,
        lengths=batch.lengths,
        token_keys=place,  # read by dropout alone, which is off
        targets=none,
        answers=none,
        n_targets=torch.tensor(0, device=place.device),
    )


def _center(batch: TensorBatch, cell: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """(cells,) float32; from what is visible alone, so that it tells nothing of the rest."""
    center = torch.zeros(len(batch.lengths), device=cell.device)
    if not batch.values.is_floating_point():
        return center
    sums = center.index_add(0, cell, batch.values * visible)
    return sums / center.index_add(0, cell, visible.float()).clamp(min=1)
