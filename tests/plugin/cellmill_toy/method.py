"""Low-rank adapters of the attention's linear layers (Hu et al. 2022, LoRA); nothing else trains."""

from dataclasses import replace

import torch
from torch import nn

from cellmill.finetune.method import Method
from cellmill.models.family import Model
from cellmill.models.initial import with_std

LAYERS = {"qkv": ("norm", "columns"), "out": ("rows", "norm")}
"""Adapted layers of a block, and the styles of their adapters."""


class Adapted(nn.Module):
    """base(x) + b(a(x)); `b` begins as zeros."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.a = with_std(nn.Linear(base.in_features, rank, bias=False), base.in_features**-0.5)
        self.b = with_std(nn.Linear(rank, base.out_features, bias=False), 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(T, in) -> (T, out)."""
        return self.base(x) + self.b(self.a(x))


class LowRank(Method):
    """See the module."""

    def transform(self, model: Model) -> None:
        """Wrap the layers, and name their parts in the model's plan."""
        blocks = model.get_submodule(model.plan.blocks)
        styles = dict(model.plan.tensor)
        for layer, (of_a, of_b) in LAYERS.items():
            for block in blocks.children():
                setattr(block, layer, Adapted(getattr(block, layer), self.config.rank))
            path = f"{model.plan.blocks}.*.{layer}"
            styles |= {f"{path}.base": styles.pop(path), f"{path}.a": of_a, f"{path}.b": of_b}
        model.plan = replace(model.plan, tensor=styles)

    def trains(self, name: str) -> bool:
        """Only the adapters."""
        return name.endswith((".a.weight", ".b.weight"))

    def merge(self, model: Model) -> None:
        """Add each adapter's product to its layer."""
        for block in model.get_submodule(model.plan.blocks).children():
            for layer in LAYERS:
                adapted = getattr(block, layer)
                with torch.no_grad():
                    adapted.base.weight += adapted.b.weight @ adapted.a.weight
                setattr(block, layer, adapted.base)
