"""Layers of all families: packed attention, transformer block, feed-forward layer.

The block has norms before its layers (Xiong et al. 2020). Attention has two backends, neither of
which pads: variable-length flash attention on GPUs that have it, in half precision; otherwise
scaled-dot-product attention over runs of cells of equal length. Linear layers are torch's, or
transformers' Conv1D of GPT-2, whose weight is transposed.

Legend: T tokens of the batch, R rows (cells or queries), L tokens of the longest cell, H width of the
model, h heads, d width of a head.
"""

from functools import cache
from importlib import import_module
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cellmill.models.counter_rng import keyed_dropout, keyed_state
from cellmill.models.initial import with_std
from cellmill.parallel.torch_private import flash_attention


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    lengths: list[int],
    causal: bool = False,
) -> Tensor:
    """(T, h, d) each -> (T, h, d): each token attends to the tokens of its cell.

    If `causal`, it attends only to itself and earlier tokens.
    """
    if not lengths:
        return v + 0 * (q + k)  # no cells: the result is empty, and gradients are zeros, not None
    head_width = q.shape[-1]
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    suits_flash = q.is_cuda and is_half and head_width % 8 == 0 and head_width <= 256
    if suits_flash and _has_flash(q.device):
        longest = max(lengths)
        window = (-1, 0 if causal else -1)
        # imported only here: this module imports torch's compiler, which takes half a second
        varlen_attn = import_module("torch.nn.attention.varlen").varlen_attn
        return cast(
            Tensor,
            varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, window_size=window),
        )
    # the planner measures the calls: sorting makes fewer of them, and no result is wrong
    if q.is_meta:
        lengths = sorted(lengths)
    # on the meta device torch would choose attention that stores its scores
    attend = flash_attention if q.is_meta else F.scaled_dot_product_attention
    # runs of cells of equal length: the length, and the number of cells
    runs = [(length, len(list(cells))) for length, cells in groupby(lengths)]
    n_tokens = [length * n_cells for length, n_cells in runs]
    parts = []
    for run, *tensors in zip(runs, q.split(n_tokens), k.split(n_tokens), v.split(n_tokens)):
        length, n_cells = run
        # (cells, h, length, d): views, no copies
        query, key, value = (x.unflatten(0, (n_cells, length)).transpose(1, 2) for x in tensors)
        attended = attend(query, key, value, is_causal=causal)
        parts.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)


@cache
def _has_flash(device: torch.device) -> bool:
    # 8.0 is Ampere; the V100 is older
    return torch.cuda.get_device_capability(device) >= (8, 0)


class Entry(nn.Module):
    """Identity at which sequence parallel shards the tokens that enter the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and added to the residual stream.

    Rows of `qkv` are query, key and value of the first head, then of the second: any slice of whole
    heads is a smaller layer of the same kind, so a tensor-parallel rank may have fewer heads than
    the model. `before` and `after` are the parts before and after attention. They read only tensors, so
    all blocks share their compiled code.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        ffn_hidden: int,
        dropout: float,
        index: int,
        causal: bool = False,
    ) -> None:
        super().__init__()
        self.head_width = hidden // heads
        self.dropout = dropout
        self.index = index
        self.causal = causal
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.ffn_norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, ffn_hidden)
        self.down = nn.Linear(ffn_hidden, hidden)

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor,
        lengths: list[int],
        token_keys: Tensor,
    ) -> Tensor:
        """(T, H) -> (T, H); `token_keys` (T,) int64 key the dropout.

        T may be this rank's share of the tokens.
        """
        dropout_states = None
        if self.training and self.dropout:
            first_key = 2 * self.index
            dropout_states = (
                keyed_state(token_keys, first_key),
                keyed_state(token_keys, first_key + 1),
            )
        attended = attention(*self.before(x), cu_seqlens, lengths, self.causal)
        return self.after(x, attended.flatten(1), dropout_states)

    def padded(self, x: Tensor, is_token: Tensor) -> Tensor:
        """Apply the block to padded cells without dropout: (cells, L, H) -> (cells, L, H).

        `is_token`, (cells, L) bool, is False for padding.
        """
        shape = x.shape[:2]
        rows = x.flatten(0, 1)
        q, k, v = (part.unflatten(0, shape).transpose(1, 2) for part in self.before(rows))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=is_token[:, None, None, :])
        attended = attended.transpose(1, 2).flatten(2).flatten(0, 1)
        return self.after(rows, attended, None).unflatten(0, shape)

    def before(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute query, key and value, (T, h, d) each, from the block's input (T, H)."""
        projected = self.qkv(self.attention_norm(x))
        q, k, v = projected.unflatten(-1, (-1, 3, self.head_width)).unbind(2)
        return q, k, v

    def after(
        self,
        x: Tensor,
        attended: Tensor,
        dropout_states: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """Compute the block's output (T, H) from its input and the attention's output, (T, H) each.

        `dropout_states` are the random states of the dropouts of both layers, (T,) int64 each; None
        for no dropout.
        """
        attention_states, ffn_states = dropout_states or (None, None)
        x = x + self._drop(self.out(attended), attention_states)
        inner = self.down(F.gelu(self.up(self.ffn_norm(x))))
        return x + self._drop(inner, ffn_states)

    def _drop(self, x: Tensor, states: Tensor | None) -> Tensor:
        return x if states is None else keyed_dropout(x, self.dropout, states)


class FeedForward(nn.Module):
    """A feed-forward layer after a norm, added to the residual stream."""

    def __init__(self, hidden: int, ffn_hidden: int, dropout: float, index: int) -> None:
        super().__init__()
        self.dropout = dropout
        self.index = index
        self.norm = nn.LayerNorm(hidden)
        self.up = with_std(nn.Linear(hidden, ffn_hidden), hidden**-0.5)
        self.down = with_std(nn.Linear(ffn_hidden, hidden), ffn_hidden**-0.5)

    def forward(self, x: Tensor, row_keys: Tensor | None) -> Tensor:
        """(R, H) -> (R, H); `row_keys` (R,) int64 key the dropout, None for none."""
        return self.inner(x, None if row_keys is None else keyed_state(row_keys, self.index))

    def inner(self, x: Tensor, dropout_states: Tensor | None) -> Tensor:
        """(R, H) -> (R, H), as `forward`; `dropout_states` (R,) int64 are random states, None for none."""
        update = self.down(F.gelu(self.up(self.norm(x))))
        if dropout_states is not None:
            update = keyed_dropout(update, self.dropout, dropout_states)
        return x + update


def is_linear(layer: nn.Module) -> bool:
    """Return True for a linear layer, which has its matrix in `weight`."""
    return isinstance(layer, nn.Linear) or is_transposed(layer)


def is_transposed(layer: nn.Module) -> bool:
    """Return True for transformers' Conv1D, a linear layer whose weight is (in, out)."""
    kind = type(layer)
    return (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


class ReverseGradient(torch.autograd.Function):
    """Identity whose gradient is multiplied by `-scale`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * grad, None
