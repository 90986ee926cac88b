"""Losses over a token table, computed in chunks (`parallel.chunked_loss`): cross-entropy and negative binomial.

With tensor parallel, each target of a chunk needs three numbers from the other ranks for the cross-entropy
(Megatron-LM, Shoeybi et al. 2019, section 3), and each cell four for the negative binomial: maximum and sum of the
softmax, the sum of the gradients of log means, and the loss.

Negative binomial: cell c has the count k of each token g, mostly 0, and their sum N. The mean is N times the softmax of
the logits, the inverse dispersion r of a token is exp(dispersion), and the variance mean + mean² / r. With L the
negative log-likelihood,

    dL / d log mean = r (mean - k) / (r + mean)
    dL / d r        = digamma(r) - digamma(k + r) + log(1 + mean / r) + (k - mean) / (r + mean)

Zeros are computed densely and without gamma functions, which cancel there; the other counts correct them. Source:
Robinson & Smyth 2008 (this parametrisation); Lopez et al. 2018 (scVI: mean as library size times a softmax).

Legend: N targets or cells, H hidden, V local rows of the table.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist

from cellmill.parallel.chunked_loss import chunked_loss
from cellmill.parallel.vocab_parallel import segment_sum


def token_loss(states: torch.Tensor, table: torch.Tensor, bias: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the logits `states @ table.T + bias` and `answers` (N,) int64, summed; see `chunked_loss`."""
    return chunked_loss(states, table, bias, _Answers(answers))


def profile_loss(
    states: torch.Tensor,
    table: torch.Tensor,
    bias: torch.Tensor,
    entries: list[int],
    starts: torch.Tensor,
    genes: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """As `token_loss`, of N targets that are distributions over the vocabulary, with `entries` entries each.

    `starts` (N + 1,) int64 are their first entries, on the device: reading `entries` to it would wait for it. `genes`,
    token ids int64, and `weights`, float32, are by entry, target after target. No gene occurs twice in a target, whose
    weights sum to 1.
    """
    return chunked_loss(states, table, bias, _Profiles(entries, starts, genes, weights))


class _Answers:
    """One token for each target."""

    first_row = 0

    def __init__(self, answers: torch.Tensor) -> None:
        self.answers = answers

    def loss(
        self, start: int, logits: torch.Tensor, vectors: tuple[torch.Tensor, ...], group: dist.ProcessGroup | None
    ) -> tuple[torch.Tensor, tuple[()]]:
        answers, rows = self.answers[start : start + len(logits)] - self.first_row, logits.shape[1]
        inside, row = (answers >= 0) & (answers < rows), answers.clamp(0, max(rows - 1, 0))[:, None]

        def subtract() -> None:
            logits.scatter_(1, row, logits.gather(1, row) - inside.to(logits.dtype)[:, None])

        return _cross_entropy(logits, lambda: logits.gather(1, row)[:, 0] * inside, subtract, group), ()


class _Profiles:
    """A sparse distribution for each target."""

    first_row = 0

    def __init__(self, entries: list[int], starts: torch.Tensor, genes: torch.Tensor, weights: torch.Tensor) -> None:
        self.starts, self.genes, self.weights = starts, genes, weights
        self.ends = [0, *accumulate(entries)]

    def loss(
        self, start: int, logits: torch.Tensor, vectors: tuple[torch.Tensor, ...], group: dist.ProcessGroup | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        n, rows = logits.shape
        # dense, so that sums have one order on every device; entries of other ranks add 0 to a row of this one
        dense = torch.zeros_like(logits)
        if rows:
            chunk = slice(self.ends[start], self.ends[start + n])
            lengths = self.starts[start : start + n + 1].diff()
            target = torch.repeat_interleave(lengths, output_size=chunk.stop - chunk.start)
            genes = self.genes[chunk] - self.first_row
            inside = (genes >= 0) & (genes < rows)
            dense.index_put_((target, genes.clamp(0, rows - 1)), self.weights[chunk] * inside, accumulate=True)
        return _cross_entropy(logits, lambda: (logits * dense).sum(1), lambda: logits.sub_(dense), group), ()


def _cross_entropy(
    logits: torch.Tensor,
    picked: Callable[[], torch.Tensor],
    subtract: Callable[[], object],
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Return the summed loss of float32 `logits` (n, V), which become its gradient in place.

    `picked` returns (n,), the logit of each target or the expected one; `subtract` takes the targets' own probabilities
    from `logits`, which by then are the model's.
    """
    rows = logits.shape[1]
    _subtract_maximum(logits, group)
    correct = picked() if rows else logits.new_zeros(len(logits))
    sums = torch.stack([logits.exp_().sum(1), correct])
    if group is not None:
        dist.all_reduce(sums, group=group)
    logits.div_(sums[0][:, None])
    if rows:
        subtract()
    return (sums[0].log() - sums[1]).sum()


def _subtract_maximum(logits: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Subtract each target's maximum over the rows of all ranks, in place."""
    maximum = logits.amax(1) if logits.shape[1] else logits.new_full((len(logits),), -torch.inf)
    if group is not None:
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
    logits.sub_(maximum[:, None])


def nb_loss(
    states: torch.Tensor,
    table: torch.Tensor,
    bias: torch.Tensor,
    dispersion: torch.Tensor,
    entries: list[int],
    starts: torch.Tensor,
    genes: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    """Negative log-likelihood of each cell's counts divided by their sum, summed over cells; see `chunked_loss`.

    `dispersion` (V,) is the log of the inverse dispersion. `entries`, `starts` and `genes` as in `profile_loss`;
    `counts` are float32 and above 0.
    """
    return chunked_loss(states, table, bias, _Counts(entries, starts, genes, counts), dispersion)


@dataclass(frozen=True)
class _Entries:
    """The counts of a chunk's cells; those of other ranks' rows are 0, in a row of this rank."""

    cell: torch.Tensor  # (entries,) int64, ascending
    starts: torch.Tensor  # (n + 1,) int64: first entry of each cell
    row: torch.Tensor
    count: torch.Tensor
    inside: torch.Tensor  # (entries,) float32: 1 for entries of this rank's rows, else 0
    sums: torch.Tensor  # (n,) float32: the sum of each cell's counts over all rows


class _Counts(_Profiles):
    """Sparse counts of all cells, as weights; the one further vector of the loss is the dispersion."""

    def loss(
        self, start: int, logits: torch.Tensor, vectors: tuple[torch.Tensor, ...], group: dist.ProcessGroup | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        n, n_rows = logits.shape
        chunk = slice(self.ends[start], self.ends[start + n])
        rows, counts = self.genes[chunk] - self.first_row, self.weights[chunk]
        starts = self.starts[start : start + n + 1] - chunk.start
        cell = torch.repeat_interleave(starts.diff(), output_size=chunk.stop - chunk.start)
        inside, sums = ((rows >= 0) & (rows < n_rows)).float(), segment_sum(counts, cell, starts)
        targets = _Entries(cell, starts, rows.clamp(0, max(n_rows - 1, 0)), counts * inside, inside, sums)
        loss, gradient = _loss_and_gradients(logits, vectors[0].float().exp(), targets, group)
        return loss, (gradient,)


def _loss_and_gradients(
    logits: torch.Tensor, inverse: torch.Tensor, targets: _Entries, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of float32 `logits` (n, V), which become their gradient, and that (V,) to log(inverse)."""
    n, n_rows = logits.shape
    _subtract_maximum(logits, group)
    normalizer = logits.exp().sum(1)
    if group is not None:
        dist.all_reduce(normalizer, group=group)
    logits.sub_(normalizer.log()[:, None])  # log-softmax
    sums, of_inverse = logits.new_zeros(2, n), torch.zeros_like(inverse)
    probabilities = logits.exp()
    if n_rows:
        sums[0], to_mean, of_inverse = _of_rows(logits, probabilities, inverse, targets)
        sums[1] = to_mean.sum(1)
        logits.copy_(to_mean)
    if group is not None:
        dist.all_reduce(sums, group=group)
    logits.sub_(probabilities.mul_(sums[1][:, None]))
    return sums[0].sum(), of_inverse


def _of_rows(
    log_p: torch.Tensor, probabilities: torch.Tensor, inverse: torch.Tensor, targets: _Entries
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss (n,) of this rank's rows, and its gradients to log means (n, V) and to `log(inverse)` (V,)."""
    at, share = (targets.cell, targets.row), (1 / targets.sums)[:, None]
    means = probabilities * targets.sums[:, None]
    total, log_ratio = means + inverse, torch.log1p(means / inverse)
    loss = (inverse * log_ratio * share).sum(1)
    of_mean = inverse * means / total * share
    of_inverse = inverse * (log_ratio - means / total) * share
    # counts above 0: log-probabilities of their own, gathered and added where they belong
    r, k, part = inverse[targets.row], targets.count, share[targets.cell, 0] * targets.inside
    log_mean = log_p[at] + targets.sums.log()[targets.cell]
    gammas = torch.lgamma(r) + torch.lgamma(k + 1) - torch.lgamma(k + r)
    detected = part * (gammas + k * (total[at].log() - log_mean))
    loss = loss + segment_sum(detected, targets.cell, targets.starts)
    of_mean.index_put_(at, -part * k * r / total[at], accumulate=True)
    gammas = torch.digamma(r) - torch.digamma(k + r)
    of_inverse.index_put_(at, part * r * (gammas + k / total[at]), accumulate=True)
    return loss, of_mean, of_inverse.sum(0)
