"""lora: low-rank adapters of the linear layers of the blocks train, and the heads; all else is frozen.

A layer W x + c becomes W x + c + (alpha / rank) B A x, where A is drawn and B begins as zeros, so the first step starts
from the model as it was. The merged layer has the weight W + (alpha / rank) B A. There is no dropout of x: rows between
layers have no keys, so it would not be the same in every layout.

GPT-2's layers are transformers' Conv1D, whose weight is (in, out): its merged weight has the transposed product.

Source: Hu et al. 2022 (LoRA). `adapter` has the names of the package peft, version 0.10 and later.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from cellmill.config.parallel import Style
from cellmill.config.parts.methods import LoraConfig
from cellmill.errors import ConfigError, did_you_mean
from cellmill.finetune.method import Method
from cellmill.models.blocks import is_linear, is_transposed
from cellmill.models.family import Model
from cellmill.models.initial import with_std

STYLES: dict[Style, tuple[Style, Style, Style]] = {
    "columns": ("columns", "norm", "columns"),
    "rows": ("rows", "rows", "norm"),
    "norm": ("norm", "norm", "norm"),
}
"""Tensor-parallel styles of base, A and B of a layer with a style."""


class AdaptedLinear(nn.Module):
    """base(x) + scale * b(a(x)); `b` begins as zeros."""

    def __init__(self, base: nn.Module, rank: int, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        weight: Any = base.weight
        n_out, n_in = weight.shape[::-1] if is_transposed(base) else weight.shape
        self.a = with_std(nn.Linear(n_in, rank, bias=False), n_in**-0.5)
        self.b = with_std(nn.Linear(rank, n_out, bias=False), 0.0)

    @property
    def product(self) -> torch.Tensor:
        """What merging adds to the weight of `base`."""
        product: torch.Tensor = self.scale * self.b.weight @ self.a.weight
        return product.T if is_transposed(self.base) else product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.scale * self.b(self.a(x))
        return out


class Lora(Method):
    config: LoraConfig
    paths: list[str]  # of the adapted layers, in the whole model

    def transform(self, model: Model) -> None:
        super().transform(model)
        blocks = model.get_submodule(model.plan.blocks)
        first = next(iter(blocks.children()), None)
        known = [] if first is None else [path for path, module in first.named_modules() if is_linear(module)]
        if not known:
            raise ConfigError("finetune.method lora: the model's blocks have no linear layers to adapt; set another")
        names, targets = dict.fromkeys(path.split(".")[-1] for path in known), self.config.targets
        for target in targets or ():
            if target not in names and target not in known:
                raise ConfigError(f"finetune.targets: no linear layer {target!r}; {did_you_mean(target, names)}")
        layers = [path for path in known if targets is None or path in targets or path.split(".")[-1] in targets]
        self.paths = [f"{model.plan.blocks}.{i}.{layer}" for i, _ in blocks.named_children() for layer in layers]
        for path in self.paths:
            base: Any = model.get_submodule(path)
            model.set_submodule(path, AdaptedLinear(base, self.config.rank, self.config.alpha / self.config.rank))
        styles = dict(model.plan.tensor)
        for path in (f"{model.plan.blocks}.*.{layer}" for layer in layers):
            if (style := styles.pop(path, None)) is not None:
                styles |= zip((f"{path}.base", f"{path}.a", f"{path}.b"), STYLES[style])
        model.plan = replace(model.plan, tensor=styles)

    def trains(self, name: str) -> bool:
        return self.depth.is_head(name) or self._is_adapter(name)

    def group(self, name: str) -> dict[str, float]:
        return {"lr_scale": self.config.trunk_lr_frac, "weight_decay": 0.0} if self._is_adapter(name) else {}

    def _is_adapter(self, name: str) -> bool:
        path, _, part = name.removesuffix(".weight").rpartition(".")
        return part in ("a", "b") and path in self.paths

    @torch.no_grad()
    def merge(self, model: Model) -> None:
        for path in self.paths:
            adapted: Any = model.get_submodule(path)
            adapted.base.weight += adapted.product
            model.set_submodule(path, adapted.base)

    def adapter(self, model: Model) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return adapter_config.json and the tensors of adapter_model.safetensors, with the trained heads."""
        tensors = {}
        for path in self.paths:
            adapted: Any = model.get_submodule(path)
            tensors[f"{path}.lora_A.weight"] = adapted.a.weight
            tensors[f"{path}.lora_B.weight"] = adapted.b.weight
        tensors |= {name: p for name, p in model.named_parameters() if self.depth.is_head(name)}
        heads = sorted(self.depth.heads)
        config = {
            "peft_type": "LORA",
            "task_type": None,
            "r": self.config.rank,
            "lora_alpha": self.config.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": any(is_transposed(model.get_submodule(f"{path}.base")) for path in self.paths),
            "inference_mode": True,
            "target_modules": self.paths,
            "modules_to_save": [name for name in heads if isinstance(getattr(model, name), nn.Module)] or None,
        }
        return config, {f"base_model.model.{name}": p.detach().contiguous() for name, p in tensors.items()}
