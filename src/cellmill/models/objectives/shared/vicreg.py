"""VICReg: variance, invariance and covariance of the vectors of two views, as one loss.

Legend: E width of a cell's vector, S slots of a global batch: a row for each of n cells with both
views, zeros in the others (`train.batch_rows`).
"""

from torch import Tensor
from torch.nn import functional as F

VARIANCE_EPS = 1e-4


def vicreg_loss_sum(rows: Tensor, weights: tuple[float, float, float]) -> Tensor:
    """Sum the loss of VICReg over the cells: n times the loss, a float64 scalar.

    Each of the `rows` `(S, 1 + 2 E)` is [1, z, z'], where z and z' are the vectors of both views of a
    cell; a row of zeros is an empty slot. n is the number of cells, K and K' are the covariance
    matrices of z and z', with divisor n - 1. The loss is the sum of three terms, each times its weight:

    - invariance: the mean over cells and dimensions of (z - z')^2
    - variance: the mean over dimensions of max(0, 1 - sqrt(K_jj + 1e-4)), plus the same of K'
    - covariance: the sum of squares of K off its diagonal, divided by E, plus the same of K'

    Float64, as a covariance is the small difference of large numbers. Source: Bardes, Ponce & LeCun
    2022, equations 1 to 6; the invariance is divided by E, as in the authors' code.
    """
    invariance_weight, variance_weight, covariance_weight = weights
    width = rows.shape[1] // 2
    # filled `(S, 1)` is 1, or 0 for an empty slot
    filled, z_shown, z_hidden = rows.double().split([1, width, width], dim=1)
    n_cells = filled.detach().sum()
    n = n_cells.clamp(min=1)
    distance = (z_shown - z_hidden).square().sum()
    loss = invariance_weight * distance / (n * width)
    for z in (z_shown, z_hidden):
        mean = z.sum(0) / n
        centred = z - filled * mean
        covariances = centred.T @ centred / (n - 1).clamp(min=1)  # `(E, E)`
        variances = covariances.diagonal()
        deviations = (variances + VARIANCE_EPS).sqrt()
        hinge = F.relu(1 - deviations).mean()
        off_diagonal_squares = covariances.square().sum() - variances.square().sum()
        loss = loss + variance_weight * hinge + covariance_weight * (off_diagonal_squares / width)
    return n_cells * loss
