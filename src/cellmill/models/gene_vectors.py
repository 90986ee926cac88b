"""Given vectors of genes as part of a gene embedding: a table of them, frozen or trained, and a learned projection.

A gene's embedding is its learned one plus the projection of its vector. A gene without a vector has zeros, and the
projection has no bias, so its embedding is the learned one alone. Vectors are divided by one number, their root mean
square over all genes that have one, so that what is projected starts as large as a learned embedding.

Legend: T tokens of the batch, C cells, D numbers of a vector, H hidden.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from cellmill.config.gene_vectors import GeneVectorsConfig
from cellmill.models.initial import STD, with_std
from cellmill.parallel.cpu_matmul import Linear

NAME = "gene_vectors"
TABLE = f"{NAME}.table.weight"


class GeneVectors(nn.Module):
    """The table (V, D), row-sharded as the learned one, and its projection."""

    def __init__(self, n_tokens: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.table = with_std(nn.Embedding(n_tokens, dim), 0.0)  # zeros, unless `initial_tensors` is given a file's
        self.project = with_std(Linear(dim, hidden, bias=False), STD / dim**0.5)

    def forward(self, look_up: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """(T, H) or (C, H): projections of what `look_up` makes of the table, (T, D) or (C, D)."""
        projected: torch.Tensor = self.project(look_up(self.table.weight))
        return projected


def attach_gene_vectors(model: Any, config: GeneVectorsConfig, n_tokens: int) -> None:
    """Add `gene_vectors` to a family's model, and what layouts, training and `init_from` have to know of it.

    Without vectors, the attribute is None.
    """
    if config.gene_vector_dim is None:
        model.gene_vectors = None
        return
    model.gene_vectors = GeneVectors(n_tokens, config.gene_vector_dim, model.width)
    plan = model.plan
    model.plan = replace(
        plan, begin=(*plan.begin, NAME), tensor={**plan.tensor, f"{NAME}.table": "vocabulary"} if plan.tensor else {}
    )
    model.gene_rows = model.gene_rows | {TABLE}
    if not config.train_gene_vectors:
        model.frozen = model.frozen | {TABLE}
