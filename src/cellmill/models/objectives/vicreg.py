"""VICReg of two views of each cell of a global batch.

With vectors z and z' of n cells, width H, and their covariances C and C' (divided by n - 1):

- invariance: the mean over cells and directions of (z - z')^2
- variance: the mean over directions of max(0, 1 - sqrt(C_jj + 1e-4)), for both views
- covariance: the sum of squares of C off its diagonal, divided by H, for both views

The table is float32, the loss float64, as a covariance is the small difference of large numbers.

Source: Bardes, Ponce & LeCun 2022 (VICReg), equations 1 to 6; the invariance is divided by H, as in the authors' code.
"""

import torch
from torch.nn import functional as F

EPS = 1e-4

Weights = tuple[float, float, float]
"""Of invariance, variance and covariance."""


def vicreg(table: torch.Tensor, weights: Weights) -> torch.Tensor:
    """Return n times the loss, a float64 scalar, of rows (slots, 1 + 2 H): 1, z and z'; rows of zeros are no cells."""
    width = table.shape[1] // 2
    filled, *views = table.double().split([1, width, width], dim=1)
    n_cells = filled.detach().sum()
    n = n_cells.clamp(min=1)
    invariance, variance, covariance = weights
    first, second = views
    loss = invariance * (first - second).square().sum() / (n * width)
    for z in views:
        centered = z - filled * (z.sum(0) / n)
        matrix = centered.T @ centered / (n - 1).clamp(min=1)
        variances = matrix.diagonal()
        hinge = F.relu(1 - (variances + EPS).sqrt()).mean()
        correlated = (matrix.square().sum() - variances.square().sum()) / width
        loss = loss + variance * hinge + covariance * correlated
    return n_cells * loss
