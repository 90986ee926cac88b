"""Modules over the levels of an obs column: a learned vector per level, and an adversary.

`LevelEmbedding` has a learned vector per level. cell_decoding adds the vector of a cell's experimental
batch to the decoder, so that the cell's vector need not encode the batch, as in scVI (Lopez et al.
2018). perturbation_response adds the vector of a perturbation to the cell's vector. `Adversary`
predicts the experimental batch from the cell's vector, through a reversed gradient that makes the
encoder hide it (Ganin & Lempitsky 2015).

Both have a row for every level, so that `init_from` can match rows by the level's name. MISSING is the
last level if there is one. Its row is not used: the other levels, the first `n_known`, are the known
ones.

Legend: C cells, E width of a cell's vector. Level codes begin at 1; cells without a value, and cells of a
level that the corpus lacks, have code 0.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cellmill.models.blocks import ReverseGradient
from cellmill.models.initial import Fill, with_std, zeros


class LevelEmbedding(nn.Module):
    """Learned vector per level, zero for code 0.

    With `is_centred` the mean over known levels is subtracted.
    """

    def __init__(self, n_levels: int, n_known: int, width: int, is_centred: bool = True) -> None:
        super().__init__()
        self.n_known = n_known
        self.is_centred = is_centred
        self.weight = nn.Parameter(torch.empty(n_levels, width))

    def initial_value(self, name: str) -> Fill:
        return zeros

    def forward(self, codes: Tensor) -> Tensor:
        """Look up the vector of each cell, `(C, width)`, by its level code, `(C,)` int64."""
        vectors = self.weight[: self.n_known]
        if self.is_centred:
            vectors = vectors - vectors.mean(0)
        with_unknown = F.pad(vectors, (0, 0, 1, 0))
        return F.embedding(codes, with_unknown)


class Adversary(nn.Module):
    """Classifier of a cell's level that sends the encoder its reversed gradient, times `scale`."""

    def __init__(self, width: int, n_levels: int, n_known: int, scale: float) -> None:
        super().__init__()
        self.n_known = n_known
        self.scale = scale
        self.inner = with_std(nn.Linear(width, width), width**-0.5)
        self.out = with_std(nn.Linear(width, n_levels), width**-0.5)

    def forward(self, vectors: Tensor, codes: Tensor) -> Tensor:
        """Sum the cross-entropy over cells of a known level, a float32 scalar.

        `vectors` are `(C, E)`, the level codes `(C,)` int64.
        """
        vectors = ReverseGradient.apply(vectors, self.scale)
        hidden = F.gelu(self.inner(vectors))
        logits = self.out(hidden)[:, : self.n_known].float()
        labels = codes - 1
        return F.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")
