"""The transformer block: pre-norm (Xiong et al. 2020), packed.

Legend: T tokens of the batch, H hidden, h heads.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from cellmill.models.attention import attention
from cellmill.models.keyed import keyed_dropout
from cellmill.parallel.products import Linear


class Entry(nn.Module):
    """Where tokens enter the blocks: a name for layouts in which each process goes on with some of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(T, …), as it is."""
        return x


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and added to the residual stream.

    Rows of `qkv` are those of the first head's query, key and value, then of the second's: any slice of whole heads
    is a smaller layer of the same kind, so heads may be fewer here than in the model.
    """

    def __init__(self, hidden: int, heads: int, ffn_hidden: int, dropout: float, index: int) -> None:
        super().__init__()
        self.head_width, self.dropout, self.index = hidden // heads, dropout, index
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv = Linear(hidden, 3 * hidden)
        self.out = Linear(hidden, hidden)
        self.ffn_norm = nn.LayerNorm(hidden)
        self.up = Linear(hidden, ffn_hidden)
        self.down = Linear(ffn_hidden, hidden)

    def forward(
        self, x: torch.Tensor, cu_seqlens: torch.Tensor, lengths: list[int], token_keys: torch.Tensor
    ) -> torch.Tensor:
        """(T, H) -> (T, H); `token_keys` (T,) int64 say what dropout drops. T may be a share of the batch's tokens."""
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, 3, self.head_width)).unbind(2)
        attended = attention(q, k, v, cu_seqlens, lengths).flatten(1)
        x = x + self._drop(self.out(attended), token_keys, 2 * self.index)
        return x + self._drop(self.down(F.gelu(self.up(self.ffn_norm(x)))), token_keys, 2 * self.index + 1)

    def _drop(self, x: torch.Tensor, token_keys: torch.Tensor, salt: int) -> torch.Tensor:
        return keyed_dropout(x, self.dropout, token_keys, salt) if self.training and self.dropout else x
