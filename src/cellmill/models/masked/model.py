"""The masked encoder: gene embedding plus value embedding, pre-norm blocks, predictions at masked tokens only.

A token's place in the packed batch means nothing to it: genes are a set. Only the rank tokenizer has places, as its
values. Logits exist at masked tokens alone: at 15 % masked and 20,000 genes they would otherwise be most of the work.

Legend: T tokens of the batch, N targets, H hidden, V tokens of the vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from cellmill.config.run import Tokens
from cellmill.data.vocabulary import SPECIAL
from cellmill.models.batch import TensorBatch
from cellmill.models.blocks import Block, Entry
from cellmill.models.family import Model, ParallelPlan
from cellmill.models.masked.config import MaskedConfig
from cellmill.models.masked.objective import MaskedBatch, mask, unmasked
from cellmill.parallel.vocabulary import embed_tokens, token_logits, token_loss


class MaskedModel(Model):
    """See the module.

    Parameters
    ----------
    config
        Architecture and objective.
    n_genes
        Genes of the vocabulary; special tokens come on top.
    tokens
        The tokenizer, which decides how values are embedded.
    """

    plan = ParallelPlan(
        blocks="blocks",
        tensor={
            "gene_embedding": "vocabulary",
            "entry": "enter",
            "blocks.*.attention_norm": "norm",
            "blocks.*.qkv": "columns",
            "blocks.*.out": "rows",
            "blocks.*.ffn_norm": "norm",
            "blocks.*.up": "columns",
            "blocks.*.down": "rows",
            "norm": "leave",
        },
    )
    gene_rows = frozenset({"gene_embedding.weight", "gene_bias"})

    def __init__(self, config: MaskedConfig, n_genes: int, tokens: Tokens) -> None:
        super().__init__()
        self.config, hidden = config, config.hidden
        n_tokens = n_genes + len(SPECIAL)
        self.gene_embedding = nn.Embedding(n_tokens, hidden)
        self.value_embedding: nn.Module = {
            "continuous": lambda: nn.Sequential(nn.Linear(1, hidden), nn.GELU(), nn.Linear(hidden, hidden)),
            "binned": lambda: nn.Embedding(tokens.bins + 1, hidden),  # bins count from 1
            "rank": lambda: nn.Embedding(tokens.max_tokens, hidden),
        }[tokens.tokenizer]()
        if config.objective == "masked_value":
            self.hidden_value = nn.Parameter(torch.empty(hidden))
        self.entry = Entry()
        self.blocks = nn.ModuleList(
            Block(hidden, config.heads, config.ffn_width, config.dropout, index) for index in range(config.layers)
        )
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), nn.LayerNorm(hidden))
        if config.cell_loss_weight:
            self.cell_head = nn.Sequential(nn.Linear(2 * hidden, hidden), nn.GELU(), nn.LayerNorm(hidden))
        if config.objective == "masked_gene":
            self.gene_bias = nn.Parameter(torch.empty(n_tokens))  # the matrix is the gene embedding's
        else:
            self.value_out = nn.Linear(hidden, tokens.bins if tokens.tokenizer == "binned" else 1)
        self.binned = tokens.tokenizer == "binned"

    def prepare(self, batch: TensorBatch, *, seed: int, step: int) -> MaskedBatch:
        """Hides a share of the tokens; see `objective`."""
        return mask(batch, self.config.objective, self.config.mask_frac, seed, step)

    def forward(self, prepared: MaskedBatch) -> torch.Tensor:
        """Summed loss, a float32 scalar: cross-entropy of the gene or bin, or squared error of the value.

        With `cell_loss_weight`, the same of what the cell's embedding predicts (scGPT, Cui et al. 2024, GEPC).
        """
        inputs, states = self._encode(prepared)
        loss = self._loss(self._out(self.head(states[prepared.targets]), prepared), prepared)
        if self.config.cell_loss_weight:
            cells = _mean_of_cells(states, prepared.cell, prepared.cu_seqlens).to(states.dtype)
            asked = torch.cat([cells[prepared.cell[prepared.targets]], inputs[prepared.targets]], dim=-1)
            loss = loss + self.config.cell_loss_weight * self._loss(
                self._out(self.cell_head(asked), prepared), prepared
            )
        return loss

    def predict(self, prepared: MaskedBatch) -> torch.Tensor:
        """float32: (N,) values, (N, bins) logits of bins, or (N, V) logits of genes."""
        return self._out(self.head(self._encode(prepared)[1][prepared.targets]), prepared)

    def embed(self, batch: TensorBatch) -> torch.Tensor:
        """(cells, H) float32: the mean over a cell's tokens of their last states."""
        prepared = unmasked(batch)
        return _mean_of_cells(self._encode(prepared)[1], prepared.cell, prepared.cu_seqlens)

    def _encode(self, prepared: MaskedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(T, H) each: what goes in, and the normed states of all tokens."""
        inputs = embed_tokens(prepared.genes, self.gene_embedding.weight) + self._embed_values(prepared)
        x, token_keys = self.entry(inputs, prepared.token_keys)
        for block in self.blocks:
            x = block(x, prepared.cu_seqlens, prepared.lengths, token_keys)
        return inputs, self.norm(x)

    def _out(self, states: torch.Tensor, prepared: MaskedBatch) -> torch.Tensor:
        """(N, H) -> predictions as in `predict`."""
        if self.config.objective == "masked_gene":
            return token_logits(states, self.gene_embedding.weight, self.gene_bias)
        out = self.value_out(states).float()
        return out if self.binned else out.squeeze(-1) + prepared.center[prepared.cell[prepared.targets]]

    def _loss(self, predicted: torch.Tensor, prepared: MaskedBatch) -> torch.Tensor:
        if predicted.ndim == 1:
            return (predicted - prepared.answers).square().sum()
        classes = prepared.answers - 1 if self.config.objective == "masked_value" else prepared.answers
        return token_loss(predicted, classes)

    def _embed_values(self, prepared: MaskedBatch) -> torch.Tensor:
        """(T, H); the learned vector of a hidden value where it is hidden."""
        if prepared.values.is_floating_point():
            # in log(1 + counts per 10,000) of detected genes the depth of sequencing is the loudest thing: a cell's
            # values are taken from their mean, or the embedding would be about that (98 % of it was)
            values = (prepared.values - prepared.center[prepared.cell])[:, None]
            values = self.value_embedding(values.to(self.norm.weight.dtype))
        else:
            values = self.value_embedding(prepared.values)
        if self.config.objective == "masked_gene":
            return values
        return torch.where(prepared.value_hidden[:, None], self.hidden_value.to(values.dtype), values)

    def reset_parameter(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Normal(0, 0.02) for matrices, less where a block writes to the residual stream (Radford et al. 2019)."""
        if name.endswith("norm.weight") or name in ("head.2.weight", "cell_head.2.weight"):
            tensor.fill_(1.0)
        elif name.endswith("bias"):
            tensor.zero_()
        elif name == "value_embedding.0.weight":
            tensor.normal_(0.0, 1.0, generator=generator)  # one input: its fan-in is 1
        elif name == "value_embedding.2.weight":
            # values then begin as loud as genes, which are 0.02; at 0.02 here they would drown them 20 times
            tensor.normal_(0.0, 0.02 / math.sqrt(self.config.hidden), generator=generator)
        else:
            into_residual = name.endswith(("out.weight", "down.weight")) and name.startswith("blocks.")
            deviation = 0.02 / math.sqrt(2 * self.config.layers) if into_residual else 0.02
            tensor.normal_(0.0, deviation, generator=generator)


def _mean_of_cells(states: torch.Tensor, cell: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """(T, H) -> (cells, H) float32; `cell` (T,) is the number of each token's cell."""
    lengths = cu_seqlens.diff()
    sums = torch.zeros(len(lengths), states.shape[1], device=states.device).index_add(0, cell, states.float())
    return sums / lengths.clamp(min=1)[:, None]  # a cell without tokens is zeros
