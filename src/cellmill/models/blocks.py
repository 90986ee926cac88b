"""Layers of all families: packed pre-norm transformer block (Xiong et al. 2020), and residual feed-forward layer.

Linear layers are torch's, or transformers' Conv1D of GPT-2, whose weight is transposed.

Legend: T tokens of the batch, R rows (cells or queries), H hidden, h heads.
"""

import torch
from torch import nn
from torch.nn import functional as F

from cellmill.models.attention import attention
from cellmill.models.counter_rng import keyed_dropout, keyed_state
from cellmill.models.initial import with_std


class Entry(nn.Module):
    """Identity at which sequence parallel shards the tokens that enter the blocks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and added to the residual stream.

    Rows of `qkv` are query, key and value of the first head, then of the second: any slice of whole heads is a smaller
    layer of the same kind, so a tensor-parallel rank may have fewer heads than the model. `before` and `after` take
    only tensors and depend on no block or batch, so all blocks share their compiled code.
    """

    def __init__(
        self, hidden: int, heads: int, ffn_hidden: int, dropout: float, index: int, causal: bool = False
    ) -> None:
        super().__init__()
        self.head_width, self.dropout, self.index, self.causal = hidden // heads, dropout, index, causal
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.ffn_norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, ffn_hidden)
        self.down = nn.Linear(ffn_hidden, hidden)

    def forward(
        self, x: torch.Tensor, cu_seqlens: torch.Tensor, lengths: list[int], token_keys: torch.Tensor
    ) -> torch.Tensor:
        """(T, H) -> (T, H); `token_keys` (T,) int64 key the dropout. T may be this rank's share of the tokens."""
        drops = None
        if self.training and self.dropout:
            drops = (keyed_state(token_keys, 2 * self.index), keyed_state(token_keys, 2 * self.index + 1))
        attended = attention(*self.before(x), cu_seqlens, lengths, self.causal)
        return self.after(x, attended.flatten(1), drops)

    def padded(self, x: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
        """(cells, L, H) -> (cells, L, H) without dropout; `inside`, (cells, L) bool, are tokens that are no padding."""
        cells, length, _ = x.shape
        rows = x.flatten(0, 1)
        q, k, v = (part.unflatten(0, (cells, length)).transpose(1, 2) for part in self.before(rows))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=inside[:, None, None, :])
        return self.after(rows, attended.transpose(1, 2).flatten(2).flatten(0, 1), None).unflatten(0, (cells, length))

    def before(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(T, H) -> query, key and value, (T, h, H / h) each."""
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, 3, self.head_width)).unbind(2)
        return q, k, v

    def after(
        self, x: torch.Tensor, attended: torch.Tensor, drops: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        """Residual input and attention output, (T, H) each, and states of both dropouts -> (T, H)."""
        x = x + self._drop(self.out(attended), drops and drops[0])
        return x + self._drop(self.down(F.gelu(self.up(self.ffn_norm(x)))), drops and drops[1])

    def _drop(self, x: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        return x if states is None else keyed_dropout(x, self.dropout, states)


class FeedForward(nn.Module):
    """A feed-forward layer after a norm, added to the residual stream."""

    def __init__(self, hidden: int, ffn_hidden: int, dropout: float, index: int) -> None:
        super().__init__()
        self.dropout, self.index = dropout, index
        self.norm = nn.LayerNorm(hidden)
        self.up = with_std(nn.Linear(hidden, ffn_hidden), hidden**-0.5)
        self.down = with_std(nn.Linear(ffn_hidden, hidden), ffn_hidden**-0.5)

    def forward(self, x: torch.Tensor, row_keys: torch.Tensor | None) -> torch.Tensor:
        """(R, H) -> (R, H); `row_keys` (R,) int64 key the dropout, None for none."""
        return self.inner(x, None if row_keys is None else keyed_state(row_keys, self.index))

    def inner(self, x: torch.Tensor, drops: torch.Tensor | None) -> torch.Tensor:
        """(R, H) and states of the dropout, (R,), -> (R, H)."""
        update = self.down(F.gelu(self.up(self.norm(x))))
        return x + (update if drops is None else keyed_dropout(update, self.dropout, drops))


def is_linear(layer: nn.Module) -> bool:
    """Return whether a layer is linear, with its matrix in `weight`."""
    return isinstance(layer, nn.Linear) or is_transposed(layer)


def is_transposed(layer: nn.Module) -> bool:
    """Return whether a layer is transformers' Conv1D: linear, with a weight of (in, out)."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__ == "transformers.pytorch_utils"
