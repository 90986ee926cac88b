"""AdamW (Loshchilov & Hutter 2019), fused, with weight decay on the matrices of linear layers only.

Which parameters decay is decided by the type of their module, never by a name: norms, biases and embeddings of any
family are left alone.
"""

from __future__ import annotations

import torch
from torch import nn

from cellmill.config.run import Train


def build_optimizer(model: nn.Module, train: Train) -> torch.optim.AdamW:
    """AdamW over the trainable parameters of `model`, after it was laid out and materialised."""
    decayed = decayed_parameters(model)
    groups: list[list[nn.Parameter]] = [[], []]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[name not in decayed].append(parameter)
    decays = (train.weight_decay, 0.0)
    return torch.optim.AdamW(
        [{"params": group, "weight_decay": decay} for group, decay in zip(groups, decays) if group],
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
