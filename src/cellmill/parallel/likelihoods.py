"""Losses over a token table, whose logits exist for one chunk of targets at a time: cross-entropy,
negative binomial.

The logits of a chunk become their own gradient in place, which is added to the gradients of states,
table and bias right away. Nothing of size (targets, vocabulary) is kept for the backward pass,
which only scales (Liger Kernel, Hsu et al. 2024, section 3.2; Cut Cross-Entropy, Wijmans et al.
2024).

With tensor parallel, each target of a chunk needs three numbers from the other ranks for the
cross-entropy (Megatron-LM, Shoeybi et al. 2019, section 3), and each cell four for the negative
binomial: maximum and sum of the softmax, the sum of the gradients of log means, and the loss.

Negative binomial: cell c has the count k of each token g, mostly 0, and their sum N. The mean is N
times the softmax of the logits, the inverse dispersion r of a token is exp(dispersion), and the
variance mean + mean² / r. With L the negative log-likelihood,

    dL / d log mean = r (mean - k) / (r + mean)
    dL / d r        = digamma(r) - digamma(k + r) + log(1 + mean / r) + (k - mean) / (r + mean)

Zeros are computed densely and without gamma functions, which cancel there; the other counts correct
them. Source: Robinson & Smyth 2008 (this parametrisation); Lopez et al. 2018 (scVI: mean as library
size times a softmax).

Legend: N targets or cells, H hidden, V local rows of the table.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from cellmill.parallel.torch_private import is_dtensor
from cellmill.parallel.vocab_parallel import first_row, own_rows, segment_sum

# logits of a chunk on a GPU: 64 MB, and enough targets for its matrix products
CHUNK_LOGITS = 1 << 24
ELEMENTS = {"cpu": 1 << 22}
"""Logits of a chunk that fit a CPU's cache. Other devices use `CHUNK_LOGITS`: they need large
products.
"""
SCALED_ROWS = 4096  # rows of a gradient that are scaled in float32 at a time


def token_loss(states: Tensor, table: Tensor, bias: Tensor, answers: Tensor) -> Tensor:
    """Cross-entropy of the logits `states @ table.T + bias` and `answers` (N,) int64, summed: a
    float32 scalar.

    (N, H), (V, H), a plain tensor or a DTensor sharded by rows, and (V,). Products use the autocast
    dtype, or else the dtype of `states`; everything else is float32. `backward` can run once.
    Collective over the ranks that share a sharded table.
    """
    return _Answers(answers).chunked_loss(states, table, bias)


def profile_loss(
    states: Tensor,
    table: Tensor,
    bias: Tensor,
    entries: list[int],
    starts: Tensor,
    genes: Tensor,
    weights: Tensor,
    dispersion: Tensor | None = None,
) -> Tensor:
    """As `token_loss`, of N targets that are distributions over the vocabulary, with `entries`
    entries each.

    `starts` (N + 1,) int64 are their first entries, on the device: reading `entries` to it would
    wait for it. `genes`, token ids int64, and `weights`, float32, are by entry, target after
    target. No gene occurs twice in a target, whose weights sum to 1.

    With `dispersion` (V,), the log of the inverse dispersion, `weights` are counts above 0, and the
    loss is the negative log-likelihood of each cell's counts divided by their sum.
    """
    if dispersion is None:
        return _Profiles(entries, starts, genes, weights).chunked_loss(states, table, bias)
    return _Counts(entries, starts, genes, weights).chunked_loss(states, table, bias, dispersion)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        targets: "_Targets",
        chunk: int,
        dtype: torch.dtype,
        grad_enabled: bool,
        states: Tensor,
        table: Tensor,
        *vectors: Tensor,
    ) -> Tensor:
        to_states, to_table, *to_vectors = (
            grad_enabled and needed for needed in ctx.needs_input_grad[4:]
        )
        loss = torch.zeros((), device=states.device)
        states_grad = torch.empty_like(states) if to_states else None
        table_grad = torch.zeros(table.shape, device=table.device) if to_table else None
        gradients = [
            torch.zeros(x.shape, device=x.device) if needed else None
            for x, needed in zip(vectors, to_vectors)
        ]
        rows = table.to(dtype)
        offset = vectors[0].to(dtype)
        for start in range(0, len(states), chunk):
            part = states[start : start + chunk].to(dtype)
            logits = F.linear(part, rows, offset).float()
            of_chunk, *of_vectors = targets.loss(start, logits, *vectors[1:])
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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (None if own is None else scaled(own, grad) for own in ctx.saved_tensors)
        return (None, None, None, None, *gradients)


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Dtype that autocast casts to on the device of `tensor`; None where it is off, and on the meta
    device.
    """
    kind = tensor.device.type
    return (
        torch.get_autocast_dtype(kind)
        if kind != "meta" and torch.is_autocast_enabled(kind)
        else None
    )


def scaled(own: Tensor, factor: Tensor) -> Tensor:
    """Return `own * factor`, in place: a second copy of the table's gradient would be the largest
    tensor here.
    """
    if own.dtype == factor.dtype:
        return own.mul_(factor)
    for part in own.split(SCALED_ROWS):  # mul_ on a GPU would round the factor to 16 bits first
        part.copy_(part * factor.expand(part.shape))
    return own


class _Targets(ABC):
    """Targets of a loss; those whose rows of the table are on another rank add nothing here."""

    first_row = 0  # of this rank's part of the table
    # ranks that share the table; None without tensor parallel
    group: dist.ProcessGroup | None = None

    def chunked_loss(self, states: Tensor, table: Tensor, bias: Tensor, *vectors: Tensor) -> Tensor:
        """Return the summed loss, a float32 scalar: see `token_loss`; `vectors` (V,) are what it
        needs beside.
        """
        rows = len(table)
        if is_dtensor(table):
            self.first_row = first_row(table)
            self.group = table.device_mesh.get_group()
            # equal on every rank, so that all have the same chunks
            rows = -(-rows // table.device_mesh.size())
            states, table, bias, *vectors = own_rows(states, table, bias, *vectors)  # type: ignore[assignment]
        chunk = max(1, ELEMENTS.get(states.device.type, CHUNK_LOGITS) // rows)
        dtype = autocast_dtype(states) or states.dtype
        with nullcontext() if states.is_meta else torch.autocast(states.device.type, enabled=False):
            return _ChunkedLoss.apply(
                self, chunk, dtype, torch.is_grad_enabled(), states, table, bias, *vectors
            )

    @abstractmethod
    def loss(self, start: int, logits: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
        """Return the summed loss of the targets from `start` on, and its gradient to each of
        `vectors`, (V,).

        The float32 `logits` (n, V) of these targets become their own gradient, in place. Collective
        over `group`.
        """

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        if self.group is not None:
            dist.all_reduce(tensor, op, group=self.group)

    def subtract_maximum(self, logits: Tensor) -> None:
        """Subtract each target's maximum over the rows of all ranks, in place."""
        maximum = logits.amax(1) if logits.shape[1] else logits.new_full((len(logits),), -torch.inf)
        self.all_reduce(maximum, dist.ReduceOp.MAX)
        logits.sub_(maximum[:, None])

    def cross_entropy(
        self,
        logits: Tensor,
        picked: Callable[[], Tensor],
        subtract: Callable[[], object],
    ) -> Tensor:
        """Return the summed loss of float32 `logits` (n, V), which become its gradient in place.

        `picked` returns (n,), the logit of each target or the expected one; `subtract` takes the
        targets' own probabilities from `logits`, which by then are the model's.
        """
        rows = logits.shape[1]
        self.subtract_maximum(logits)
        correct = picked() if rows else logits.new_zeros(len(logits))
        sums = torch.stack([logits.exp_().sum(1), correct])
        self.all_reduce(sums)
        logits.div_(sums[0][:, None])
        if rows:
            subtract()
        return (sums[0].log() - sums[1]).sum()


class _Answers(_Targets):
    """One token for each target."""

    def __init__(self, answers: Tensor) -> None:
        self.answers = answers

    def loss(self, start: int, logits: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
        answers = self.answers[start : start + len(logits)] - self.first_row
        rows = logits.shape[1]
        inside = (answers >= 0) & (answers < rows)
        row = answers.clamp(0, max(rows - 1, 0))[:, None]

        def subtract() -> None:
            logits.scatter_(1, row, logits.gather(1, row) - inside.to(logits.dtype)[:, None])

        return (self.cross_entropy(logits, lambda: logits.gather(1, row)[:, 0] * inside, subtract),)


class _Profiles(_Targets):
    """A sparse distribution for each target."""

    def __init__(self, entries: list[int], starts: Tensor, genes: Tensor, weights: Tensor) -> None:
        self.starts = starts
        self.genes = genes
        self.weights = weights
        self.ends = [0, *accumulate(entries)]

    def entries(self, start: int, logits: Tensor) -> tuple[Tensor, ...]:
        """Target, row, weight and whether the row is on this rank, of each entry of a chunk; other
        rows are clamped.
        """
        n, n_rows = logits.shape
        chunk = slice(self.ends[start], self.ends[start + n])
        lengths = self.starts[start : start + n + 1].diff()
        target = torch.repeat_interleave(lengths, output_size=chunk.stop - chunk.start)
        row = self.genes[chunk] - self.first_row
        return target, row.clamp(0, n_rows - 1), self.weights[chunk], (row >= 0) & (row < n_rows)

    def loss(self, start: int, logits: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
        # dense, so that sums have one order on every device; entries of other ranks add 0 to a row
        # of this one
        dense = torch.zeros_like(logits)
        if logits.shape[1]:
            target, row, weights, inside = self.entries(start, logits)
            dense.index_put_((target, row), weights * inside, accumulate=True)
        return (
            self.cross_entropy(logits, lambda: (logits * dense).sum(1), lambda: logits.sub_(dense)),
        )


class _Counts(_Profiles):
    """Sparse counts of all cells, as weights; the one further vector of the loss is the dispersion."""

    def loss(self, start: int, logits: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
        inverse = vectors[0].float().exp()
        self.subtract_maximum(logits)
        normalizer = logits.exp().sum(1)
        self.all_reduce(normalizer)
        logits.sub_(normalizer.log()[:, None])  # log-softmax
        sums = logits.new_zeros(2, len(logits))
        of_inverse = torch.zeros_like(inverse)
        probabilities = logits.exp()
        if logits.shape[1]:
            sums[0], of_mean, of_inverse = self._of_rows(start, logits, probabilities, inverse)
            sums[1] = of_mean.sum(1)
            logits.copy_(of_mean)
        self.all_reduce(sums)
        logits.sub_(probabilities.mul_(sums[1][:, None]))
        return sums[0].sum(), of_inverse

    def _of_rows(
        self, start: int, log_p: Tensor, probabilities: Tensor, inverse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss (n,) of this rank's rows, and its gradients to log means (n, V) and to
        `log(inverse)` (V,).
        """
        cell, row, counts, inside = self.entries(start, log_p)
        starts = self.starts[start : start + len(log_p) + 1] - self.ends[start]
        sums = segment_sum(counts, cell, starts)
        k = counts * inside
        at = (cell, row)
        share = (1 / sums)[:, None]
        means = probabilities * sums[:, None]
        total = means + inverse
        log_ratio = torch.log1p(means / inverse)
        loss = (inverse * log_ratio * share).sum(1)
        of_mean = inverse * means / total * share
        of_inverse = inverse * (log_ratio - means / total) * share
        # counts above 0: log-probabilities of their own, gathered and added where they belong
        r = inverse[row]
        part = share[cell, 0] * inside
        log_mean = log_p[at] + sums.log()[cell]
        gammas = torch.lgamma(r) + torch.lgamma(k + 1) - torch.lgamma(k + r)
        detected = part * (gammas + k * (total[at].log() - log_mean))
        loss = loss + segment_sum(detected, cell, starts)
        of_mean.index_put_(at, -part * k * r / total[at], accumulate=True)
        gammas = torch.digamma(r) - torch.digamma(k + r)
        of_inverse.index_put_(at, part * r * (gammas + k / total[at]), accumulate=True)
        return loss, of_mean, of_inverse.sum(0)
