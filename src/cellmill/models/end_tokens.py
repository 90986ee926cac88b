"""Tokens at the ends of a cell that are no genes: <cls> before the first gene, <eos> after the last.

Their ids are negative, so they are in no vocabulary, are never masked, and cost no row of a table that has one row per
gene. They are added to a view before it is padded, so that layouts count them.
"""

from dataclasses import replace

import torch

from cellmill.models.batch import TensorBatch

CLS, EOS = -1, -2
"""Token ids; row -1 - id of `end_embedding`."""


def with_ends(batch: TensorBatch, n_ends: int) -> TensorBatch:
    """Return the batch with <cls> (`n_ends` 1), or <cls> and <eos> (2), around each cell, with value and count 0."""
    if not n_ends:
        return batch
    device, n_cells = batch.genes.device, len(batch.lengths)
    lengths = batch.cu_seqlens.diff().long()
    cell = torch.repeat_interleave(lengths, output_size=len(batch.genes))
    at = torch.arange(len(batch.genes), device=device) + n_ends * cell + 1
    cu_seqlens = batch.cu_seqlens + n_ends * torch.arange(n_cells + 1, device=device, dtype=batch.cu_seqlens.dtype)

    def spread(tensor: torch.Tensor, fill: int) -> torch.Tensor:
        return tensor.new_full((len(tensor) + n_ends * n_cells,), fill).index_copy(0, at, tensor)

    genes = spread(batch.genes, CLS)
    if n_ends == 2:
        genes = genes.index_fill(0, cu_seqlens[1:].long() - 1, EOS)
    return replace(
        batch,
        genes=genes,
        values=spread(batch.values, 0),
        cu_seqlens=cu_seqlens,
        lengths=[length + n_ends for length in batch.lengths],
        counts=None if batch.counts is None else spread(batch.counts, 0),
    )
