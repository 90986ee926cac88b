"""The encoder: gene embedding plus value embedding, pre-norm blocks, a norm; heads come from the objective.

There are no positional embeddings: the genes of a cell are a set. Only the rank tokenizer has places, as its values.

Legend: T tokens of the batch, N targets, H hidden.
"""

import math
from dataclasses import replace

import torch
from torch import nn

from cellmill.config.tokens import SPECIAL, Tokens
from cellmill.models.blocks import Block, Entry
from cellmill.models.cell_encoder import CellEncoder
from cellmill.models.covariates import CovariateEmbedding, CovariatePrefix
from cellmill.models.encoder.config import EncoderConfig
from cellmill.models.encoder_batch import EncoderBatch
from cellmill.models.family import ParallelPlan
from cellmill.models.initial import STD, with_std
from cellmill.models.objective import Objective
from cellmill.parallel.cpu_matmul import Linear
from cellmill.parallel.vocab_parallel import embed_tokens

ALL = slice(None)


class EncoderModel(CellEncoder):
    """See the module."""

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
        begin=("gene_embedding", "value_embedding", "hidden_value"),
    )
    gene_rows = frozenset({"gene_embedding.weight"})

    def __init__(self, config: EncoderConfig, n_genes: int, tokens: Tokens, objective: Objective) -> None:
        super().__init__(objective)
        self.width = hidden = config.hidden
        n_tokens = n_genes + len(SPECIAL)
        self.gene_embedding = nn.Embedding(n_tokens, hidden)
        self.value_embedding = _value_embedding(tokens, hidden)
        if tokens.covariates:
            self.covariate_prefix = CovariatePrefix(tokens, objective.levels)
            self.covariates = CovariateEmbedding(tokens, objective.levels, hidden)
            self.plan = replace(self.plan, begin=(*self.plan.begin, "covariates"))
            rows = {f"covariates.tables.{at}.weight": name for at, name in enumerate(tokens.covariates)}
            self.level_rows = {**self.level_rows, **rows}
        self.enter, self.enter_keys = Entry(), Entry()
        into_residual = STD / math.sqrt(2 * max(config.layers, 1))
        self.blocks = nn.ModuleList(
            Block(hidden, config.heads, config.ffn_width, config.dropout, index) for index in range(config.layers)
        )
        for block in self.blocks:
            with_std(block.out, into_residual)
            with_std(block.down, into_residual)
        self.norm = nn.LayerNorm(hidden)
        self.attach_heads(n_tokens)

    def begin(self, prepared: EncoderBatch) -> torch.Tensor:
        """(T, H): gene and value embeddings."""
        return self.enter(self.inputs(prepared))

    def through(self, x: torch.Tensor, prepared: EncoderBatch) -> torch.Tensor:
        """(T, H) -> (T, H)."""
        token_keys = self.enter_keys(prepared.token_keys)
        for block in self.blocks:
            x = block(x, prepared.cu_seqlens, prepared.lengths, token_keys)
        return x

    def cell_vectors(self, states: torch.Tensor, prepared: EncoderBatch) -> torch.Tensor:
        """(T, H) -> (cells, H) float32; zeros for a cell without tokens."""
        lengths, cell = prepared.cu_seqlens.diff(), prepared.cell
        sums = torch.zeros(len(lengths), states.shape[1], device=states.device)
        if self.covariate_prefix is not None and prepared.covariate_rows is not None:
            genes = prepared.covariate_rows == 0
            lengths = torch.zeros(len(lengths), device=states.device).index_add(0, cell, genes.float())
            sums = sums.index_add(0, cell, states.float() * genes[:, None])
        else:
            sums = sums.index_add(0, cell, states.float())
        return sums / lengths.clamp(min=1)[:, None]

    def inputs(self, prepared: EncoderBatch, at: torch.Tensor | slice = ALL) -> torch.Tensor:
        """(T, H), or (N, H) for the tokens `at`; hidden values have a learned embedding."""
        genes = embed_tokens(prepared.genes[at], self.gene_embedding.weight)
        values = prepared.values[at]
        if values.is_floating_point():
            # in log(1 + counts per 10,000) of detected genes, sequencing depth is the strongest signal: values are
            # centred within each cell, or the embedding would encode depth (98 % of it did)
            centered = (values - prepared.center[prepared.cell[at]])[:, None]
            embedded = self.value_embedding(centered.to(next(self.value_embedding.parameters()).dtype))
        else:
            embedded = self.value_embedding(values)
        if hasattr(self, "hidden_value"):
            hidden = self.hidden_value.to(embedded.dtype)
            embedded = torch.where(prepared.value_hidden[at][:, None], hidden, embedded)
        if not hasattr(self, "covariates") or prepared.covariate_rows is None:
            return genes + embedded
        rows = prepared.covariate_rows[at]
        return torch.where(rows[:, None] > 0, self.covariates(rows).to(genes.dtype), genes + embedded)


def _value_embedding(tokens: Tokens, hidden: int) -> nn.Module:
    if tokens.value_kind == "scalar":
        # the first layer's fan-in is 1. Embedded values start with the standard deviation of genes, 0.02; with 0.02 in
        # the second layer it would be 20 times larger
        return nn.Sequential(
            with_std(nn.Linear(1, hidden), 1.0), nn.GELU(), with_std(Linear(hidden, hidden), STD / math.sqrt(hidden))
        )
    return nn.Embedding(tokens.n_values, hidden)
