"""AdamW (Loshchilov & Hutter 2019), fused, with weight decay on the matrices of linear layers only.

Which parameters decay is decided by the type of their module, never by a name: norms, biases and embeddings of any
family are left alone.
"""

from __future__ import annotations

import torch
from torch import nn

from cellmill.config.run import Train
from cellmill.parallel.mesh import mesh_of


def build_optimizer(model: nn.Module, train: Train) -> torch.optim.AdamW:
    """AdamW over the trainable parameters of `model`, after it was laid out and materialised."""
    decayed = decayed_parameters(model)
    # a group for each mesh too: the fused step takes no list of tensors that lie on different ones
    groups: dict[tuple[float, object], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decay = train.weight_decay if name in decayed else 0.0
            groups.setdefault((decay, mesh_of(parameter)), []).append(parameter)
    return torch.optim.AdamW(
        [{"params": group, "weight_decay": decay} for (decay, _), group in groups.items()],
        lr=train.lr,
        betas=(train.beta1, train.beta2),
        fused=True,
    )


def decayed_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters that decay: weights of linear layers."""
    return {
        f"{name}.weight" if name else "weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
