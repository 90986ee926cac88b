"""Chunked cross-entropy over a token table: logits exist for one chunk of targets at a time.

The logits of a chunk become their own gradient in place, which is added to the gradients of states, table and bias
right away. Nothing of size (targets, vocabulary) is kept for the backward pass, which only scales.

Source: Liger Kernel, Hsu et al. 2024, section 3.2 (chunked gradients in the forward pass); Cut Cross-Entropy, Wijmans
et al. 2024 (memory saved). With tensor parallel, each target of a chunk needs three numbers from the other ranks
(Megatron-LM, Shoeybi et al. 2019, section 3).

Legend: N targets, H hidden, V local rows of the table.
"""

from contextlib import nullcontext
from itertools import accumulate
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
"""Logits of a chunk that fit a CPU's cache. Other devices use `CHUNK_LOGITS`: they need large products."""
SCALED_ROWS = 4096  # rows of a gradient that are scaled in float32 at a time


def token_loss(states: torch.Tensor, table: torch.Tensor, bias: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the logits `states @ table.T + bias`, summed over the targets: a float32 scalar.

    Products use the autocast dtype, or else that of `states`; everything else is float32. `backward` can run once.
    Collective over the ranks that share a sharded table.

    Parameters
    ----------
    states, table, bias, answers
        (N, H), (V, H), a plain tensor or a DTensor sharded by rows, (V,) and (N,) int64.
    """
    return _chunked_loss(states, table, bias, _Answers(answers))


def profile_loss(
    states: torch.Tensor,
    table: torch.Tensor,
    bias: torch.Tensor,
    entries: list[int],
    genes: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """As `token_loss`, of N targets that are distributions over the vocabulary.

    Parameters
    ----------
    entries
        Number of entries of each target, N integers.
    genes, weights
        Token id, int64, and probability, float32, of each entry, target after target. No gene occurs twice in one
        target; the weights of a target sum to 1.
    """
    return _chunked_loss(states, table, bias, _Profiles(entries, genes, weights))


def _chunked_loss(
    states: torch.Tensor, table: torch.Tensor, bias: torch.Tensor, targets: "_Answers | _Profiles"
) -> torch.Tensor:
    group, rows = None, len(table)
    if isinstance(table, DTensor):
        targets.first_row, group = first_row(table), table.device_mesh.get_group()
        rows = -(-rows // table.device_mesh.size())  # equal on every rank, so that all have the same chunks
        states, table, bias = own_rows(states, table, bias)
    chunk = max(1, ELEMENTS.get(states.device.type, CHUNK_LOGITS) // rows)
    dtype = autocast_dtype(states) or states.dtype
    with nullcontext() if states.is_meta else torch.autocast(states.device.type, enabled=False):
        return _ChunkedCrossEntropy.apply(states, table, bias, targets, group, chunk, dtype, torch.is_grad_enabled())


class _Answers:
    """One token for each target; `first_row` is that of this rank's part of the table."""

    first_row = 0

    def __init__(self, answers: torch.Tensor) -> None:
        self.answers = answers

    def of(self, start: int, logits: torch.Tensor) -> "_Rows":
        """Return the targets from `start` on whose float32 `logits` (n, V) are given."""
        answers, rows = self.answers[start : start + len(logits)] - self.first_row, logits.shape[1]
        return _Rows(answers.clamp(0, max(rows - 1, 0)), (answers >= 0) & (answers < rows))


class _Rows:
    """Rows (n,) of this rank's table that a chunk's targets ask for, and whether they are this rank's at all."""

    def __init__(self, rows: torch.Tensor, inside: torch.Tensor) -> None:
        self.rows, self.inside = rows[:, None], inside

    def picked(self, logits: torch.Tensor) -> torch.Tensor:
        """(n,): the logit of each target."""
        return logits.gather(1, self.rows)[:, 0] * self.inside

    def subtract_from(self, probabilities: torch.Tensor) -> None:
        """Turn probabilities (n, V) into the gradient of the logits, in place."""
        probabilities.scatter_add_(1, self.rows, -self.inside.to(probabilities.dtype)[:, None])


class _Profiles:
    """A sparse distribution for each target."""

    first_row = 0

    def __init__(self, entries: list[int], genes: torch.Tensor, weights: torch.Tensor) -> None:
        self.entries, self.genes, self.weights = entries, genes, weights
        self.ends = [0, *accumulate(entries)]

    def of(self, start: int, logits: torch.Tensor) -> "_Distribution":
        """Return the targets from `start` on whose float32 `logits` (n, V) are given."""
        n, rows = logits.shape
        if not rows:
            return _Distribution(logits)
        own = slice(self.ends[start], self.ends[start + n])
        lengths = torch.tensor(self.entries[start : start + n], dtype=torch.int64, device=logits.device)
        target = torch.repeat_interleave(lengths, output_size=own.stop - own.start)
        genes = self.genes[own] - self.first_row
        inside = (genes >= 0) & (genes < rows)
        # dense, so that sums have one order on every device; entries of other ranks add 0 to a row of this one
        dense = torch.zeros_like(logits)
        dense.index_put_((target, genes.clamp(0, rows - 1)), self.weights[own] * inside, accumulate=True)
        return _Distribution(dense)


class _Distribution:
    """Probabilities (n, V) that a chunk's targets ask for."""

    def __init__(self, dense: torch.Tensor) -> None:
        self.dense = dense

    def picked(self, logits: torch.Tensor) -> torch.Tensor:
        """(n,): the expected logit of each target."""
        return (logits * self.dense).sum(1)

    def subtract_from(self, probabilities: torch.Tensor) -> None:
        """Turn probabilities (n, V) into the gradient of the logits, in place."""
        probabilities.sub_(self.dense)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Targets whose rows of the table are on another rank add nothing here."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        table: torch.Tensor,
        bias: torch.Tensor,
        targets: _Answers | _Profiles,
        group: dist.ProcessGroup | None,
        chunk: int,
        dtype: torch.dtype,
        grad_enabled: bool,
    ) -> torch.Tensor:
        to_states, to_table, to_bias = (grad_enabled and needed for needed in ctx.needs_input_grad[:3])
        loss = torch.zeros((), device=states.device)
        states_grad = torch.empty_like(states) if to_states else None
        table_grad = torch.zeros(table.shape, device=table.device) if to_table else None
        bias_grad = torch.zeros(bias.shape, device=bias.device) if to_bias else None
        rows, offset = table.to(dtype), bias.to(dtype)
        for start in range(0, len(states), chunk):
            part = states[start : start + chunk].to(dtype)
            logits = product(part, rows, offset).float()
            loss += _loss_and_gradient(logits, targets.of(start, logits), group)
            gradient = logits.to(dtype)
            if states_grad is not None:
                states_grad[start : start + chunk] = product(gradient, rows.t())
            if table_grad is not None:
                add_product(table_grad, gradient.t(), part)
            if bias_grad is not None:
                bias_grad += logits.sum(0)
        ctx.save_for_backward(
            states_grad,
            None if table_grad is None else table_grad.to(table.dtype),
            None if bias_grad is None else bias_grad.to(bias.dtype),
        )
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = (None if own is None else scaled(own, grad) for own in ctx.saved_tensors)
        return (*gradients, None, None, None, None, None)


def _loss_and_gradient(
    logits: torch.Tensor, targets: _Rows | _Distribution, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Return the summed loss of float32 `logits` (n, V), which become its gradient in place."""
    count, rows = logits.shape
    maximum = logits.amax(1) if rows else logits.new_full((count,), -torch.inf)
    if group is not None:
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
    logits.sub_(maximum[:, None])
    correct = targets.picked(logits) if rows else torch.zeros_like(maximum)
    sums = torch.stack([logits.exp_().sum(1), correct])
    if group is not None:
        dist.all_reduce(sums, group=group)
    logits.div_(sums[0][:, None])
    if rows:
        targets.subtract_from(logits)
    return (sums[0].log() - sums[1]).sum()


def scaled(own: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return `own * factor`, in place: a second copy of the table's gradient would be the largest tensor here."""
    if own.dtype == factor.dtype:
        return own.mul_(factor)
    for part in own.split(SCALED_ROWS):  # mul_ on a GPU would round the factor to 16 bits first
        part.copy_(part * factor.expand(part.shape))
    return own


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add `a @ b` to the float32 `total`, whatever the dtype of the product."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b
