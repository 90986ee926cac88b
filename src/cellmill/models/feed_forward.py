"""The residual feed-forward layer, of rows that are cells or queries.

Legend: R rows, H hidden.
"""

import torch
from torch import nn
from torch.nn import functional as F

from cellmill.models.counter_rng import keyed_dropout, keyed_state
from cellmill.models.initial import with_std
from cellmill.parallel.cpu_matmul import Linear


class FeedForward(nn.Module):
    """A feed-forward layer after a norm, added to the residual stream."""

    def __init__(self, hidden: int, ffn_hidden: int, dropout: float, index: int) -> None:
        super().__init__()
        self.dropout, self.index = dropout, index
        self.norm = nn.LayerNorm(hidden)
        self.up = with_std(Linear(hidden, ffn_hidden), hidden**-0.5)
        self.down = with_std(Linear(ffn_hidden, hidden), ffn_hidden**-0.5)

    def forward(self, x: torch.Tensor, row_keys: torch.Tensor) -> torch.Tensor:
        """(R, H) -> (R, H); `row_keys` (R,) int64 key the dropout."""
        return self.inner(x, keyed_state(row_keys, self.index) if self.training and self.dropout else None)

    def inner(self, x: torch.Tensor, drops: torch.Tensor | None) -> torch.Tensor:
        """(R, H) and states of the dropout, (R,), -> (R, H)."""
        update = self.down(F.gelu(self.up(self.norm(x))))
        return x + (update if drops is None else keyed_dropout(update, self.dropout, drops))
