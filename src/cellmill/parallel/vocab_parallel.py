"""Embedding and logits over a table of tokens, whole or cut by rows over tensor-parallel processes.

Cut, no process ever has the logits of all tokens: each makes those of its rows. Any number of rows, divisible or not.
The loss is in `parallel.cross_entropy`.

Legend: T tokens, N targets, H hidden, V rows of the table.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional as F


def embed_tokens(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """(T,) int64 and (V, H) -> (T, H), whole on each process."""
    if not isinstance(table, DTensor):
        return F.embedding(tokens, table)
    own = table.to_local()
    rows = tokens - first_row(table)
    inside = (rows >= 0) & (rows < len(own))
    if len(own):
        found = F.embedding(rows.clamp(0, len(own) - 1), own) * inside[:, None]
    else:  # fewer tokens than processes
        found = own.new_zeros(len(tokens), own.shape[1]) + own.sum()
    part = DTensor.from_local(found, table.device_mesh, [Partial()])
    return part.redistribute(placements=[Replicate()]).to_local()


def token_logits(states: torch.Tensor, table: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """(N, H), (V, H) and (V,) -> (N, V) float32; a DTensor cut along V where the table is cut."""
    if not isinstance(table, DTensor):
        return F.linear(states, table.to(states.dtype), bias.to(states.dtype)).float()
    states, rows, bias = own_rows(states, table, bias)
    own = F.linear(states, rows.to(states.dtype), bias.to(states.dtype)).float()
    whole = torch.Size((len(states), len(table)))
    return DTensor.from_local(own, table.device_mesh, [Shard(1)], shape=whole, stride=(whole[1], 1))


def own_rows(
    states: torch.Tensor, table: DTensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(N, H) states, (own V, H) table and (own V,) bias, plain: what this process needs for its rows' logits."""
    mesh = table.device_mesh
    # each process's rows give a part of the gradient of what all have
    states = DTensor.from_local(states, mesh, [Replicate()]).to_local(grad_placements=[Partial()])
    bias = DTensor.from_local(bias, mesh, [Replicate()]).redistribute(placements=[Shard(0)]).to_local()
    return states, table.to_local(), bias


def first_row(table: DTensor) -> int:
    """Number of this process's first row, as torch cuts: all but the last have as many as fit evenly or one more."""
    mesh = table.device_mesh
    return -(-len(table) // mesh.size()) * mesh.get_local_rank()
