"""Fused AdamW (Loshchilov & Hutter 2019) with weight decay only on the matrices of linear layers.

The type of a parameter's module decides, never its name: norms, biases and embeddings of any family do not decay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from cellmill.config.run import Train
from cellmill.parallel.materialize import plain_name
from cellmill.parallel.mesh import mesh_of
from cellmill.train.offload import OffloadedAdamW


def build_optimizer(
    model: nn.Module,
    train: Train,
    cpu_offload: str | None = None,
    extras: Callable[[str], Mapping[str, float]] = lambda name: {},
) -> torch.optim.Optimizer:
    """Return AdamW over the trained parameters of `model`, after `materialize`; a pipeline stage may have none.

    Parameters
    ----------
    cpu_offload
        With "optimizer" the moments are on the CPU; with "full" the parameters already are.
    extras
        Group options of a parameter by plain name, as `Method.group`.
    """
    decayed = decayed_parameters(model)
    # one group for each mesh: the fused step takes no list of tensors on different meshes
    groups: dict[tuple[object, ...], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            defaults = {"weight_decay": train.weight_decay if name in decayed else 0.0, "lr_scale": 1.0}
            options = defaults | dict(extras(plain_name(name)))
            key = (mesh_of(parameter), *sorted(options.items()))
            groups.setdefault(key, {"params": [], **options})["params"].append(parameter)
    given = list(groups.values()) or [{"params": []}]
    betas = (train.beta1, train.beta2)
    if cpu_offload == "optimizer":
        return OffloadedAdamW(given, lr=train.lr, betas=betas)
    return torch.optim.AdamW(given, lr=train.lr, betas=betas, fused=True)


def decayed_parameters(model: nn.Module) -> set[str]:
    """Return the names of the parameters that decay: weights of linear layers."""
    return {
        f"{name}.weight" if name else "weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
