"""Covariate tokens: values of obs columns that a model reads before the genes of each cell.

One token per column of `tokens.covariates`, without a value, whose embedding is that of the cell's level. In a batch
these tokens are `<pad>`, so objectives neither mask nor predict them, and `covariate_rows` tells their rows of the
embedding. They are put before a *view*, which is padded afterwards, so layouts treat them as any tokens. In training
some levels are replaced by the unknown one, so that cells of unknown level can be embedded.

Legend: T tokens, C cells, K columns, H hidden.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import nn
from torch.nn import functional as F

from cellmill.config.tokens import Tokens
from cellmill.models.batch import PAD_TOKEN, AnyBatch, TensorBatch, with_extra_tokens
from cellmill.models.counter_rng import keyed_bits, threshold

UNKNOWN = 4  # last key of the draws; 2 and 3 are those of views


class CovariateEmbedding(nn.Module):
    """Embeddings of the levels of each column, the unknown one first."""

    def __init__(self, tokens: Tokens, levels: Mapping[str, Sequence[str]], hidden: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(len(levels[name]) + 1, hidden) for name in tokens.covariates)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """(T,) int64, rows of all tables one below another, from 1 -> (T, H); zeros for tokens of row 0."""
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
        """Return `batch` with a token per column before the genes of each cell.

        With `keys`, seed and step, levels become unknown with probability `tokens.covariate_unknown_frac`.
        """
        device, n_columns = batch.genes.device, len(self.columns)
        rows = self._numbers(batch, keys) + torch.tensor(self.first_rows, device=device)
        more = with_extra_tokens(batch, n_columns, 0, PAD_TOKEN)
        at = (more.cu_seqlens[:-1, None].long() + torch.arange(n_columns, device=device)).flatten()
        return replace(more, covariate_rows=torch.zeros_like(more.genes).index_copy(0, at, rows.flatten()))

    def _numbers(self, batch: TensorBatch, keys: tuple[int, int] | None) -> torch.Tensor:
        """(C, K) int64: level of each cell in each column, 0 for unknown ones."""
        if batch.levels is None:
            return batch.cells.new_zeros(len(batch.cells), len(self.columns))
        numbers = batch.levels[:, self.columns]
        if keys is None or not self.unknown_frac:
            return numbers
        place = torch.arange(len(self.columns), device=numbers.device)
        drawn = keyed_bits(batch.cells[:, None], *keys, place, UNKNOWN)
        return numbers.masked_fill(drawn < threshold(self.unknown_frac), 0)
