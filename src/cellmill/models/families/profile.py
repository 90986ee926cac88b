"""The profile encoder: the sum of value times gene embedding over a cell, then residual feed-forward blocks.

It is a multilayer perceptron on the cell's log-normalised profile, whose first matrix is the gene embedding. Rows of
the residual stream are cells, not tokens: a cell costs the same whatever its depth, and no attention is computed.

Legend: T tokens of the batch, C cells, H hidden.
"""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from cellmill.config.parts.families import ProfileConfig
from cellmill.config.parts.tokens import SPECIAL, Tokens
from cellmill.models.batch import EncoderBatch
from cellmill.models.blocks import FeedForward
from cellmill.models.cell_encoder import CellEncoder
from cellmill.models.family import ParallelPlan
from cellmill.models.gene_vectors import GeneVectors, attach_gene_vectors
from cellmill.models.objective import Objective
from cellmill.parallel.vocab_parallel import embed_bags


class ProfileModel(CellEncoder):
    plan = ParallelPlan(
        blocks="blocks",
        compiled=("inner",),
        tensor={"gene_embedding": "vocabulary", "blocks.*.up": "columns", "blocks.*.down": "rows"},
        begin=("gene_embedding",),
    )
    gene_rows = frozenset({"gene_embedding.weight"})
    gene_vectors: GeneVectors | None

    def __init__(self, config: ProfileConfig, n_genes: int, tokens: Tokens, objective: Objective) -> None:
        super().__init__(objective)
        self.width = hidden = config.hidden
        self.dropout = config.dropout
        n_tokens = n_genes + len(SPECIAL)
        self.gene_embedding = nn.Embedding(n_tokens, hidden)
        attach_gene_vectors(self, config, n_tokens)
        self.blocks = nn.ModuleList(
            FeedForward(hidden, config.ffn_width, config.dropout, index) for index in range(config.layers)
        )
        self.norm = nn.LayerNorm(hidden)
        self.attach_heads(n_tokens)

    def begin(self, prepared: EncoderBatch) -> torch.Tensor:
        """(C, H): the values times the gene embeddings, summed over each cell."""
        sums = partial(embed_bags, prepared.genes, prepared.values, prepared.cu_seqlens)
        x = sums(self.gene_embedding.weight)
        return x if self.gene_vectors is None else x + self.gene_vectors(sums).to(x.dtype)

    def through(self, x: torch.Tensor, prepared: EncoderBatch) -> torch.Tensor:
        keys = prepared.cell_keys if self.training and self.dropout else None
        for block in self.blocks:
            x = block(x, keys)
        return x

    def embed_padded(self, genes: torch.Tensor, values: torch.Tensor) -> torch.Tensor:

        def sums(table: torch.Tensor) -> torch.Tensor:
            return (values[:, None] @ F.embedding(genes, table))[:, 0]

        x = sums(self.gene_embedding.weight)
        if self.gene_vectors is not None:
            x = x + self.gene_vectors(sums)
        for block in self.blocks:
            assert isinstance(block, FeedForward)
            x = block.inner(x, None)
        return self.norm(x)

    def cell_vectors(self, states: torch.Tensor, prepared: EncoderBatch) -> torch.Tensor:
        """(C, H) float32: the states, which are those of cells already."""
        return states.float()
