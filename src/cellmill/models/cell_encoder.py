"""Shared part of families that encode cells to vectors: states after the last norm, heads, pooling,
covariate tokens.

Each column of `tokens.covariates` adds one token, without a value, before the genes of a cell's
view; its embedding belongs to the cell's level. In a batch these tokens are `<pad>`, so objectives
neither mask nor predict them, and `covariate_rows` holds their rows of the embedding. In training
some levels are replaced by the unknown one, so that cells of unknown level can be embedded.

Legend: R rows of the residual stream (tokens, or cells), T tokens, C cells, K columns, H hidden.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cellmill.config.parts.tokens import SPECIAL, Tokens
from cellmill.data.stream.batch import Batch
from cellmill.models.batch import PAD_TOKEN, AnyBatch, EncoderBatch, with_extra_tokens
from cellmill.models.blocks import Entry
from cellmill.models.counter_rng import keyed_bits, threshold
from cellmill.models.family import Model, ParallelPlan
from cellmill.models.objective import Objective
from cellmill.parallel.vocab_parallel import segment_sum

UNKNOWN = 4  # last key of the draws; 2 and 3 are those of views


class CovariateEmbedding(nn.Module):
    """Embeddings of the levels of each column, the unknown one first."""

    def __init__(self, tokens: Tokens, levels: Mapping[str, Sequence[str]], hidden: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.Embedding(len(levels[name]) + 1, hidden) for name in tokens.covariates
        )

    def forward(self, rows: Tensor) -> Tensor:
        """(T,) int64, rows of all tables one below another, from 1 -> (T, H); zeros for tokens of
        row 0.
        """
        table = torch.cat([of_column.get_parameter("weight") for of_column in self.tables])
        return F.embedding(rows, F.pad(table, (0, 0, 1, 0)))


class CovariatePrefix:
    """Tokens of the columns; no module, because each pipeline stage has it."""

    def __init__(self, tokens: Tokens, levels: Mapping[str, Sequence[str]]) -> None:
        self.columns = [[*levels].index(name) for name in tokens.covariates]
        sizes = [len(levels[name]) + 1 for name in tokens.covariates]
        self.first_rows = [*accumulate(sizes, initial=1)][:-1]
        self.unknown_frac = tokens.covariate_unknown_frac

    def before(self, batch: AnyBatch, keys: tuple[int, int] | None = None) -> AnyBatch:
        """Return `batch` with a token per column before each cell; `keys`, seed and step, draw
        unknown levels.
        """
        device = batch.genes.device
        n_columns = len(self.columns)
        place = torch.arange(n_columns, device=device)
        if batch.levels is None:
            numbers = batch.cells.new_zeros(len(batch.cells), n_columns)
        else:
            numbers = batch.levels[:, self.columns]  # (C, K) int64, 0 for unknown levels
            if keys is not None and self.unknown_frac:
                drawn = keyed_bits(batch.cells[:, None], *keys, place, UNKNOWN)
                numbers = numbers.masked_fill(drawn < threshold(self.unknown_frac), 0)
        rows = numbers + torch.tensor(self.first_rows, device=device)
        more = with_extra_tokens(batch, n_columns, 0, PAD_TOKEN)
        at = (more.cu_seqlens[:-1, None].long() + place).flatten()
        return replace(
            more, covariate_rows=torch.zeros_like(more.genes).index_copy(0, at, rows.flatten())
        )


def mean_state(states: Tensor, prepared: EncoderBatch, of_gene: Tensor | None = None) -> Tensor:
    """(T, H) -> (C, H) float32: mean over the tokens of genes, `of_gene` (T,) or all but
    covariates; zeros for none.
    """
    lengths = prepared.cu_seqlens.diff()
    states = states.float()
    cells = (prepared.cell, prepared.cu_seqlens)
    if prepared.covariate_rows is not None:
        of_gene = prepared.covariate_rows == 0
    if of_gene is not None:
        lengths = segment_sum(of_gene.float(), *cells)
        states = states * of_gene[:, None]
    return segment_sum(states, *cells) / lengths.clamp(min=1)[:, None]


def first_state(states: Tensor, prepared: EncoderBatch) -> Tensor:
    """(T, H) -> (C, H) float32: the state of each cell's first token."""
    return states[prepared.cu_seqlens[:-1].long()].float()


def attended_state(states: Tensor, prepared: EncoderBatch, query: Tensor) -> Tensor:
    """(T, H), (H,) -> (C, H) float32: means weighted by softmax(states @ query / sqrt(H)); zeros
    for none.
    """
    states = states.float()
    cell = prepared.cell
    scores = (states @ query.float()).float() * states.shape[1] ** -0.5  # autocast computes bf16
    largest = torch.full((len(prepared.lengths),), -torch.inf, device=scores.device)
    largest = largest.scatter_reduce(0, cell, scores.detach(), "amax")  # cancels: no gradient
    weights = (scores - largest[cell]).exp()
    totals = segment_sum(weights, cell, prepared.cu_seqlens)
    sums = segment_sum(weights[:, None] * states, cell, prepared.cu_seqlens)
    return sums / totals.clamp(min=1e-30)[:, None]


class CellEncoder(Model):
    """Base of families whose blocks are followed by `norm`; they define `begin`, `through` and
    `cell_vectors`.
    """

    norm: nn.Module
    # (H,): embedding of a hidden value, attached by objectives that hide values
    hidden_value: nn.Parameter
    # tokens of obs columns before the genes of each cell
    covariate_prefix: CovariatePrefix | None = None

    def attach_heads(self, n_tokens: int) -> None:
        """Add the objective's heads, and what layouts and `init_from` have to know of them."""
        own = [*self.named_children(), *self.named_parameters(recurse=False)]
        trunk = {name for name, _ in own} | {*self.plan.begin}
        finish = ("norm", *self.objective.attach(self, n_tokens))
        self.heads = tuple(name for name in finish if name not in trunk)
        self.plan = replace(
            self.plan, tensor={**self.plan.tensor, **self.objective.tensor}, finish=finish
        )
        self.gene_rows = self.gene_rows | self.objective.gene_rows

    def view(self, batch: Batch, *, seed: int, step: int) -> Batch:
        view = super().view(batch, seed=seed, step=step)
        if self.covariate_prefix is None:
            return view
        return self.covariate_prefix.before(view, (seed, step) if self.training else None)

    def finish(self, x: Tensor, prepared: EncoderBatch) -> Tensor:
        """Return the objective's summed loss of the normed states: `Objective.loss`; 0 while
        `kept_rows` is a list.
        """
        states = self.norm(x)
        if self.kept_rows is not None:
            self.kept_rows.append(self.objective.rows(self, states, prepared))
            return torch.zeros((), device=x.device)
        self.keep_vectors(lambda: self.cell_vectors(states, prepared))
        return self.objective.loss(self, states, prepared)

    def embed(self, batch: Batch) -> Tensor:
        batch = batch if self.covariate_prefix is None else self.covariate_prefix.before(batch)
        prepared = EncoderBatch.prepared(batch)
        return self.cell_vectors(self.states(prepared), prepared)

    def states(self, prepared: EncoderBatch) -> Tensor:
        """(R, H): the normed output of the last block."""
        return self.norm(self.through(self.begin(prepared), prepared))

    def cell_vectors(self, states: Tensor, prepared: EncoderBatch) -> Tensor:
        """(R, H) -> (cells, H) float32."""
        raise NotImplementedError


class TokenEncoder(CellEncoder):
    """Base of families whose rows are tokens; their blocks are those of `models.blocks`, or have
    the same modules.
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
        self.n_tokens = n_genes + len(SPECIAL)
        self.enter = Entry()
        self.enter_keys = Entry()
        self.gene_embedding = nn.Embedding(self.n_tokens, width)

    def through(self, x: Tensor, prepared: EncoderBatch, last: int | None = None) -> Tensor:
        """Apply the blocks, up to number `last`."""
        token_keys = self.enter_keys(prepared.token_keys)
        for block in list(self.blocks)[:last]:
            x = block(x, prepared.cu_seqlens, prepared.lengths, token_keys)
        return x

    def with_hidden(self, values: Tensor, prepared: EncoderBatch, at: Tensor | slice) -> Tensor:
        """(N, H): embedded values of the tokens `at`, hidden ones replaced by `hidden_value` if
        there is one.
        """
        if not hasattr(self, "hidden_value"):
            return values
        return torch.where(
            prepared.value_hidden[at][:, None], self.hidden_value.to(values.dtype), values
        )
