"""Shared part of families that encode cells: heads, pooling of states, covariate tokens.

Each column of `tokens.covariates` adds one token, without a value, before the genes of a cell's
view; its embedding belongs to the cell's level. In a batch these tokens are `<pad>`, so objectives
neither mask nor predict them, and `covariate_rows` holds their rows of the embedding. In training
some levels are replaced by the unknown one, so that cells of unknown level can be embedded.

Legend: R rows of the residual stream (tokens, or cells), T tokens, C cells, K columns,
H width of the model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cellmill.config.parts.tokens import SPECIAL, Tokens
from cellmill.data.stream.batch import Batch
from cellmill.models.batch import PAD_TOKEN, AnyBatch, EncoderBatch, add_tokens
from cellmill.models.blocks import Entry
from cellmill.models.counter_rng import keyed_bits, threshold
from cellmill.models.draws import UNKNOWN_LEVEL_KEY
from cellmill.models.family import Model, ParallelPlan
from cellmill.models.objective import Objective
from cellmill.parallel.vocab_parallel import segment_sum

COVARIATES = "covariates.tables."  # beginning of the names of tables by level


class CovariateEmbedding(nn.Module):
    """Embeddings of the levels of each column, the unknown level first."""

    def __init__(self, tokens: Tokens, levels: Mapping[str, Sequence[str]], hidden: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.Embedding(len(levels[name]) + 1, hidden) for name in tokens.covariates
        )

    def forward(self, rows: Tensor) -> Tensor:
        """Embed rows, (T,) int64 -> (T, H): rows of all tables one below another, from 1; 0 gives zeros."""
        tables = torch.cat([table.get_parameter("weight") for table in self.tables])
        return F.embedding(rows, F.pad(tables, (0, 0, 1, 0)))


class CovariatePrefix:
    """The covariate tokens before each cell. Not a module, because each pipeline stage has it."""

    def __init__(self, tokens: Tokens, levels: Mapping[str, Sequence[str]]) -> None:
        self.columns = [[*levels].index(name) for name in tokens.covariates]
        sizes = [len(levels[name]) + 1 for name in tokens.covariates]
        # row of each column's unknown level; row 0 is of tokens that are not covariates
        self.first_rows = [*accumulate(sizes, initial=1)][:-1]
        self.unknown_frac = tokens.covariate_unknown_frac

    def add_to(self, batch: AnyBatch, keys: tuple[int, int] | None = None) -> AnyBatch:
        """Return `batch` with a token per column before each cell.

        `keys`, seed and step, draw the levels that are replaced by the unknown level.
        """
        device = batch.token_ids.device
        n_columns = len(self.columns)
        column = torch.arange(n_columns, device=device)
        # (C, K) int64: level codes, 0 for unknown levels
        if batch.levels is None:
            codes = batch.cell_ids.new_zeros(len(batch.cell_ids), n_columns)
        else:
            codes = batch.levels[:, self.columns]
            if keys is not None and self.unknown_frac:
                draws = keyed_bits(batch.cell_ids[:, None], *keys, column, UNKNOWN_LEVEL_KEY)
                codes = codes.masked_fill(draws < threshold(self.unknown_frac), 0)
        # (C, K): rows of the embedding, and indices of the added tokens, the first of each cell
        rows = codes + torch.tensor(self.first_rows, device=device)
        extended = add_tokens(batch, n_columns, 0, PAD_TOKEN)
        starts = extended.cu_seqlens[:-1].long()
        tokens = starts[:, None] + column
        covariate_rows = torch.zeros_like(extended.token_ids)
        covariate_rows = covariate_rows.index_copy(0, tokens.flatten(), rows.flatten())
        return replace(extended, covariate_rows=covariate_rows)


def mean_state(states: Tensor, prepared: EncoderBatch, is_gene: Tensor | None = None) -> Tensor:
    """(T, H) -> (C, H) float32: mean over the tokens of genes, zeros for a cell without any.

    `is_gene` is (T,); by default all tokens except covariates are genes.
    """
    lengths = prepared.cu_seqlens.diff()
    states = states.float()
    if prepared.covariate_rows is not None:
        is_gene = prepared.covariate_rows == 0
    if is_gene is not None:
        lengths = segment_sum(is_gene.float(), prepared.token_cells, prepared.cu_seqlens)
        states = states * is_gene[:, None]
    sums = segment_sum(states, prepared.token_cells, prepared.cu_seqlens)
    return sums / lengths.clamp(min=1)[:, None]


def first_state(states: Tensor, prepared: EncoderBatch) -> Tensor:
    """(T, H) -> (C, H) float32: the state of each cell's first token."""
    return states[prepared.cu_seqlens[:-1].long()].float()


def attended_state(states: Tensor, prepared: EncoderBatch, query: Tensor) -> Tensor:
    """(T, H), (H,) -> (C, H) float32: means weighted by softmax(states @ query / sqrt(H)).

    The mean of a cell without tokens is zero.
    """
    states = states.float()
    token_cells = prepared.token_cells
    products = (states @ query.float()).float()  # autocast computes bf16
    scores = products * states.shape[1] ** -0.5
    # (C,): largest score of each cell, against overflow; it cancels, so it needs no gradient
    largest = torch.full((len(prepared.lengths),), -torch.inf, device=scores.device)
    largest = largest.scatter_reduce(0, token_cells, scores.detach(), "amax")
    weights = (scores - largest[token_cells]).exp()
    totals = segment_sum(weights, token_cells, prepared.cu_seqlens)
    sums = segment_sum(weights[:, None] * states, token_cells, prepared.cu_seqlens)
    return sums / totals.clamp(min=1e-30)[:, None]


class CellEncoder(Model):
    """Base of families with a `norm` after the blocks.

    They define `begin`, `through` and `cell_vectors`.
    """

    norm: nn.Module
    hidden_value: nn.Parameter
    """(H,): embedding of a hidden value, added by objectives that hide values."""
    covariate_prefix: CovariatePrefix | None = None

    def attach_heads(self, vocab_size: int) -> None:
        """Add the objective's heads to the model, its `plan` and its `gene_rows`."""
        children = dict(self.named_children())
        parameters = dict(self.named_parameters(recurse=False))
        trunk = {*self.plan.begin, *children, *parameters}
        finish = ("norm", *self.objective.attach(self, vocab_size))
        self.heads = tuple(name for name in finish if name not in trunk)
        styles = {**self.plan.tensor, **self.objective.tensor_parallel_styles}
        self.plan = replace(self.plan, tensor=styles, finish=finish)
        self.gene_rows = self.gene_rows | self.objective.gene_rows

    def view(self, batch: Batch, *, seed: int, step: int) -> Batch:
        view = super().view(batch, seed=seed, step=step)
        if self.covariate_prefix is None:
            return view
        keys = (seed, step) if self.training else None
        return self.covariate_prefix.add_to(view, keys)

    def finish(self, x: Tensor, prepared: EncoderBatch) -> Tensor:
        """Return the objective's summed loss of the normed states; 0 while `kept_rows` is a list."""
        states = self.norm_output(x, prepared)
        if self.kept_rows is not None:
            self.kept_rows.append(self.objective.coupled_rows(self, states, prepared))
            return torch.zeros((), device=x.device)
        self.keep_vectors(lambda: self.cell_vectors(states, prepared))
        return self.objective.loss(self, states, prepared)

    def embed(self, batch: Batch) -> Tensor:
        if self.covariate_prefix is not None:
            batch = self.covariate_prefix.add_to(batch)
        prepared = EncoderBatch.from_batch(batch)
        return self.cell_vectors(self.states(prepared), prepared)

    def states(self, prepared: EncoderBatch) -> Tensor:
        """(R, H): the normed output of the last block."""
        return self.norm_output(self.through(self.begin(prepared), prepared), prepared)

    def norm_output(self, x: Tensor, prepared: EncoderBatch) -> Tensor:
        """(R, H) -> (R, H): the states that objectives read, from the output of the last block."""
        return self.norm(x)


class TokenEncoder(CellEncoder):
    """Base of families whose rows are tokens.

    Their blocks are those of `models.blocks`, or have the same modules.
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
    gene_rows = frozenset({"gene_embedding.weight"})
    blocks: nn.ModuleList

    def __init__(self, width: int, n_genes: int, objective: Objective) -> None:
        super().__init__(objective)
        self.width = width
        self.vocab_size = n_genes + len(SPECIAL)
        self.enter = Entry()
        self.enter_keys = Entry()
        self.gene_embedding = nn.Embedding(self.vocab_size, width)

    def through(self, x: Tensor, prepared: EncoderBatch, n_blocks: int | None = None) -> Tensor:
        """Apply the first `n_blocks` blocks, all by default."""
        token_keys = self.enter_keys(prepared.token_keys)
        for block in list(self.blocks)[:n_blocks]:
            x = block(x, prepared.cu_seqlens, prepared.lengths, token_keys)
        return x

    def with_hidden(self, values: Tensor, prepared: EncoderBatch, index: Tensor | slice) -> Tensor:
        """(N, H): embedded values of the tokens in `index`; a hidden value is `hidden_value`."""
        if not hasattr(self, "hidden_value"):
            return values
        is_hidden = prepared.value_hidden[index][:, None]
        return torch.where(is_hidden, self.hidden_value.to(values.dtype), values)
