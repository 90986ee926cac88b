"""Attention inside each cell of a packed batch, bidirectional or causal, behind one function.

Backends, none of which pads: variable-length flash attention on GPUs that have it, in half precision; tiled matmuls for
long cells on a CPU; otherwise scaled-dot-product attention over runs of cells of equal length. `attention_padded` is
the reference of the tests.

Tiles exist because torch's fused CPU kernel has slow matmuls: 72 GFLOP/s forward in bfloat16, against 380 for a plain
product on the same core. The scores of a tile stay in the cache and are dropped; the backward pass recomputes them. In
bfloat16, scores are rounded before the softmax, as in torch's unfused attention.

Legend: T tokens of the batch, n of a cell, h heads, d width of a head.
"""

from functools import cache
from importlib import import_module
from itertools import groupby
from typing import Any, cast

import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from cellmill.parallel.cpu_matmul import product
from cellmill.parallel.torch_private import flash_attention, softmax_backward

SCORES = 1 << 20  # scores of one tile: 4 MB in float32


class _Tiled(torch.autograd.Function):
    """(T, h, d) each -> (T, h, d): attention inside each cell of one or more tokens. CPU tensors."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], causal: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.lengths, ctx.causal = lengths, causal
        out = torch.empty(q.shape, dtype=q.dtype)
        for cell in zip(*(x.split(lengths) for x in (q, k, v, out))):
            for head in range(q.shape[1]):
                q_, k_, v_, out_ = (x[:, head] for x in cell)
                q_, k_, v_ = (q_ * q.shape[-1] ** -0.5).contiguous(), k_.contiguous(), v_.t().contiguous()
                for tile, seen in _tiles(len(q_), causal):
                    out_[tile] = product(_weights(q_[tile], k_[seen], causal), v_[:, seen])
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs = ctx.saved_tensors
        gradients = [torch.empty(x.shape, dtype=x.dtype) for x in inputs]
        for cell in zip(*(x.split(ctx.lengths) for x in (*inputs, grad, *gradients))):
            for head in range(grad.shape[1]):
                _head_backward(ctx.causal, *(x[:, head] for x in cell))
        return *gradients, None, None


def _head_backward(
    causal: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    q_grad: torch.Tensor,
    k_grad: torch.Tensor,
    v_grad: torch.Tensor,
) -> None:
    """Fill the last three tensors; (n, d) each, of one head of one cell."""
    scale = q.shape[-1] ** -0.5
    q, k, v, grad = (q * scale).contiguous(), k.contiguous(), v.contiguous(), grad.contiguous()
    k_by_width = k.t().contiguous()
    sum_k, sum_v = (torch.zeros(x.shape) for x in (k, v))
    for tile, seen in _tiles(len(q), causal):
        weights = _weights(q[tile], k[seen], causal)
        sum_v[seen] += product(weights.t(), grad[tile].t())
        # zero weights have zero gradients, so masked scores need no mask here
        slope = softmax_backward(product(grad[tile], v[seen]), weights)
        q_grad[tile] = product(slope, k_by_width[:, seen]) * scale
        sum_k[seen] += product(slope.t(), q[tile].t())
    k_grad.copy_(sum_k)
    v_grad.copy_(sum_v)


def _weights(q: torch.Tensor, k: torch.Tensor, causal: bool) -> torch.Tensor:
    """(tile, d) scaled queries, (n, d) keys -> (tile, n); where causal, the keys end at the last query."""
    scores = product(q, k)
    if causal:
        rows, columns = scores.shape
        future = torch.ones(rows, rows, dtype=torch.bool).triu(1)
        scores[:, columns - rows :].masked_fill_(future, -torch.inf)
    return torch.softmax(scores, -1, out=scores)


def _tiles(n: int, causal: bool) -> list[tuple[slice, slice]]:
    """Return (queries, keys) of each tile; causal tiles skip the keys after their last query."""
    rows = max(1, SCORES // n)
    return [
        (slice(start, start + rows), slice(0, min(start + rows, n) if causal else n)) for start in range(0, n, rows)
    ]


LONG = 256  # tokens of a cell from which tiled matmuls are faster than torch's kernel on a CPU


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    lengths: list[int],
    causal: bool = False,
) -> torch.Tensor:
    """(T, h, d) each -> (T, h, d): each token attends to its cell's, if `causal` to itself and earlier ones."""
    if not lengths:
        return v + 0 * (q + k)  # no cells: an empty result, through which gradients flow as zeros
    suits = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    if suits and _has_flash(q.device):
        longest, window = max(lengths), (-1, 0 if causal else -1)
        # only here: the module imports torch's compiler, half a second
        varlen_attn = import_module("torch.nn.attention.varlen").varlen_attn
        return cast(torch.Tensor, varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, window_size=window))
    return _by_length(q, k, v, lengths, causal)


@cache
def _has_flash(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)  # Ampere; the V100, which needs 16-mixed, is older


def _by_length(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], causal: bool) -> torch.Tensor:
    """Call the backend once for each run of cells of equal length: views, no copies."""
    lengths = sorted(lengths) if q.is_meta else lengths  # nothing is computed: fewer calls for the planner to measure
    runs = [(length, len(list(cells))) for length, cells in groupby(lengths)]
    sizes = [length * cells for length, cells in runs]
    parts = []
    tiled = q.device.type == "cpu" and q.dtype in (torch.float32, torch.bfloat16)
    for (length, cells), q_, k_, v_ in zip(runs, q.split(sizes), k.split(sizes), v.split(sizes)):
        if tiled and length >= LONG:
            parts.append(_Tiled.apply(q_, k_, v_, [length] * cells, causal))
            continue
        # (cells, h, length, d)
        q_, k_, v_ = (x.unflatten(0, (cells, length)).transpose(1, 2) for x in (q_, k_, v_))
        # on the meta device torch would plan for attention that keeps its scores
        attend = flash_attention if q.is_meta else F.scaled_dot_product_attention
        parts.append(attend(q_, k_, v_, is_causal=causal).transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)


def attention_padded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], causal: bool = False
) -> torch.Tensor:
    """Attend as `attention`, padded to the longest cell with a mask: the slow, obvious reference."""
    q_, k_, v_ = (pad_sequence(x.split(lengths), batch_first=True).transpose(1, 2) for x in (q, k, v))
    inside = torch.arange(max(lengths), device=q.device) < torch.tensor(lengths, device=q.device)[:, None]
    mask = inside[:, None, None, :]
    if causal:
        mask = mask & torch.ones(max(lengths), max(lengths), dtype=torch.bool, device=q.device).tril()
    out = F.scaled_dot_product_attention(q_, k_, v_, attn_mask=mask).transpose(1, 2)
    return out[inside]
