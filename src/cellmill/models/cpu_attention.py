"""Attention of long cells on a CPU, by matmuls over tiles of queries.

torch's fused CPU kernel has slow matmuls: 72 GFLOP/s forward in bfloat16, against 380 of a plain product on the same
core. The scores of a tile stay in the cache and are dropped; the backward pass recomputes them. In bfloat16, scores are
rounded before the softmax, as in torch's unfused attention.

Legend: T tokens of the batch, n of a cell, h heads, d width of a head.
"""

from typing import Any

import torch

from cellmill.parallel.cpu_matmul import product
from cellmill.parallel.torch_private import softmax_backward

SCORES = 1 << 20
"""Scores of one tile: 4 MB in float32."""


def tiled_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], causal: bool = False
) -> torch.Tensor:
    """(T, h, d) each -> (T, h, d): attention inside each cell of one or more tokens. CPU tensors."""
    out: torch.Tensor = _Tiled.apply(q, k, v, lengths, causal)
    return out


class _Tiled(torch.autograd.Function):
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
