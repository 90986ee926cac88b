"""The profile encoder: the sum of value times gene embedding over a cell, then residual feed-forward blocks.

It is a multilayer perceptron on the cell's log-normalised profile, whose first matrix is the gene embedding. Rows of
the residual stream are cells, not tokens: a cell costs the same whatever its depth, and no attention is computed.

Legend: T tokens of the batch, C cells, H hidden.
"""

import torch
from torch import nn
from torch.nn import functional as F

from cellmill.config.tokens import SPECIAL, Tokens
from cellmill.models.cell_encoder import CellEncoder
from cellmill.models.counter_rng import keyed_dropout, keyed_state
from cellmill.models.encoder_batch import EncoderBatch
from cellmill.models.family import ParallelPlan
from cellmill.models.initial import with_std
from cellmill.models.objective import Objective
from cellmill.models.profile.config import ProfileConfig
from cellmill.parallel.cpu_matmul import Linear
from cellmill.parallel.vocab_parallel import embed_bags


class FeedForward(nn.Module):
    """A feed-forward layer after a norm, added to the residual stream."""

    def __init__(self, hidden: int, ffn_hidden: int, dropout: float, index: int) -> None:
        super().__init__()
        self.dropout, self.index = dropout, index
        self.norm = nn.LayerNorm(hidden)
        self.up = with_std(Linear(hidden, ffn_hidden), hidden**-0.5)
        self.down = with_std(Linear(ffn_hidden, hidden), ffn_hidden**-0.5)

    def forward(self, x: torch.Tensor, cell_keys: torch.Tensor) -> torch.Tensor:
        """(C, H) -> (C, H); `cell_keys` (C,) int64 key the dropout."""
        return self.inner(x, keyed_state(cell_keys, self.index) if self.training and self.dropout else None)

    def inner(self, x: torch.Tensor, drops: torch.Tensor | None) -> torch.Tensor:
        """(C, H) and states of the dropout, (C,), -> (C, H)."""
        update = self.down(F.gelu(self.up(self.norm(x))))
        return x + (update if drops is None else keyed_dropout(update, self.dropout, drops))


class ProfileModel(CellEncoder):
    """See the module."""

    plan = ParallelPlan(
        blocks="blocks",
        compiled=("inner",),
        tensor={"gene_embedding": "vocabulary", "blocks.*.up": "columns", "blocks.*.down": "rows"},
        begin=("gene_embedding",),
    )
    gene_rows = frozenset({"gene_embedding.weight"})

    def __init__(self, config: ProfileConfig, n_genes: int, tokens: Tokens, objective: Objective) -> None:
        super().__init__(objective)
        self.width = hidden = config.hidden
        n_tokens = n_genes + len(SPECIAL)
        self.gene_embedding = nn.Embedding(n_tokens, hidden)
        self.blocks = nn.ModuleList(
            FeedForward(hidden, config.ffn_width, config.dropout, index) for index in range(config.layers)
        )
        self.norm = nn.LayerNorm(hidden)
        self.attach_heads(n_tokens)

    def begin(self, prepared: EncoderBatch) -> torch.Tensor:
        """(C, H): the values times the gene embeddings, summed over each cell."""
        return embed_bags(prepared.genes, prepared.values, prepared.cu_seqlens, self.gene_embedding.weight)

    def through(self, x: torch.Tensor, prepared: EncoderBatch) -> torch.Tensor:
        """(C, H) -> (C, H)."""
        for block in self.blocks:
            x = block(x, prepared.cell_keys)
        return x

    def cell_vectors(self, states: torch.Tensor, prepared: EncoderBatch) -> torch.Tensor:
        """(C, H) float32: the states, which are those of cells already."""
        return states.float()
