"""Modules over the levels of an obs column: a learned vector per level, and an adversary.

`LevelTerms` has a learned vector per level. cell_decoding adds that of a cell's experimental batch to
the decoder, so that the cell's vector need not encode the batch, as in scVI (Lopez et al. 2018).
perturbation_response adds that of a perturbation to the cell's vector. `Adversary` predicts the
experimental batch from the cell's vector, through a reversed gradient that makes the encoder hide it
(Ganin & Lempitsky 2015).

Legend: C cells, E width of a cell's vector. Level codes begin at 1; 0 is an unknown level.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cellmill.models.blocks import Reversed
from cellmill.models.initial import Fill, with_std, zeros


class LevelTerms(nn.Module):
    """Learned vector per level, zero for an unknown level.

    With `centered` the mean over levels is subtracted.
    """

    def __init__(self, n_levels: int, width: int, centered: bool = True) -> None:
        super().__init__()
        self.centered = centered
        self.weight = nn.Parameter(torch.empty(n_levels, width))

    def initial_value(self, name: str) -> Fill:
        return zeros

    def forward(self, codes: Tensor) -> Tensor:
        """Look up the term of each cell, `(C, width)`, by its level code, `(C,)` int64."""
        terms: Tensor = self.weight
        if self.centered:
            terms = terms - terms.mean(0)
        with_unknown = F.pad(terms, (0, 0, 1, 0))
        return F.embedding(codes, with_unknown)


class Adversary(nn.Module):
    """Classifier of a cell's level that sends the encoder its reversed gradient, times `scale`."""

    def __init__(self, width: int, n_levels: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.inner = with_std(nn.Linear(width, width), width**-0.5)
        self.out = with_std(nn.Linear(width, n_levels), width**-0.5)

    def forward(self, vectors: Tensor, codes: Tensor) -> Tensor:
        """Sum the cross-entropy over cells of a known level, a float32 scalar.

        `vectors` are `(C, E)`, the level codes `(C,)` int64.
        """
        vectors = Reversed.apply(vectors, self.scale)
        hidden = F.gelu(self.inner(vectors))
        logits = self.out(hidden).float()
        labels = codes - 1
        return F.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")
