"""Embedding, logits and their loss over a table of tokens, whole or cut by rows over tensor-parallel processes.

Cut, no process ever has the logits of all tokens: each makes those of its rows, and the loss needs three numbers of
each target from the others (Megatron-LM, Shoeybi et al. 2019, section 3). Any number of rows, divisible or not.

Legend: T tokens, N targets, H hidden, V rows of the table.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional as F


def embed_tokens(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """(T,) int64 and (V, H) -> (T, H), whole on each process."""
    if not isinstance(table, DTensor):
        return F.embedding(tokens, table)
    own = table.to_local()
    rows = tokens - _first_row(table)
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
    mesh = table.device_mesh
    # each process's rows give a part of the gradient of what all have
    states = DTensor.from_local(states, mesh, [Replicate()]).to_local(grad_placements=[Partial()])
    bias = DTensor.from_local(bias, mesh, [Replicate()]).redistribute(placements=[Shard(0)]).to_local()
    own = F.linear(states, table.to_local().to(states.dtype), bias.to(states.dtype)).float()
    whole = torch.Size((len(states), len(table)))
    return DTensor.from_local(own, mesh, [Shard(1)], shape=whole, stride=(whole[1], 1))


def token_loss(logits: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of (N, V) logits, summed over the (N,) int64 answers."""
    if not isinstance(logits, DTensor):
        return F.cross_entropy(logits, answers, reduction="sum")
    own = logits.to_local()
    return _CutCrossEntropy.apply(own, answers - _first_row(logits, dim=1), logits.device_mesh.get_group())


class _CutCrossEntropy(torch.autograd.Function):
    """Of (N, own rows) logits; answers count from this process's first row."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, answers: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        count, rows = logits.shape
        highest = logits.amax(1) if rows else logits.new_full((count,), -torch.inf)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        weights = (logits - highest[:, None]).exp_()
        inside = (answers >= 0) & (answers < rows)
        at = answers.clamp(0, max(rows - 1, 0))[:, None]
        asked = (logits.gather(1, at)[:, 0] - highest) * inside if rows else torch.zeros_like(highest)
        sums = torch.stack([weights.sum(1), asked])
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(weights.div_(sums[0][:, None]), at, inside)
        return (sums[0].log() - sums[1]).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        probabilities, at, inside = ctx.saved_tensors
        gradient = probabilities.clone()
        if gradient.shape[1]:
            gradient.scatter_add_(1, at, -inside.to(gradient.dtype)[:, None])
        return gradient * grad, None, None


def _first_row(table: DTensor, dim: int = 0) -> int:
    """Number of this process's first row, as torch cuts: all but the last have as many as fit evenly or one more."""
    mesh = table.device_mesh
    return -(-table.shape[dim] // mesh.size()) * mesh.get_local_rank()
