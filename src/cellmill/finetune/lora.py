"""lora: low-rank adapters of the linear layers of the blocks train, and the heads (Hu et al. 2022).

A layer W x + c becomes W x + c + (alpha / rank) B A x, where A is drawn and B begins as zeros, so
the first step starts from the model as it was; the merged weight is W + (alpha / rank) B A. There
is no dropout of x: rows between layers have no keys, so it would not be the same in every layout.

An adapter wraps a linear layer in a module that keeps it as `base`, never in a subclass of
nn.Linear: tensor parallel and weight decay then treat the base as before. `plain_name` strips
`.base.`, so the base keeps its name in initial values, checkpoints and exports.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

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
        self.base = base
        self.scale = scale
        weight: Any = base.weight
        n_out, n_in = weight.shape[::-1] if is_transposed(base) else weight.shape
        self.a = with_std(nn.Linear(n_in, rank, bias=False), n_in**-0.5)
        self.b = with_std(nn.Linear(rank, n_out, bias=False), 0.0)

    def product(self) -> Tensor:
        """Return what merging adds to the weight of `base`."""
        product: Tensor = self.scale * self.b.weight @ self.a.weight
        # GPT-2's Conv1D has a weight of (in, out)
        return product.T if is_transposed(self.base) else product

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.scale * self.b(self.a(x))
        return out


class Lora(Method):
    config: LoraConfig
    paths: list[str]  # adapted layers, in the whole model

    def transform(self, model: Model) -> None:
        super().transform(model)
        blocks = model.get_submodule(model.plan.blocks)
        layers = self._select_layers(blocks)
        scale = self.config.alpha / self.config.rank
        self.paths = []
        for block, _ in blocks.named_children():
            self.paths += [f"{model.plan.blocks}.{block}.{layer}" for layer in layers]
        for path in self.paths:
            base = model.get_submodule(path)
            model.set_submodule(path, AdaptedLinear(base, self.config.rank, scale))
        styles = dict(model.plan.tensor)
        for layer in layers:
            path = f"{model.plan.blocks}.*.{layer}"
            style = styles.pop(path, None)
            if style is not None:
                styles |= zip((f"{path}.base", f"{path}.a", f"{path}.b"), STYLES[style])
        model.plan = replace(model.plan, tensor=styles)

    def _select_layers(self, blocks: nn.Module) -> list[str]:
        """Return the paths, in each block, of the layers to adapt. Raise ConfigError if unknown."""
        first_block = next(iter(blocks.children()), nn.Module())
        paths = [path for path, module in first_block.named_modules() if is_linear(module)]
        if not paths:
            raise ConfigError(
                "finetune.method lora: the model's blocks have no linear layers to adapt; set another"
            )
        targets = self.config.targets
        if targets is None:
            return paths
        names = dict.fromkeys(path.split(".")[-1] for path in paths)
        for target in targets:
            if target not in names and target not in paths:
                raise ConfigError(
                    f"finetune.targets: no linear layer {target!r}; {did_you_mean(target, names)}"
                )
        return [path for path in paths if path in targets or path.split(".")[-1] in targets]

    def trains(self, name: str) -> bool:
        return self.depth.is_head(name) or self._is_adapter(name)

    def group(self, name: str) -> dict[str, float]:
        if not self._is_adapter(name):
            return {}
        return {"lr_scale": self.config.trunk_lr_frac, "weight_decay": 0.0}

    def _is_adapter(self, name: str) -> bool:
        path, _, part = name.removesuffix(".weight").rpartition(".")
        return part in ("a", "b") and path in self.paths

    @torch.no_grad()
    def merge(self, model: Model) -> None:
        for path in self.paths:
            adapted: Any = model.get_submodule(path)
            adapted.base.weight += adapted.product()
            model.set_submodule(path, adapted.base)

    def adapter(self, model: Model) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the files' contents, as package peft from version 0.10 on reads them.

        The tensors include the trained heads.
        """
        tensors = {}
        fan_in_fan_out = False
        for path in self.paths:
            adapted: Any = model.get_submodule(path)
            tensors[f"{path}.lora_A.weight"] = adapted.a.weight
            tensors[f"{path}.lora_B.weight"] = adapted.b.weight
            fan_in_fan_out |= is_transposed(adapted.base)
        for name, parameter in model.named_parameters():
            if self.depth.is_head(name):
                tensors[name] = parameter
        heads = sorted(self.depth.heads)
        head_modules = [name for name in heads if isinstance(getattr(model, name), nn.Module)]
        config = {
            "peft_type": "LORA",
            "task_type": None,
            "r": self.config.rank,
            "lora_alpha": self.config.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": fan_in_fan_out,
            "inference_mode": True,
            "target_modules": self.paths,
            "modules_to_save": head_modules or None,
        }
        return config, {
            f"base_model.model.{name}": tensor.detach().contiguous()
            for name, tensor in tensors.items()
        }
