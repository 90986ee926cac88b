"""scGPT (Cui et al. 2024): normed gene embedding plus normed perceptron of the bin's number, then post-norm blocks.

There are no places: the genes of a cell are a set. The cell's vector is divided by its length (L2), as scGPT's
embeddings are.

Legend: T tokens of the batch, N targets, H hidden.
"""

import math
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

from cellmill.config.tokens import Tokens
from cellmill.models.encoder_batch import EncoderBatch
from cellmill.models.initial import with_std
from cellmill.models.objective import Objective
from cellmill.models.post_norm import PostNormEncoder
from cellmill.models.scgpt.config import ScgptConfig
from cellmill.parallel.cpu_matmul import Linear


class ScgptModel(PostNormEncoder):
    """See the module."""

    config: ScgptConfig
    plan = replace(
        PostNormEncoder.plan,
        begin=("gene_embedding", "end_embedding", "gene_norm", "value_in", "value_out_norm", "hidden_value"),
    )

    def __init__(self, config: ScgptConfig, n_genes: int, tokens: Tokens, objective: Objective) -> None:
        super().__init__(config, n_genes, objective)
        hidden = config.hidden
        self.gene_norm = nn.LayerNorm(hidden, eps=config.norm_eps)
        first, second = with_std(nn.Linear(1, hidden), 1.0), with_std(Linear(hidden, hidden), 1 / math.sqrt(hidden))
        self.value_in = nn.Sequential(first, nn.ReLU(), second)
        self.value_out_norm = nn.LayerNorm(hidden, eps=config.norm_eps)
        self.attach_heads(self.n_tokens)

    def inputs(self, prepared: EncoderBatch, at: torch.Tensor | slice = slice(None)) -> torch.Tensor:
        """(T, H), or (N, H) for the tokens `at`; hidden values have a learned embedding."""
        genes = prepared.genes[at]
        values = torch.where(genes < 0, self.config.cls_value, prepared.values[at].float())
        embedded = self.value_out_norm(self.value_in(values[:, None].to(next(self.value_in.parameters()).dtype)))
        if hasattr(self, "hidden_value"):
            hidden = self.hidden_value.to(embedded.dtype)
            embedded = torch.where(prepared.value_hidden[at][:, None], hidden, embedded)
        return self.gene_norm(self.embedded_genes(genes)) + embedded

    def cell_vectors(self, states: torch.Tensor, prepared: EncoderBatch) -> torch.Tensor:
        """(T, H) -> (cells, H) float32, of length 1."""
        return F.normalize(super().cell_vectors(states, prepared), dim=1)
