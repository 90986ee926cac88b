"""Parts that options add to cell_decoding: VICReg of two views, level terms and an adversary.

There are two ways to keep a cell's batch out of its vector. The decoder gets a vector of each batch
(`LevelTerms`), so that the cell's vector need not encode it, as in scVI (Lopez et al. 2018). Or an
`Adversary` predicts the batch from the cell's vector, through a reversed gradient that makes the
encoder hide it (Ganin & Lempitsky 2015).

Legend: C cells, H width of a cell's vector, S slots of a global batch, n of them filled. Level
numbers begin at 1; 0 is an unknown level.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cellmill.models.blocks import Reversed
from cellmill.models.initial import Fill, with_std, zeros

VARIANCE_EPS = 1e-4


def vicreg(table: Tensor, weights: tuple[float, float, float]) -> Tensor:
    """Return n times the loss of VICReg, a float64 scalar.

    Rows of `table` `(S, 1 + 2 H)` are 1, z and z'; rows of zeros are empty slots. z and z' are the
    vectors of both views of the n cells of a global batch, and K and K' their covariances, divided by
    n - 1. The loss is the sum of three terms, times `weights`:

    - invariance: the mean over cells and directions of (z - z')^2
    - variance: the mean over directions of max(0, 1 - sqrt(K_jj + 1e-4)), added to that of K'
    - covariance: the sum of squares of K off its diagonal, divided by H, added to that of K'

    Float64, as a covariance is the small difference of large numbers. Source: Bardes, Ponce & LeCun
    2022, equations 1 to 6; the invariance is divided by H, as in the authors' code.
    """
    invariance, variance, covariance = weights
    width = table.shape[1] // 2
    # filled `(S, 1)` is 1, or 0 for an empty slot
    filled, shown, hidden = table.double().split([1, width, width], dim=1)
    n_cells = filled.detach().sum()
    n = n_cells.clamp(min=1)
    distance = (shown - hidden).square().sum()
    loss = invariance * distance / (n * width)
    for z in (shown, hidden):
        mean = z.sum(0) / n
        centered = z - filled * mean
        covariances = centered.T @ centered / (n - 1).clamp(min=1)  # `(H, H)`
        variances = covariances.diagonal()
        deviations = (variances + VARIANCE_EPS).sqrt()
        hinge = F.relu(1 - deviations).mean()
        off_diagonal = covariances.square().sum() - variances.square().sum()
        loss = loss + variance * hinge + covariance * (off_diagonal / width)
    return n_cells * loss


class LevelTerms(nn.Module):
    """A vector of each level, zero for an unknown level.

    With `centered` the mean over levels is subtracted.
    """

    def __init__(self, n_levels: int, width: int, centered: bool = True) -> None:
        super().__init__()
        self.centered = centered
        self.weight = nn.Parameter(torch.empty(n_levels, width))

    def initial_value(self, name: str) -> Fill:
        return zeros

    def forward(self, numbers: Tensor) -> Tensor:
        """Return the term of each cell, `(C, width)`, from its level number, `(C,)` int64."""
        terms: Tensor = self.weight
        if self.centered:
            terms = terms - terms.mean(0)
        with_unknown = F.pad(terms, (0, 0, 1, 0))
        return F.embedding(numbers, with_unknown)


class Adversary(nn.Module):
    """Classifier of a cell's level that sends the encoder its reversed gradient, times `scale`."""

    def __init__(self, width: int, n_levels: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.inner = with_std(nn.Linear(width, width), width**-0.5)
        self.out = with_std(nn.Linear(width, n_levels), width**-0.5)

    def forward(self, vectors: Tensor, numbers: Tensor) -> Tensor:
        """Return the cross-entropy summed over cells of a known level, a float32 scalar.

        `vectors` are `(C, H)`, `numbers` the cells' level numbers, `(C,)` int64.
        """
        vectors = Reversed.apply(vectors, self.scale)
        hidden = F.gelu(self.inner(vectors))
        logits = self.out(hidden).float()
        labels = numbers - 1
        return F.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")
