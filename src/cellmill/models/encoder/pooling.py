"""Pooling: from the states of a cell's tokens to the cell embedding.

Legend: T tokens of the batch, C cells, H hidden.
"""

import torch

from cellmill.models.encoder_batch import EncoderBatch
from cellmill.parallel.segments import segment_sum


def first_tokens(prepared: EncoderBatch) -> torch.Tensor:
    """(T,) bool: the first token of each cell, of which all have one."""
    first = torch.zeros(len(prepared.genes), dtype=torch.bool, device=prepared.genes.device)
    return first.index_fill(0, prepared.cu_seqlens[:-1].long(), True)


def mean_state(states: torch.Tensor, prepared: EncoderBatch) -> torch.Tensor:
    """(T, H) -> (C, H) float32: mean over the tokens of genes; zeros for a cell without any."""
    lengths, states, cells = prepared.cu_seqlens.diff(), states.float(), (prepared.cell, prepared.cu_seqlens)
    if prepared.covariate_rows is not None:
        of_gene = prepared.covariate_rows == 0
        lengths, states = segment_sum(of_gene.float(), *cells), states * of_gene[:, None]
    return segment_sum(states, *cells) / lengths.clamp(min=1)[:, None]


def first_state(states: torch.Tensor, prepared: EncoderBatch) -> torch.Tensor:
    """(T, H) -> (C, H) float32: the state of each cell's first token."""
    return states[prepared.cu_seqlens[:-1].long()].float()


def padded_state(states: torch.Tensor, inside: torch.Tensor, pooling: str, query: torch.Tensor | None) -> torch.Tensor:
    """(C, L, H), and (C, L) bool of tokens that are no padding -> (C, H): the same poolings of padded cells."""
    if pooling == "cls":
        return states[:, 0]
    weights = inside.to(states.dtype)
    if query is not None:
        scores = states @ query * states.shape[-1] ** -0.5
        weights = scores.masked_fill(~inside, -torch.inf).softmax(1)
    return (states * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)


def attended_state(states: torch.Tensor, prepared: EncoderBatch, query: torch.Tensor) -> torch.Tensor:
    """(T, H) and (H,) -> (C, H) float32: states weighted by the softmax over a cell of their product with `query`.

    The products are divided by the square root of H. Zeros for a cell without tokens.
    """
    states, cell = states.float(), prepared.cell
    scores = states @ query.float() * states.shape[1] ** -0.5
    largest = torch.full((len(prepared.lengths),), -torch.inf, device=scores.device)
    largest = largest.scatter_reduce(0, cell, scores.detach(), "amax")  # cancels: no gradient
    weights = (scores - largest[cell]).exp()
    totals = segment_sum(weights, cell, prepared.cu_seqlens)
    sums = segment_sum(weights[:, None] * states, cell, prepared.cu_seqlens)
    return sums / totals.clamp(min=1e-30)[:, None]
