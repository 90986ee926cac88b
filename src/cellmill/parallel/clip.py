"""Gradient clipping by the global norm, the same number in every layout."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float | None) -> torch.Tensor:
    """Scales gradients so that their 2-norm over all processes is at most `max_norm`; null only measures it.

    Returns the norm before clipping, a scalar on the parameters' device. Collective: every rank.
    """
    with_grad = [parameter for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm([parameter.grad for parameter in with_grad], foreach=True)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()  # a DTensor's norm is a partial sum until it is reduced
    if max_norm is not None:
        nn.utils.clip_grads_with_norm_(with_grad, max_norm, norm, foreach=True)
    return norm
