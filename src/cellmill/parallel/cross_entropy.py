"""Cross-entropy over a table of tokens that never has all logits: they live for one chunk of targets at a time.

A chunk's logits are turned in place into their own gradient, and that at once into its part of the gradients of
states, table and bias: nothing of size (targets, vocabulary) is kept for the backward pass, which only scales.

Source: Liger Kernel, Hsu et al. 2024, section 3.2 (gradients in the forward pass, chunk by chunk); Cut Cross-Entropy,
Wijmans et al. 2024, for what it saves. Over tensor-parallel processes a chunk needs three numbers of each target from
the others (Megatron-LM, Shoeybi et al. 2019, section 3).

Legend: N targets, H hidden, V rows of the table that this process has.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from cellmill.parallel.cpu_matmul import autocast_dtype, product
from cellmill.parallel.vocab_parallel import first_row, own_rows

CHUNK_LOGITS = 1 << 24
"""Logits of a chunk on a GPU: 64 MB, and enough targets for its matrix products."""
ELEMENTS = {"cpu": 1 << 22}
"""Logits of a chunk: what stays in a CPU's cache. `CHUNK_LOGITS` on other devices, which want large products."""
SCALED_ROWS = 4096  # of a gradient, at once in float32


def token_loss(states: torch.Tensor, table: torch.Tensor, bias: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the logits `states @ table.T + bias`, summed over the targets: a float32 scalar.

    Products are in the dtype of autocast, or else in that of `states`; all else is float32. A backward pass can be
    done once. Collective over the processes that share a table.

    Parameters
    ----------
    states, table, bias, answers
        (N, H), (V, H), whole or a DTensor cut by rows, (V,) and (N,) int64.
    """
    group, rows = None, len(table)
    if isinstance(table, DTensor):
        answers, group = answers - first_row(table), table.device_mesh.get_group()
        rows = -(-rows // table.device_mesh.size())  # the same on each process, or they would part ways
        states, table, bias = own_rows(states, table, bias)
    size = max(1, ELEMENTS.get(states.device.type, CHUNK_LOGITS) // rows)
    low = autocast_dtype(states) or states.dtype
    with nullcontext() if states.is_meta else torch.autocast(states.device.type, enabled=False):
        return _ChunkedCrossEntropy.apply(states, table, bias, answers, group, size, low, torch.is_grad_enabled())


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Answers count from this process's first row; those of other processes lie outside its rows."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        table: torch.Tensor,
        bias: torch.Tensor,
        answers: torch.Tensor,
        group: dist.ProcessGroup | None,
        size: int,
        low: torch.dtype,
        learns: bool,
    ) -> torch.Tensor:
        to_states, to_table, to_bias = (learns and needed for needed in ctx.needs_input_grad[:3])
        loss = torch.zeros((), device=states.device)
        of_states = torch.empty_like(states) if to_states else None
        of_table = torch.zeros(table.shape, device=table.device) if to_table else None
        of_bias = torch.zeros(bias.shape, device=bias.device) if to_bias else None
        rows, offset = table.to(low), bias.to(low)
        for start in range(0, len(states), size):
            part = states[start : start + size].to(low)
            logits = product(part, rows, offset).float()
            loss += _loss_and_slope(logits, answers[start : start + size], group)
            slope = logits.to(low)
            if of_states is not None:
                of_states[start : start + size] = product(slope, rows.t())
            if of_table is not None:
                _add_product(of_table, slope.t(), part)
            if of_bias is not None:
                of_bias += logits.sum(0)
        ctx.save_for_backward(
            of_states,
            None if of_table is None else of_table.to(table.dtype),
            None if of_bias is None else of_bias.to(bias.dtype),
        )
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = (None if own is None else _scaled(own, grad) for own in ctx.saved_tensors)
        return (*gradients, None, None, None, None, None)


def _loss_and_slope(logits: torch.Tensor, answers: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The summed loss of float32 `logits` (n, V), which become its gradient in place."""
    count, rows = logits.shape
    highest = logits.amax(1) if rows else logits.new_full((count,), -torch.inf)
    if group is not None:
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    logits.sub_(highest[:, None])
    inside = (answers >= 0) & (answers < rows)
    at = answers.clamp(0, max(rows - 1, 0))[:, None]
    asked = logits.gather(1, at)[:, 0] * inside if rows else torch.zeros_like(highest)
    sums = torch.stack([logits.exp_().sum(1), asked])
    if group is not None:
        dist.all_reduce(sums, group=group)
    logits.div_(sums[0][:, None])
    if rows:
        logits.scatter_add_(1, at, -inside.to(logits.dtype)[:, None])
    return (sums[0].log() - sums[1]).sum()


def _scaled(own: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """`own * factor`, in place: a second copy of the table's gradient would be the largest thing here."""
    if own.dtype == factor.dtype:
        return own.mul_(factor)
    for part in own.split(SCALED_ROWS):  # a GPU would round the factor to 16 bits first
        part.copy_(part * factor.expand(part.shape))
    return own


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, in the float32 of `total`, whatever the products are in."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b
