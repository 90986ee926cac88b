"""Matrix products on a CPU through oneDNN, in float32 too, where torch would call MKL.

MKL selects old code paths on AMD processors: 77-97 GFLOP/s in float32 against 134-217 with oneDNN on one AVX-512 core.
torch has no public switch, so this calls its operator for compiled code where that exists. Small products, for which
oneDNN is slow to start, and all other cases are torch's.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from cellmill.parallel.torch_private import HAS_ONEDNN_LINEAR, is_dtensor, linear_onednn

LARGE = 1 << 24  # multiply-adds from which oneDNN is faster


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """Dtype that autocast casts to on the device of `tensor`; None where it is off, and on the meta device."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """(M, K), (N, K) and (N,) -> (M, N), `a @ b.T + bias`; plain tensors, no autograd."""
    return linear_onednn(a, b, bias) if _use_onednn(a, b) else F.linear(a, b, bias)


class Linear(nn.Linear):
    """`nn.Linear` through oneDNN for float32 on a CPU."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        autocast = autocast_dtype(input) is not None
        if autocast or is_dtensor(self.weight) or not _use_onednn(input, self.weight):
            return F.linear(input, self.weight, self.bias)
        return _Linear.apply(input, self.weight, self.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return linear_onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        to_x, to_weight, to_bias = ctx.needs_input_grad
        return (
            linear_onednn(grad, weight.t(), None) if to_x else None,
            linear_onednn(grad.t(), x.t(), None) if to_weight else None,
            grad.sum(0) if to_bias else None,
        )


def _use_onednn(a: torch.Tensor, b: torch.Tensor) -> bool:
    plain = HAS_ONEDNN_LINEAR and a.device.type == "cpu" and a.ndim == 2 and a.dtype == b.dtype == torch.float32
    return plain and a.numel() * len(b) >= LARGE and not torch.compiler.is_compiling()
