"""Encoders of the genes of a cell, a set without positions; heads come from the objective.

`encoder`: gene embedding plus value embedding, pre-norm blocks, a norm. Only the rank tokenizer has
positions, as its values. `autoencoder` adds a linear bottleneck after the pooled states, whose
output is the cell's vector.

`profile`: the sum of value times gene embedding over a cell, then residual feed-forward blocks: a
perceptron on the cell's log-normalised profile, whose first matrix is the gene embedding. Rows of
its residual stream are cells, not tokens: a cell costs the same whatever its depth.

Legend: T tokens of the batch, N targets, C cells, L tokens of the longest cell, H width of the model.
"""

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cellmill.config.parts.families import (
    AutoencoderConfig,
    AutoregressiveConfig,
    EncoderConfig,
    ProfileConfig,
)
from cellmill.config.parts.tokens import SPECIAL, Tokens
from cellmill.data.stream.batch import Batch
from cellmill.models.batch import PAD_TOKEN, EncoderBatch, add_tokens
from cellmill.models.blocks import Block, FeedForward
from cellmill.models.cell_encoder import (
    COVARIATES,
    CellEncoder,
    CovariateEmbedding,
    CovariatePrefix,
    TokenEncoder,
    attended_state,
    first_state,
    mean_state,
)
from cellmill.models.family import ParallelPlan
from cellmill.models.gene_vectors import GeneVectors, attach_gene_vectors
from cellmill.models.initial import STD, Fill, normal, with_std, zeros
from cellmill.models.objective import Objective
from cellmill.parallel.vocab_parallel import embed_bags, embed_tokens

ALL = slice(None)


class EncoderModel(TokenEncoder):
    plan = replace(
        TokenEncoder.plan, begin=("gene_embedding", "value_embedding", "hidden_value", "cell_token")
    )
    gene_vectors: GeneVectors | None

    def __init__(
        self, config: EncoderConfig, n_genes: int, tokens: Tokens, objective: Objective
    ) -> None:
        hidden = config.hidden
        super().__init__(hidden, n_genes, objective)
        self.config = config
        self.value_embedding = make_value_embedding(tokens, hidden)
        if tokens.covariates:
            self.covariate_prefix = CovariatePrefix(tokens, objective.levels)
            self.covariates = CovariateEmbedding(tokens, objective.levels, hidden)
            self.plan = replace(self.plan, begin=(*self.plan.begin, "covariates"))
            for index, name in enumerate(tokens.covariates):
                self.add_level_rows(name, f"{COVARIATES}{index}.weight")
        attach_gene_vectors(self, config, self.vocab_size)
        self.blocks = make_pre_norm_blocks(config)
        self.norm = nn.LayerNorm(hidden)
        self.pooling = config.pooling
        if self.pooling == "cls":
            self.cell_token = nn.Parameter(torch.empty(hidden))
        self.attach_heads(self.vocab_size)
        if self.pooling == "attention":
            self.pool_query = nn.Parameter(torch.empty(hidden))
            self.plan = replace(self.plan, finish=(*self.plan.finish, "pool_query"))

    def initial_value(self, name: str) -> Fill | None:
        """Start the cell token like an embedding, and attention pooling as the mean."""
        if name == "cell_token":
            return normal(STD)
        if name == "pool_query":
            return zeros
        return super().initial_value(name)

    def view(self, batch: Batch, *, seed: int, step: int) -> Batch:
        return self._add_cell_tokens(super().view(batch, seed=seed, step=step))

    def embed(self, batch: Batch) -> Tensor:
        return super().embed(self._add_cell_tokens(batch))

    def embed_padded(self, token_ids: Tensor, values: Tensor) -> Tensor:
        is_token = token_ids != PAD_TOKEN  # (cells, L) bool
        x = self.gene_embedding(token_ids)  # (cells, L, H)
        if self.gene_vectors is not None:
            x = x + self.gene_vectors(partial(F.embedding, token_ids))
        if values.is_floating_point():
            # centred within each cell, as in `inputs`
            center = (values * is_token).sum(1, keepdim=True) / is_token.sum(1, keepdim=True)
            x = x + self.value_embedding((values - center)[..., None])
        else:
            x = x + self.value_embedding(values)
        if self.pooling == "cls":
            x = torch.cat([self.cell_token.expand(x.shape[0], 1, -1), x], 1)
            is_token = F.pad(is_token, (1, 0), value=True)
        for block in self.blocks:
            assert isinstance(block, Block)
            x = block.padded(x, is_token)
        states = self.norm(x)
        if self.pooling == "cls":
            return states[:, 0]
        weights = is_token.to(states.dtype)  # (cells, L), for pooling mean
        if self.pooling == "attention":
            scores = states @ self.pool_query * states.shape[-1] ** -0.5
            weights = scores.masked_fill(~is_token, -torch.inf).softmax(1)
        return (states * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)

    def _add_cell_tokens(self, batch: Batch) -> Batch:
        """For pooling cls, add a token before each cell: `<pad>`, which objectives never predict."""
        return add_tokens(batch, 1, 0, PAD_TOKEN) if self.pooling == "cls" else batch

    def begin(self, prepared: EncoderBatch) -> Tensor:
        x = self.inputs(prepared)
        if self.pooling == "cls":
            is_first = torch.zeros(len(x), dtype=torch.bool, device=x.device)
            is_first = is_first.index_fill(0, prepared.cu_seqlens[:-1].long(), True)
            x = torch.where(is_first[:, None], self.cell_token.to(x.dtype), x)
        return self.enter(x)

    def cell_vectors(self, states: Tensor, prepared: EncoderBatch) -> Tensor:
        """Pool the states (T, H) to (C, H) float32; with pooling mean or attention, zeros without tokens."""
        if self.pooling == "cls":
            return first_state(states, prepared)
        if self.pooling == "attention":
            return attended_state(states, prepared, self.pool_query)
        return mean_state(states, prepared)

    def inputs(self, prepared: EncoderBatch, index: Tensor | slice = ALL) -> Tensor:
        """Embed all tokens, (T, H), or those in `index`, (N, H); hidden values have a learned embedding."""
        token_ids = prepared.token_ids[index]
        genes = embed_tokens(token_ids, self.gene_embedding.weight)
        if self.gene_vectors is not None:
            genes = genes + self.gene_vectors(partial(embed_tokens, token_ids)).to(genes.dtype)
        values = prepared.values[index]
        if values.is_floating_point():
            # centred within each cell: sequencing depth is the strongest signal in log(1 + counts
            # per 10,000) of detected genes, and cell vectors would mostly encode it
            values = (values - prepared.center[prepared.token_cells[index]])[:, None]
            values = values.to(next(self.value_embedding.parameters()).dtype)
        x = genes + self.with_hidden(self.value_embedding(values), prepared, index)
        if not hasattr(self, "covariates") or prepared.covariate_rows is None:
            return x
        rows = prepared.covariate_rows[index]
        return torch.where(rows[:, None] > 0, self.covariates(rows).to(genes.dtype), x)


def make_pre_norm_blocks(
    config: EncoderConfig | AutoregressiveConfig, causal: bool = False
) -> nn.ModuleList:
    """Make blocks whose layers into the residual stream start small, as in GPT-2."""
    blocks = nn.ModuleList()
    for index in range(config.layers):
        block = Block(
            config.hidden, config.heads, config.ffn_width, config.dropout, index, causal=causal
        )
        std = STD / math.sqrt(2 * config.layers)
        with_std(block.out, std)
        with_std(block.down, std)
        blocks.append(block)
    return blocks


def make_value_embedding(tokens: Tokens, hidden: int) -> nn.Module:
    """Make the embedding of values: a perceptron of continuous values, otherwise a table."""
    if tokens.value_kind != "scalar":
        return nn.Embedding(tokens.n_values, hidden)
    # The first layer's fan-in is 1. With these weights embedded values start with the standard
    # deviation of embedded genes, 0.02; with STD in the second layer it would be 20 times larger.
    first = with_std(nn.Linear(1, hidden), 1.0)
    second = with_std(nn.Linear(hidden, hidden), STD / math.sqrt(hidden))
    return nn.Sequential(first, nn.GELU(), second)


class AutoencoderModel(EncoderModel):
    config: AutoencoderConfig

    @property
    def vector_width(self) -> int:
        return self.config.latent or self.width

    def attach_heads(self, vocab_size: int) -> None:
        super().attach_heads(vocab_size)
        if self.config.latent is not None:
            self.bottleneck = with_std(nn.Linear(self.width, self.config.latent), self.width**-0.5)
            self.plan = replace(self.plan, finish=("bottleneck", *self.plan.finish))

    def cell_vectors(self, states: Tensor, prepared: EncoderBatch) -> Tensor:
        """Pool the states (T, H) to (C, vector_width) float32, through the bottleneck if there is one."""
        pooled = super().cell_vectors(states, prepared)
        return pooled if self.config.latent is None else self.narrow(pooled.to(states.dtype))

    def embed_padded(self, token_ids: Tensor, values: Tensor) -> Tensor:
        pooled = super().embed_padded(token_ids, values)
        return pooled if self.config.latent is None else self.narrow(pooled)

    def narrow(self, pooled: Tensor) -> Tensor:
        narrowed: Tensor = self.bottleneck(pooled).float()
        return narrowed


class ProfileModel(CellEncoder):
    plan = ParallelPlan(
        blocks="blocks",
        compiled=("inner",),
        tensor={"gene_embedding": "vocabulary", "blocks.*.up": "columns", "blocks.*.down": "rows"},
        begin=("gene_embedding",),
    )
    gene_rows = frozenset({"gene_embedding.weight"})
    gene_vectors: GeneVectors | None

    def __init__(
        self, config: ProfileConfig, n_genes: int, tokens: Tokens, objective: Objective
    ) -> None:
        super().__init__(objective)
        hidden = config.hidden
        self.width = hidden
        self.dropout = config.dropout
        vocab_size = n_genes + len(SPECIAL)
        self.gene_embedding = nn.Embedding(vocab_size, hidden)
        attach_gene_vectors(self, config, vocab_size)
        self.blocks = nn.ModuleList(
            FeedForward(hidden, config.ffn_width, config.dropout, index)
            for index in range(config.layers)
        )
        self.norm = nn.LayerNorm(hidden)
        self.attach_heads(vocab_size)

    def begin(self, prepared: EncoderBatch) -> Tensor:
        """Return (C, H): the values times the gene embeddings, summed over each cell."""
        sums = partial(embed_bags, prepared.token_ids, prepared.values, prepared.cu_seqlens)
        x = sums(self.gene_embedding.weight)
        return x if self.gene_vectors is None else x + self.gene_vectors(sums).to(x.dtype)

    def through(self, x: Tensor, prepared: EncoderBatch) -> Tensor:
        keys = prepared.cell_keys if self.training and self.dropout else None
        for block in self.blocks:
            x = block(x, keys)
        return x

    def embed_padded(self, token_ids: Tensor, values: Tensor) -> Tensor:
        def sums(table: Tensor) -> Tensor:
            return (values[:, None] @ F.embedding(token_ids, table))[:, 0]

        x = sums(self.gene_embedding.weight)
        if self.gene_vectors is not None:
            x = x + self.gene_vectors(sums)
        for block in self.blocks:
            assert isinstance(block, FeedForward)
            x = block.inner(x, None)
        return self.norm(x)

    def cell_vectors(self, states: Tensor, prepared: EncoderBatch) -> Tensor:
        return states.float()  # rows are cells already
