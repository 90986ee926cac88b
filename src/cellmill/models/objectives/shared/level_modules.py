"""Modules over the levels of an obs column: a learned vector for each level, and an adversary.

`LevelEmbedding` has the learned vectors. Objective cell_decoding adds the vector of a cell's
experimental batch to the decoder's features, so that the cell's own vector need not encode the batch,
as in scVI (Lopez et al. 2018). Objective perturbation_response adds the vector of a perturbation to the
cell's vector.

`Adversary` predicts the experimental batch from the cell's vector. The gradient of its loss is reversed
on the way to the encoder, so the encoder learns to hide the batch (Ganin & Lempitsky 2015).

Both modules have one row for each level, so that `init_from` can match rows by the name of the level.
If cells of the column have no value, the last level is MISSING, and the row of MISSING is never used.
The `n_known` levels before MISSING are the known levels.

Level codes begin at 1. Code 0 stands for cells without a value, and for cells with a level that the
corpus does not have.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cellmill.models.blocks import ReverseGradient
from cellmill.models.initial import Fill, with_std, zeros


class LevelEmbedding(nn.Module):
    """A learned vector for each level of an obs column; the vector of code 0 is zero.

    With `is_centred` the mean vector of the known levels is subtracted from each vector.
    """

    def __init__(self, n_levels: int, n_known: int, width: int, is_centred: bool = True) -> None:
        super().__init__()
        self.n_known = n_known
        self.is_centred = is_centred
        self.weight = nn.Parameter(torch.empty(n_levels, width))

    def initial_value(self, name: str) -> Fill:
        return zeros

    def forward(self, codes: Tensor) -> Tensor:
        """Look up the vector of each cell, (cells, width), by the level codes (cells,) int64."""
        vectors = self.weight[: self.n_known]
        if self.is_centred:
            vectors = vectors - vectors.mean(0)
        vectors_by_code = F.pad(vectors, (0, 0, 1, 0))  # a row of zeros for code 0 comes first
        return F.embedding(codes, vectors_by_code)


class Adversary(nn.Module):
    """Loss of a classifier that predicts the level of each cell from the cell's vector.

    The classifier learns from the gradient of this loss. The encoder receives the gradient reversed
    and multiplied by `scale`.
    """

    def __init__(self, width: int, n_levels: int, n_known: int, scale: float) -> None:
        super().__init__()
        self.n_known = n_known
        self.scale = scale
        self.inner = with_std(nn.Linear(width, width), width**-0.5)
        self.out = with_std(nn.Linear(width, n_levels), width**-0.5)

    def forward(self, vectors: Tensor, codes: Tensor) -> Tensor:
        """Sum the cross-entropy over the cells of a known level, a float32 scalar.

        `vectors` are (cells, width). `codes` (cells,) int64 are the level codes of the cells.
        """
        vectors = ReverseGradient.apply(vectors, self.scale)
        hidden = F.gelu(self.inner(vectors))
        logits = self.out(hidden)[:, : self.n_known].float()
        labels = codes - 1  # code 0 becomes -1, which the loss ignores
        return F.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")
