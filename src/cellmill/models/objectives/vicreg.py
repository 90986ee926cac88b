"""VICReg of two views of each cell, from sums over the global batch.

With vectors z and z' of n cells, width H, and their covariances C and C' (divided by n - 1):

- invariance: the mean over cells and directions of (z - z')^2
- variance: the mean over directions of max(0, 1 - sqrt(C_jj + 1e-4)), for both views
- covariance: the sum of squares of C off its diagonal, divided by H, for both views

All three are functions of a few sums over cells, so a micro-batch needs no other cell's vector: `sums_of` adds up over
micro-batches and ranks, and `share` has the loss's gradients with respect to the own vectors. Sums are float64, as a
covariance is the small difference of large numbers.

Source: Bardes, Ponce & LeCun 2022 (VICReg), equations 1 to 6; the invariance is divided by H, as in the authors' code.
"""

import torch
from torch.nn import functional as F

EPS = 1e-4
N_VIEWS = 2

Weights = tuple[float, float, float]
"""Of invariance, variance and covariance."""


def n_sums(width: int) -> int:
    """Return the length of `sums_of` for vectors of `width` elements."""
    return 2 + N_VIEWS * width * (width + 1)


def sums_of(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """(cells, H) twice -> (n_sums,) float64: n, sum of squared differences, then sums of z and z z^T of each view."""
    first, second = first.double(), second.double()
    n = first.new_full((1,), len(first))
    parts = [n, (first - second).square().sum()[None]]
    for z in (first, second):
        parts += [z.sum(0), (z.T @ z).flatten()]
    return torch.cat(parts)


def vicreg(totals: torch.Tensor, width: int, weights: Weights) -> torch.Tensor:
    """Return the loss from sums over all cells, a float64 scalar."""
    (n, differences), *of_views = totals.split([2, *[width, width * width] * N_VIEWS])
    n = n.detach().clamp(min=1)
    invariance, variance, covariance = weights
    loss = invariance * differences / (n * width)
    for z, second_moment in zip(of_views[::2], of_views[1::2]):
        matrix = (second_moment.view(width, width) - z.outer(z) / n) / (n - 1).clamp(min=1)
        variances = matrix.diagonal()
        hinge = F.relu(1 - (variances.clamp(min=0) + EPS).sqrt()).mean()
        correlated = (matrix.square().sum() - variances.square().sum()) / width
        loss = loss + variance * hinge + covariance * correlated
    return loss


def share(first: torch.Tensor, second: torch.Tensor, totals: torch.Tensor, weights: Weights) -> torch.Tensor:
    """Return a micro-batch's share of n times the loss, a float32 scalar.

    Its value is the loss times the own cells. Its gradient is that of n times the loss of all cells with respect to the
    own vectors: the loss's gradient with respect to the sums, times that of the own sums.
    """
    with torch.enable_grad():
        known = totals.detach().requires_grad_()
        loss = vicreg(known, first.shape[1], weights)
        (gradient,) = torch.autograd.grad(loss, known)
    own = sums_of(first, second)
    surrogate = totals[0] * (gradient * own).sum()
    return (len(first) * loss.detach() + surrogate - surrogate.detach()).float()
