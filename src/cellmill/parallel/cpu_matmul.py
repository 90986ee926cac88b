"""Matrix products on a CPU, in float32 too by oneDNN, which torch asks in bfloat16 alone.

In float32 torch asks MKL, which takes AMD's processors for older ones than they are: 77-97 GFLOP/s against 134-217 on
one core with AVX-512. torch has no public way to ask oneDNN, so its own operation for compiled code is used where it
exists. Elsewhere, and for small products, which it is slow to begin, all is as torch has it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

LARGE = 1 << 24
"""Multiply-adds from which it is worth it."""
_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """Dtype that autocast casts to on the device of `tensor`; None where it is off, and on the meta device."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """(M, K), (N, K) and (N,) -> (M, N), `a @ b.T + bias`; of plain tensors and without a gradient."""
    return _onednn(a, b, bias) if _suits(a, b) else F.linear(a, b, bias)


class Linear(nn.Linear):
    """`nn.Linear`, faster in float32 on a CPU."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(M, in) -> (M, out)."""
        if autocast_dtype(input) is not None or isinstance(self.weight, DTensor) or not _suits(input, self.weight):
            return F.linear(input, self.weight, self.bias)
        return _Linear.apply(input, self.weight, self.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        to_x, to_weight, to_bias = ctx.needs_input_grad
        return (
            _onednn(grad, weight.t(), None) if to_x else None,
            _onednn(grad.t(), x.t(), None) if to_weight else None,
            grad.sum(0) if to_bias else None,
        )


def _suits(a: torch.Tensor, b: torch.Tensor) -> bool:
    plain = _HAS_ONEDNN and a.device.type == "cpu" and a.ndim == 2 and a.dtype == b.dtype == torch.float32
    return plain and a.numel() * len(b) >= LARGE and not torch.compiler.is_compiling()


def _onednn(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")
    return found
