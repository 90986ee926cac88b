"""Losses over a token table whose logits exist for one chunk of targets at a time.

The logits of a chunk become their own gradient in place, which is added to the gradients of states, table and bias
right away. Nothing of size (targets, vocabulary) is kept for the backward pass, which only scales.

Source: Liger Kernel, Hsu et al. 2024, section 3.2 (chunked gradients in the forward pass); Cut Cross-Entropy, Wijmans
et al. 2024 (memory saved).

Legend: N targets, H hidden, V local rows of the table.
"""

from contextlib import nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from cellmill.parallel.torch_private import is_dtensor
from cellmill.parallel.vocab_parallel import first_row, own_rows

CHUNK_LOGITS = 1 << 24  # logits of a chunk on a GPU: 64 MB, and enough targets for its matrix products
ELEMENTS = {"cpu": 1 << 22}
"""Logits of a chunk that fit a CPU's cache. Other devices use `CHUNK_LOGITS`: they need large products."""
SCALED_ROWS = 4096  # rows of a gradient that are scaled in float32 at a time


class Targets(Protocol):
    """Targets of the loss, N of them."""

    first_row: int  # of this rank's part of the table

    def loss(
        self, start: int, logits: torch.Tensor, vectors: tuple[torch.Tensor, ...], group: dist.ProcessGroup | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return the summed loss of the targets from `start` on, and its gradient to each of `vectors`, (V,).

        The float32 `logits` (n, V) of these targets become their own gradient, in place. Collective over `group`, the
        ranks that share the table; None without tensor parallel.
        """
        ...


def chunked_loss(
    states: torch.Tensor, table: torch.Tensor, bias: torch.Tensor, targets: Targets, *vectors: torch.Tensor
) -> torch.Tensor:
    """Loss of the logits `states @ table.T + bias`, summed over the targets: a float32 scalar.

    (N, H), (V, H), a plain tensor or a DTensor sharded by rows, and (V,); `vectors` are further parameters of
    `targets.loss`, (V,) each. Products use the autocast dtype, or else that of `states`; everything else is float32.
    `backward` can run once. Collective over the ranks that share a sharded table.
    """
    group, rows = None, len(table)
    if is_dtensor(table):
        targets.first_row, group = first_row(table), table.device_mesh.get_group()
        rows = -(-rows // table.device_mesh.size())  # equal on every rank, so that all have the same chunks
        states, table, bias, *vectors = own_rows(states, table, bias, *vectors)  # type: ignore[assignment]
    chunk = max(1, ELEMENTS.get(states.device.type, CHUNK_LOGITS) // rows)
    dtype = autocast_dtype(states) or states.dtype
    with nullcontext() if states.is_meta else torch.autocast(states.device.type, enabled=False):
        return _ChunkedLoss.apply(
            targets, group, chunk, dtype, torch.is_grad_enabled(), states, table, bias, *vectors
        )  # fmt: skip


class _ChunkedLoss(torch.autograd.Function):
    """Targets whose rows of the table are on another rank add nothing here."""

    @staticmethod
    def forward(
        ctx: Any,
        targets: Targets,
        group: dist.ProcessGroup | None,
        chunk: int,
        dtype: torch.dtype,
        grad_enabled: bool,
        states: torch.Tensor,
        table: torch.Tensor,
        *vectors: torch.Tensor,
    ) -> torch.Tensor:
        to_states, to_table, *to_vectors = (grad_enabled and needed for needed in ctx.needs_input_grad[5:])
        loss = torch.zeros((), device=states.device)
        states_grad = torch.empty_like(states) if to_states else None
        table_grad = torch.zeros(table.shape, device=table.device) if to_table else None
        gradients = [
            torch.zeros(x.shape, device=x.device) if needed else None for x, needed in zip(vectors, to_vectors)
        ]
        rows, offset = table.to(dtype), vectors[0].to(dtype)
        for start in range(0, len(states), chunk):
            part = states[start : start + chunk].to(dtype)
            logits = F.linear(part, rows, offset).float()
            of_chunk, of_vectors = targets.loss(start, logits, vectors[1:], group)
            loss += of_chunk
            gradient = logits.to(dtype)
            if states_grad is not None:
                states_grad[start : start + chunk] = gradient @ rows
            if table_grad is not None:
                if dtype == torch.float32:
                    table_grad.addmm_(gradient.t(), part)
                else:
                    table_grad += gradient.t() @ part
            for total, own in zip(gradients, (logits.sum(0), *of_vectors)):
                if total is not None:
                    total += own
        kept = zip((states_grad, table_grad, *gradients), (states, table, *vectors))
        ctx.save_for_backward(*(None if own is None else own.to(like.dtype) for own, like in kept))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = (None if own is None else scaled(own, grad) for own in ctx.saved_tensors)
        return (None, None, None, None, None, *gradients)


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """Dtype that autocast casts to on the device of `tensor`; None where it is off, and on the meta device."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def scaled(own: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return `own * factor`, in place: a second copy of the table's gradient would be the largest tensor here."""
    if own.dtype == factor.dtype:
        return own.mul_(factor)
    for part in own.split(SCALED_ROWS):  # mul_ on a GPU would round the factor to 16 bits first
        part.copy_(part * factor.expand(part.shape))
    return own
