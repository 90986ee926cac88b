"""VICReg: variance, invariance and covariance of the vectors of two views of each cell, as one loss."""

from torch import Tensor
from torch.nn import functional as F

VARIANCE_EPS = 1e-4  # added to each variance, so that the square root has a finite gradient at 0


def vicreg_loss_sum(rows: Tensor, weights: tuple[float, float, float]) -> Tensor:
    """Compute the loss of VICReg times the number of cells, a float64 scalar.

    `rows` are (slots, 1 + 2 * width). A slot of the global batch has the row of one cell, or only zeros
    if it is empty (`train.batch_rows`). The row of a cell is [1, z, z'], where z is the vector of the
    cell's shown part and z' the vector of its hidden part. `weights` are the weights of the three terms:

    - invariance: the mean over cells and dimensions of (z - z')^2
    - variance: the mean over dimensions of max(0, 1 - sqrt(variance + 1e-4)), for z plus for z'
    - covariance: the sum of the squares of the covariances between different dimensions, divided by the
      width, for z plus for z'

    Variances and covariances of n cells have the divisor n - 1. Everything is computed in float64,
    because the sum of the squares off the diagonal is the difference of two large sums.

    Source: Bardes, Ponce & LeCun 2022, equations 1 to 6. The invariance is also divided by the width, as
    in the authors' code.
    """
    invariance_weight, variance_weight, covariance_weight = weights
    width = rows.shape[1] // 2
    # `filled` (slots, 1) is 1 for a slot with a cell, and 0 for an empty slot
    filled, z_shown, z_hidden = rows.double().split([1, width, width], dim=1)
    n_cells = filled.detach().sum()
    divisor = n_cells.clamp(min=1)  # no 0 / 0 without cells

    squared_distances = (z_shown - z_hidden).square().sum()
    loss = invariance_weight * squared_distances / (divisor * width)

    for z in (z_shown, z_hidden):
        mean = z.sum(0) / divisor
        centred = z - filled * mean  # empty slots stay 0
        covariances = centred.T @ centred / (n_cells - 1).clamp(min=1)  # (width, width)
        variances = covariances.diagonal()
        standard_deviations = (variances + VARIANCE_EPS).sqrt()
        variance_term = F.relu(1 - standard_deviations).mean()
        off_diagonal_squares = covariances.square().sum() - variances.square().sum()
        covariance_term = off_diagonal_squares / width
        loss = loss + variance_weight * variance_term + covariance_weight * covariance_term
    return n_cells * loss
