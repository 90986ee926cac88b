"""Cross-entropy and negative binomial over a token table, whose logits exist chunk by chunk.

The logits of a chunk become their own gradient in place, which is added to the gradients of states,
table and bias right away. Nothing of size (targets, vocabulary) is kept for the backward pass,
which only scales (Liger Kernel, Hsu et al. 2024, section 3.2; Cut Cross-Entropy, Wijmans et al.
2024).

With tensor parallel, each target of a chunk needs three numbers from the other ranks for the
cross-entropy (Megatron-LM, Shoeybi et al. 2019, section 3). Each cell needs four for the negative
binomial: maximum and sum of the softmax, the sum of the gradients of log means, and the loss.

Negative binomial: cell c has the count k of each token g, mostly 0, and their sum N. The mean is N
times the softmax of the logits, r is the inverse dispersion of a token, and the variance is
mean + mean² / r. With L the negative log-likelihood,

    dL / d log mean = r (mean - k) / (r + mean)
    dL / d r        = digamma(r) - digamma(k + r) + log(1 + mean / r) + (k - mean) / (r + mean)

Zeros are computed densely and without gamma functions, which cancel there; the other counts correct
them. Source: Robinson & Smyth 2008 (this parametrisation); Lopez et al. 2018 (scVI: mean as library
size times a softmax).

Legend: N targets or cells, H width of the states, V local rows of the table.
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
from cellmill.parallel.vocab_parallel import first_row, segment_sum, to_local_rows

CPU_CHUNK_LOGITS = 1 << 22  # logits of a chunk on a CPU: they fit in its cache
CHUNK_LOGITS = 1 << 24  # on other devices: 64 MB, enough targets for their matrix products
SCALED_ROWS = 4096  # rows of a gradient that are scaled in float32 at a time


def token_loss(states: Tensor, table: Tensor, bias: Tensor, answers: Tensor) -> Tensor:
    """Return the summed cross-entropy, a float32 scalar, of logits `states @ table.T + bias`.

    Shapes are (N, H), (V, H), (V,) and, for `answers`, (N,) int64. The table is a plain tensor or a
    DTensor sharded by rows. Products use the autocast dtype, or else the dtype of `states`;
    everything else is float32. `backward` can run once. Collective over the ranks that share a
    sharded table.
    """
    return _Answers(answers).chunked_loss(states, table, bias)


def profile_loss(
    states: Tensor,
    table: Tensor,
    bias: Tensor,
    n_entries: list[int],
    entry_starts: Tensor,
    entry_token_ids: Tensor,
    entry_targets: Tensor,
    log_inverse_dispersion: Tensor | None = None,
) -> Tensor:
    """Return the loss as `token_loss` does, for N cells with distributions over the vocabulary.

    Cell i has `n_entries[i]` entries; `entry_starts` (N + 1,) int64 are the first entries, on the
    device: copying `n_entries` to it would wait for it. `entry_token_ids`, int64, and
    `entry_targets`, float32, are by entry, cell after cell. No token id occurs twice in a cell.

    The targets of a cell sum to 1. With `log_inverse_dispersion` (V,) they are counts above 0
    instead, and the loss is the negative log-likelihood of each cell's counts divided by their sum.
    """
    entries = (n_entries, entry_starts, entry_token_ids, entry_targets)
    if log_inverse_dispersion is None:
        return _Profiles(*entries).chunked_loss(states, table, bias)
    return _Counts(*entries).chunked_loss(states, table, bias, log_inverse_dispersion)


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
        loss = torch.zeros((), device=states.device)
        needs_states, needs_table, *needs_vectors = (
            grad_enabled and is_needed for is_needed in ctx.needs_input_grad[4:]
        )
        states_grad = torch.empty_like(states) if needs_states else None
        # summed over chunks in float32
        table_grad = torch.zeros(table.shape, device=table.device) if needs_table else None
        vector_grads = [
            torch.zeros(vector.shape, device=vector.device) if is_needed else None
            for vector, is_needed in zip(vectors, needs_vectors)
        ]
        rows = table.to(dtype)
        bias = vectors[0].to(dtype)
        for start in range(0, len(states), chunk):
            part = states[start : start + chunk].to(dtype)
            logits = F.linear(part, rows, bias).float()
            chunk_loss, *chunk_grads = targets.loss(start, logits, *vectors[1:])
            loss += chunk_loss
            # the logits are their own gradient now
            gradient = logits.to(dtype)
            if states_grad is not None:
                states_grad[start : start + chunk] = gradient @ rows
            if table_grad is not None:
                if dtype == torch.float32:
                    table_grad.addmm_(gradient.t(), part)
                else:
                    table_grad += gradient.t() @ part
            for total, chunk_grad in zip(vector_grads, (logits.sum(0), *chunk_grads)):
                if total is not None:
                    total += chunk_grad
        saved = []
        inputs = (states, table, *vectors)
        for total, x in zip((states_grad, table_grad, *vector_grads), inputs):
            saved.append(None if total is None else total.to(x.dtype))
        ctx.save_for_backward(*saved)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (
            None if gradient is None else scale_in_place(gradient, grad)
            for gradient in ctx.saved_tensors
        )
        return (None, None, None, None, *gradients)


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype of autocast on the device of `tensor`; None if off, and on the meta device."""
    kind = tensor.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def scale_in_place(gradient: Tensor, factor: Tensor) -> Tensor:
    """Multiply in place: a second copy of the table's gradient would be the largest tensor here."""
    if gradient.dtype == factor.dtype:
        return gradient.mul_(factor)
    for part in gradient.split(SCALED_ROWS):  # mul_ on a GPU would round the factor to 16 bits
        part.copy_(part * factor.expand(part.shape))
    return gradient


class _Targets(ABC):
    """Targets of a loss. Targets whose rows of the table are on another rank add nothing here."""

    first_row = 0  # first row of this rank's part of the table
    group: dist.ProcessGroup | None = None
    """Ranks that share the table; None without tensor parallel."""

    def chunked_loss(self, states: Tensor, table: Tensor, bias: Tensor, *vectors: Tensor) -> Tensor:
        """Return the summed loss, a float32 scalar (`token_loss`), which may read `vectors` (V,)."""
        rows = len(table)
        if is_dtensor(table):
            self.first_row = first_row(table)
            self.group = table.device_mesh.get_group()
            # rounded up, so that all ranks have the same chunks
            rows = -(-rows // table.device_mesh.size())
            states, table, bias, *vectors = to_local_rows(states, table, bias, *vectors)  # type: ignore[assignment]
        chunk_logits = CPU_CHUNK_LOGITS if states.device.type == "cpu" else CHUNK_LOGITS
        chunk = max(1, chunk_logits // rows)
        dtype = autocast_dtype(states) or states.dtype
        with nullcontext() if states.is_meta else torch.autocast(states.device.type, enabled=False):
            return _ChunkedLoss.apply(
                self, chunk, dtype, torch.is_grad_enabled(), states, table, bias, *vectors
            )

    @abstractmethod
    def loss(self, start: int, logits: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
        """Return the summed loss of a chunk of targets from `start` on, and its gradients.

        Gradients are with respect to each of `vectors`, (V,). The float32 `logits` (n, V) of these
        targets become their own gradient, in place. Collective over `group`.
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
        pick: Callable[[], Tensor],
        subtract: Callable[[], object],
    ) -> Tensor:
        """Return the summed loss of float32 `logits` (n, V), which become its gradient in place.

        `pick` returns the expected logit of each target, (n,). `subtract` subtracts the targets'
        probabilities from `logits`, which by then are the model's probabilities.
        """
        rows = logits.shape[1]
        self.subtract_maximum(logits)
        expected = pick() if rows else logits.new_zeros(len(logits))
        sums = torch.stack([logits.exp_().sum(1), expected])
        self.all_reduce(sums)
        normalizer, expected = sums
        logits.div_(normalizer[:, None])
        if rows:
            subtract()
        return (normalizer.log() - expected).sum()


class _Answers(_Targets):
    """One token for each target."""

    def __init__(self, answers: Tensor) -> None:
        self.answers = answers

    def loss(self, start: int, logits: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
        answers = self.answers[start : start + len(logits)] - self.first_row
        rows = logits.shape[1]
        is_local = (answers >= 0) & (answers < rows)
        row = answers.clamp(0, max(rows - 1, 0))[:, None]

        def pick() -> Tensor:
            return logits.gather(1, row)[:, 0] * is_local

        def subtract() -> None:
            probability = is_local.to(logits.dtype)[:, None]
            logits.scatter_(1, row, logits.gather(1, row) - probability)

        return (self.cross_entropy(logits, pick, subtract),)


class _Profiles(_Targets):
    """A sparse distribution for each target."""

    def __init__(
        self, n_entries: list[int], starts: Tensor, token_ids: Tensor, weights: Tensor
    ) -> None:
        self.starts = starts
        self.token_ids = token_ids
        self.weights = weights
        self.ends = [0, *accumulate(n_entries)]

    def entries(self, start: int, logits: Tensor) -> tuple[Tensor, ...]:
        """Return target, row, weight and whether the row is on this rank, by entry of a chunk.

        Rows on other ranks are clamped.
        """
        n, n_rows = logits.shape
        chunk = slice(self.ends[start], self.ends[start + n])
        lengths = self.starts[start : start + n + 1].diff()
        target = torch.repeat_interleave(lengths, output_size=chunk.stop - chunk.start)
        row = self.token_ids[chunk] - self.first_row
        is_local = (row >= 0) & (row < n_rows)
        return target, row.clamp(0, n_rows - 1), self.weights[chunk], is_local

    def loss(self, start: int, logits: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
        # dense, so that sums have one order on every device; entries of other ranks add 0
        dense = torch.zeros_like(logits)
        if logits.shape[1]:
            target, row, weights, is_local = self.entries(start, logits)
            dense.index_put_((target, row), weights * is_local, accumulate=True)

        def pick() -> Tensor:
            return (logits * dense).sum(1)

        return (self.cross_entropy(logits, pick, lambda: logits.sub_(dense)),)


class _Counts(_Profiles):
    """Sparse counts of all cells, as weights; the loss also reads `log_inverse_dispersion` (V,)."""

    def loss(self, start: int, logits: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
        inverse = vectors[0].float().exp()
        self.subtract_maximum(logits)
        normalizer = logits.exp().sum(1)
        self.all_reduce(normalizer)
        logits.sub_(normalizer.log()[:, None])  # log-softmax
        sums = logits.new_zeros(2, len(logits))  # loss, and gradients of log means, by cell
        inverse_grad = torch.zeros_like(inverse)
        probabilities = logits.exp()
        if logits.shape[1]:
            sums[0], mean_grad, inverse_grad = self._local_loss(
                start, logits, probabilities, inverse
            )
            sums[1] = mean_grad.sum(1)
            logits.copy_(mean_grad)
        self.all_reduce(sums)
        losses, mean_grad_sums = sums
        logits.sub_(probabilities.mul_(mean_grad_sums[:, None]))
        return losses.sum(), inverse_grad

    def _local_loss(
        self, start: int, log_p: Tensor, probabilities: Tensor, inverse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss (n,) over this rank's rows and its gradients.

        Gradients are with respect to log means, (n, V), and to `log(inverse)`, (V,).
        """
        cell, row, counts, is_local = self.entries(start, log_p)
        starts = self.starts[start : start + len(log_p) + 1] - self.ends[start]
        sums = segment_sum(counts, cell, starts)
        share = (1 / sums)[:, None]
        # all rows as if their count were 0, (n, V)
        means = probabilities * sums[:, None]
        total = means + inverse
        log_ratio = torch.log1p(means / inverse)
        loss = (inverse * log_ratio * share).sum(1)
        mean_grad = inverse * means / total * share
        inverse_grad = inverse * (log_ratio - means / total) * share
        # corrections for counts above 0, (entries,)
        entry = (cell, row)
        k = counts * is_local
        r = inverse[row]
        entry_share = share[cell, 0] * is_local
        log_mean = log_p[entry] + sums.log()[cell]
        gammas = torch.lgamma(r) + torch.lgamma(k + 1) - torch.lgamma(k + r)
        detected = entry_share * (gammas + k * (total[entry].log() - log_mean))
        loss = loss + segment_sum(detected, cell, starts)
        mean_grad.index_put_(entry, -entry_share * k * r / total[entry], accumulate=True)
        gammas = torch.digamma(r) - torch.digamma(k + r)
        correction = entry_share * r * (gammas + k / total[entry])
        inverse_grad.index_put_(entry, correction, accumulate=True)
        return loss, mean_grad, inverse_grad.sum(0)
