"""Embedding lookup and logits over a token table, plain or sharded by rows over tensor-parallel ranks.

Sharded, each rank computes the logits of its own rows and never all of them. V need not be divisible by the ranks. The
losses are in `parallel.chunked_loss`.

Legend: T tokens, C cells, N targets, H hidden, V rows of the table.
"""

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional as F


def embed_tokens(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """(T,) int64 and (V, H) -> (T, H), replicated."""
    if not isinstance(table, DTensor):
        return F.embedding(tokens, table)
    own = table.to_local()
    rows = tokens - first_row(table)
    inside = (rows >= 0) & (rows < len(own))
    if len(own):
        embedded = F.embedding(rows.clamp(0, len(own) - 1), own) * inside[:, None]
    else:  # fewer table rows than ranks
        embedded = own.new_zeros(len(tokens), own.shape[1]) + own.sum()
    part = DTensor.from_local(embedded, table.device_mesh, [Partial()])
    return part.redistribute(placements=[Replicate()]).to_local()


def embed_bags(
    tokens: torch.Tensor, values: torch.Tensor, cu_seqlens: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    """Sums of value times embedding over the tokens of each cell, (C, H), replicated.

    Parameters
    ----------
    tokens, values, cu_seqlens, table
        (T,) int64, (T,), (C + 1,) offsets of the cells, and (V, H).
    """
    if not isinstance(table, DTensor):
        return _sum_bags(tokens, values, cu_seqlens, table)
    own = table.to_local()
    rows = tokens - first_row(table)
    inside = (rows >= 0) & (rows < len(own))
    if len(own):
        summed = _sum_bags(rows.clamp(0, len(own) - 1), values * inside, cu_seqlens, own)
    else:  # fewer table rows than ranks
        summed = own.new_zeros(len(cu_seqlens) - 1, own.shape[1]) + own.sum()
    part = DTensor.from_local(summed, table.device_mesh, [Partial()])
    return part.redistribute(placements=[Replicate()]).to_local()


def _sum_bags(
    tokens: torch.Tensor, values: torch.Tensor, cu_seqlens: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    weights = values.to(table.dtype)
    return F.embedding_bag(
        tokens, table, cu_seqlens.to(tokens.dtype), per_sample_weights=weights, mode="sum", include_last_offset=True
    )


def token_logits(states: torch.Tensor, table: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """(N, H), (V, H) and (V,) -> (N, V) float32; a DTensor sharded along V where the table is sharded."""
    if not isinstance(table, DTensor):
        return F.linear(states, table.to(states.dtype), bias.to(states.dtype)).float()
    states, rows, bias = own_rows(states, table, bias)
    own = F.linear(states, rows.to(states.dtype), bias.to(states.dtype)).float()
    whole = torch.Size((len(states), len(table)))
    return DTensor.from_local(own, table.device_mesh, [Shard(1)], shape=whole, stride=(whole[1], 1))


def own_rows(states: torch.Tensor, table: DTensor, *vectors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return (N, H) states, (local V, H) table and (local V,) parts of `vectors` (bias, …) as plain tensors."""
    mesh = table.device_mesh
    # each rank's rows contribute a partial gradient of the replicated states
    states = DTensor.from_local(states, mesh, [Replicate()]).to_local(grad_placements=[Partial()])
    own = (DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[Shard(0)]).to_local() for x in vectors)
    return states, table.to_local(), *own


def first_row(table: DTensor) -> int:
    """Return the index of this rank's first row, as torch shards: ceil(V / ranks) rows each, fewer on the last."""
    mesh = table.device_mesh
    return -(-len(table) // mesh.size()) * mesh.get_local_rank()
