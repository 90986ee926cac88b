"""Fused AdamW (Loshchilov & Hutter 2019) with weight decay only on the matrices of linear layers.

The type of a parameter's module decides, never its name: norms, biases and embeddings of any family do not decay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cellmill.config.run import Train
from cellmill.parallel.mesh import mesh_of
from cellmill.train.offload import OffloadedAdamW


def build_optimizer(model: nn.Module, train: Train, cpu_offload: str | None = None) -> torch.optim.Optimizer:
    """Return AdamW over the trainable parameters of `model`, after `materialize`.

    With `cpu_offload` "optimizer" its moments are on the CPU; with "full" the parameters already are.
    """
    decayed = decayed_parameters(model)
    # one group for each mesh: the fused step takes no list of tensors on different meshes
    groups: dict[tuple[float, object], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decay = train.weight_decay if name in decayed else 0.0
            groups.setdefault((decay, mesh_of(parameter)), []).append(parameter)
    options: list[dict[str, Any]] = [{"params": group, "weight_decay": decay} for (decay, _), group in groups.items()]
    betas = (train.beta1, train.beta2)
    if cpu_offload == "optimizer":
        return OffloadedAdamW(options, lr=train.lr, betas=betas)
    return torch.optim.AdamW(options, lr=train.lr, betas=betas, fused=True)


def decayed_parameters(model: nn.Module) -> set[str]:
    """Return the names of the parameters that decay: weights of linear layers."""
    return {
        f"{name}.weight" if name else "weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
