"""Attention of long cells on a CPU, by plain matrix products over tiles of queries.

torch's own CPU kernel is fused, but its products are slow: 72 GFLOP/s forward in bfloat16, where a matrix product
makes 380 on the same core. A tile's scores stay in the cache and go; the backward pass makes them again. In bfloat16
scores are rounded before the softmax, as in torch's attention that is not fused.

Legend: T tokens of the batch, n of a cell, h heads, d width of a head.
"""

from __future__ import annotations

from typing import Any

import torch

from cellmill.parallel.cpu_matmul import product

SCORES = 1 << 20
"""Of one tile: 4 MB in float32."""


def tiled_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """(T, h, d) each -> (T, h, d): attention inside each cell of one or more tokens. CPU tensors."""
    found: torch.Tensor = _Tiled.apply(q, k, v, lengths)
    return found


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.lengths = lengths
        out = torch.empty(q.shape, dtype=q.dtype)
        for cell in zip(*(x.split(lengths) for x in (q, k, v, out))):
            for head in range(q.shape[1]):
                q_, k_, v_, out_ = (x[:, head] for x in cell)
                q_, k_, v_ = (q_ * q.shape[-1] ** -0.5).contiguous(), k_.contiguous(), v_.t().contiguous()
                for tile in _tiles(len(q_)):
                    out_[tile] = product(_weights(q_[tile], k_), v_)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs = ctx.saved_tensors
        gradients = [torch.empty(x.shape, dtype=x.dtype) for x in inputs]
        for cell in zip(*(x.split(ctx.lengths) for x in (*inputs, grad, *gradients))):
            for head in range(grad.shape[1]):
                _head_backward(*(x[:, head] for x in cell))
        return *gradients, None


def _head_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    of_q: torch.Tensor,
    of_k: torch.Tensor,
    of_v: torch.Tensor,
) -> None:
    """(n, d) each, of one head of one cell; fills the last three."""
    scale = q.shape[-1] ** -0.5
    q, k, v, grad = (q * scale).contiguous(), k.contiguous(), v.contiguous(), grad.contiguous()
    k_by_width = k.t().contiguous()
    sum_k, sum_v = (torch.zeros(x.shape) for x in (k, v))
    for tile in _tiles(len(q)):
        weights = _weights(q[tile], k)
        sum_v += product(weights.t(), grad[tile].t())
        slope = torch._softmax_backward_data(product(grad[tile], v), weights, -1, weights.dtype)
        of_q[tile] = product(slope, k_by_width) * scale
        sum_k += product(slope.t(), q[tile].t())
    of_k.copy_(sum_k)
    of_v.copy_(sum_v)


def _weights(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """(tile, d) scaled queries, (n, d) -> (tile, n)."""
    scores = product(q, k)
    return torch.softmax(scores, -1, out=scores)


def _tiles(n: int) -> list[slice]:
    rows = max(1, SCORES // n)
    return [slice(start, start + rows) for start in range(0, n, rows)]
