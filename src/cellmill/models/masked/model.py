"""The masked encoder: gene embedding plus value embedding, pre-norm blocks, predictions at masked tokens only.

A token's place in the packed batch means nothing to it: genes are a set. Only the rank tokenizer has places, as its
values. Logits exist at masked tokens alone: at 15 % masked and 20,000 genes they would otherwise be most of the work.

Legend: T tokens of the batch, N targets, H hidden, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

from cellmill.config.tokens import SPECIAL, Tokens
from cellmill.models.batch import TensorBatch
from cellmill.models.blocks import Block, Entry
from cellmill.models.family import Model, ParallelPlan
from cellmill.models.masked.config import MaskedConfig
from cellmill.models.masked.objective import MaskedBatch, mask, unmasked
from cellmill.parallel.cpu_matmul import Linear
from cellmill.parallel.cross_entropy import token_loss
from cellmill.parallel.vocab_parallel import embed_tokens, token_logits

ALL = slice(None)


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
        compiled=("before", "after"),
        tensor={
            "gene_embedding": "vocabulary",
            "enter": "enter",
            "enter_keys": "enter",
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
        self.config = config
        self.width = hidden = config.hidden
        n_tokens = n_genes + len(SPECIAL)
        self.gene_embedding = nn.Embedding(n_tokens, hidden)
        self.value_embedding: nn.Module = {
            "continuous": lambda: nn.Sequential(nn.Linear(1, hidden), nn.GELU(), Linear(hidden, hidden)),
            "binned": lambda: nn.Embedding(tokens.n_values, hidden),
            "rank": lambda: nn.Embedding(tokens.max_tokens, hidden),
        }[tokens.tokenizer]()
        if config.objective == "masked_value":
            self.hidden_value = nn.Parameter(torch.empty(hidden))
        self.enter, self.enter_keys = Entry(), Entry()
        self.blocks = nn.ModuleList(
            Block(hidden, config.heads, config.ffn_width, config.dropout, index) for index in range(config.layers)
        )
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Sequential(Linear(hidden, hidden), nn.GELU(), nn.LayerNorm(hidden))
        if config.cell_loss_weight:
            self.cell_head = nn.Sequential(Linear(2 * hidden, hidden), nn.GELU(), nn.LayerNorm(hidden))
        if config.objective == "masked_gene":
            self.gene_bias = nn.Parameter(torch.empty(n_tokens))  # the matrix is the gene embedding's
        else:
            self.value_out = nn.Linear(hidden, tokens.n_values - 1 if tokens.tokenizer == "binned" else 1)
        self.binned = tokens.tokenizer == "binned"
        inputs = ("gene_embedding", "value_embedding", "hidden_value")
        again = inputs if config.cell_loss_weight else inputs[:1] if config.objective == "masked_gene" else ()
        outputs = ("norm", "head", "cell_head", "gene_bias", "value_out")
        self.plan = replace(self.plan, begin=inputs, finish=(*outputs, *again))

    def prepare(self, batch: TensorBatch, *, seed: int, step: int) -> MaskedBatch:
        """Hides a share of the tokens; see `objective`."""
        return mask(batch, self.config.objective, self.config.mask_frac, seed, step)

    def begin(self, prepared: MaskedBatch) -> torch.Tensor:
        """(T, H): gene and value embeddings."""
        return self.enter(self._inputs(prepared))

    def through(self, x: torch.Tensor, prepared: MaskedBatch) -> torch.Tensor:
        """(T, H) -> (T, H)."""
        token_keys = self.enter_keys(prepared.token_keys)
        for block in self.blocks:
            x = block(x, prepared.cu_seqlens, prepared.lengths, token_keys)
        return x

    def finish(self, x: torch.Tensor, prepared: MaskedBatch) -> torch.Tensor:
        """Summed loss, a float32 scalar: cross-entropy of the gene or bin, or squared error of the value.

        With `cell_loss_weight`, the same of what the cell's embedding predicts (scGPT, Cui et al. 2024, GEPC).
        """
        states, targets = self.norm(x), prepared.targets
        loss = self._loss(self.head(states[targets]), prepared)
        if self.config.cell_loss_weight:
            cells = _mean_of_cells(states, prepared.cell, prepared.cu_seqlens).to(states.dtype)
            # made again for the targets alone: the last stage of a pipeline was not sent what entered the first
            asked = torch.cat([cells[prepared.cell[targets]], self._inputs(prepared, targets)], dim=-1)
            loss = loss + self.config.cell_loss_weight * self._loss(self.cell_head(asked), prepared)
        return loss

    def predict(self, prepared: MaskedBatch) -> torch.Tensor:
        """float32: (N,) values, (N, bins) logits of bins, or (N, V) logits of genes."""
        return self._out(self.head(self._states(prepared)[prepared.targets]), prepared)

    def embed(self, batch: TensorBatch) -> torch.Tensor:
        """(cells, H) float32: the mean over a cell's tokens of their last states."""
        prepared = unmasked(batch)
        return _mean_of_cells(self._states(prepared), prepared.cell, prepared.cu_seqlens)

    def _states(self, prepared: MaskedBatch) -> torch.Tensor:
        """(T, H): the normed states of all tokens."""
        return self.norm(self.through(self.begin(prepared), prepared))

    def _out(self, states: torch.Tensor, prepared: MaskedBatch) -> torch.Tensor:
        """(N, H) -> predictions as in `predict`."""
        if self.config.objective == "masked_gene":
            return token_logits(states, self.gene_embedding.weight, self.gene_bias)
        out = self.value_out(states).float()
        return out if self.binned else out.squeeze(-1) + prepared.center[prepared.cell[prepared.targets]]

    def _loss(self, states: torch.Tensor, prepared: MaskedBatch) -> torch.Tensor:
        """(N, H) -> the summed loss of what they predict."""
        if self.config.objective == "masked_gene":
            return token_loss(states, self.gene_embedding.weight, self.gene_bias, prepared.answers)
        predicted = self._out(states, prepared)
        if self.binned:
            return F.cross_entropy(predicted, prepared.answers - 1, reduction="sum")
        return (predicted - prepared.answers).square().sum()

    def _inputs(self, prepared: MaskedBatch, at: torch.Tensor | slice = ALL) -> torch.Tensor:
        """(T, H), or of the tokens `at` alone; the learned vector of a hidden value where it is hidden."""
        genes = embed_tokens(prepared.genes[at], self.gene_embedding.weight)
        values = prepared.values[at]
        if values.is_floating_point():
            # in log(1 + counts per 10,000) of detected genes the depth of sequencing is the loudest thing: a cell's
            # values are taken from their mean, or the embedding would be about that (98 % of it was)
            centered = (values - prepared.center[prepared.cell[at]])[:, None]
            embedded = self.value_embedding(centered.to(next(self.value_embedding.parameters()).dtype))
        else:
            embedded = self.value_embedding(values)
        if self.config.objective == "masked_value":
            hidden = self.hidden_value.to(embedded.dtype)
            embedded = torch.where(prepared.value_hidden[at][:, None], hidden, embedded)
        return genes + embedded

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
