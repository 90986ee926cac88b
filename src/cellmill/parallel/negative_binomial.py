"""Negative binomial likelihood over a token table, in chunks (`parallel.chunked_loss`).

Cell c has the count k of each token g, mostly 0, and their sum N. The mean is N times the softmax of the logits, the
inverse dispersion r of a token is exp(dispersion), and the variance mean + mean² / r. With L the negative
log-likelihood,

    dL / d log mean = r (mean - k) / (r + mean)
    dL / d r        = digamma(r) - digamma(k + r) + log(1 + mean / r) + (k - mean) / (r + mean)

Zeros are computed densely and without gamma functions, which cancel there; the other counts correct them. With tensor
parallel, a cell of a chunk needs four numbers from the other ranks: maximum and sum of the softmax, the sum of the
gradients of log means, and the loss.

Source: Robinson & Smyth 2008 (this parametrisation); Lopez et al. 2018 (scVI: mean as library size times a softmax).

Legend: N cells, H hidden, V local rows of the table.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist

from cellmill.parallel.chunked_loss import chunked_loss
from cellmill.parallel.segments import segment_sum


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

    Parameters
    ----------
    states, table, bias, dispersion
        (N, H), (V, H), a plain tensor or a DTensor sharded by rows, (V,), and (V,), the log of the inverse dispersion.
    entries
        Number of entries of each cell, N integers above 0.
    starts
        (N + 1,) int64: the first entry of each cell, and their number, on the device.
    genes, counts
        Token id, int64, and count, float32 and above 0, of each entry, cell after cell. No gene occurs twice in a cell.
    """
    return chunked_loss(states, table, bias, _Counts(entries, starts, genes, counts), dispersion)


@dataclass(frozen=True)
class _Entries:
    """The counts of a chunk's cells; those of other ranks' rows are 0, in a row of this rank."""

    cell: torch.Tensor
    """(entries,) int64, ascending."""
    starts: torch.Tensor
    """(n + 1,) int64: first entry of each cell."""
    row: torch.Tensor
    count: torch.Tensor
    inside: torch.Tensor
    """(entries,) float32: 1 for entries of this rank's rows, else 0."""
    sums: torch.Tensor
    """(n,) float32: the sum of each cell's counts over all rows."""


class _Counts:
    """Sparse counts of all cells; the one further vector of the loss is the dispersion."""

    first_row = 0

    def __init__(self, entries: list[int], starts: torch.Tensor, genes: torch.Tensor, counts: torch.Tensor) -> None:
        self.starts, self.genes, self.counts = starts, genes, counts
        self.ends = [0, *accumulate(entries)]

    def loss(
        self, start: int, logits: torch.Tensor, vectors: tuple[torch.Tensor, ...], group: dist.ProcessGroup | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """See `chunked_loss.Targets`."""
        (dispersion,) = vectors
        loss, gradient = _loss_and_gradients(logits, dispersion.float().exp(), self.of(start, *logits.shape), group)
        return loss, (gradient,)

    def of(self, start: int, n: int, n_rows: int) -> _Entries:
        """Return the counts of `n` cells from `start` on, for a table of `n_rows` > 0 rows, or none."""
        own = slice(self.ends[start], self.ends[start + n])
        rows, counts = self.genes[own] - self.first_row, self.counts[own]
        starts = self.starts[start : start + n + 1] - own.start
        cell = torch.repeat_interleave(starts.diff(), output_size=own.stop - own.start)
        inside = ((rows >= 0) & (rows < n_rows)).float()
        sums = segment_sum(counts, cell, starts)
        return _Entries(cell, starts, rows.clamp(0, max(n_rows - 1, 0)), counts * inside, inside, sums)


def _loss_and_gradients(
    logits: torch.Tensor, inverse: torch.Tensor, targets: _Entries, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss of float32 `logits` (n, V), and its gradient (V,) to `log(inverse)`.

    The logits become their own gradient in place.
    """
    n, n_rows = logits.shape
    maximum = logits.amax(1) if n_rows else logits.new_full((n,), -torch.inf)
    if group is not None:
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
    logits.sub_(maximum[:, None])
    normalizer = logits.exp().sum(1)
    if group is not None:
        dist.all_reduce(normalizer, group=group)
    logits.sub_(normalizer.log()[:, None])  # log-softmax
    sums, of_inverse = logits.new_zeros(2, n), torch.zeros_like(inverse)
    probabilities = logits.exp()
    if n_rows:
        sums[0], of_mean, of_inverse = _of_rows(logits, probabilities, inverse, targets)
        sums[1] = of_mean.sum(1)
        logits.copy_(of_mean)
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
