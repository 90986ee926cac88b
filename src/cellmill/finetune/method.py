"""The contract of a fine-tuning method, and the methods `full`, `partial`, `head_only` and `lora`.

`Method` itself changes nothing, and trains everything at one rate. In `full` every parameter
trains, the trunk at a rate that may fall with depth and its blocks unfrozen step by step if wanted;
in `partial` the last blocks, the norm behind them and the heads; in `head_only` the objective's
heads, on vectors of an unchanged trunk. Rates that fall from block to block, and gradual unfreezing
(there by epochs), follow Howard & Ruder 2018 (ULMFiT).

In `lora` (Hu et al. 2022) low-rank adapters of the linear layers of the blocks train, and the
heads. A layer W x + c becomes W x + c + (alpha / rank) B A x, where A is drawn and B begins as
zeros, so the first step starts from the model as it was; the merged weight is W + (alpha / rank) B
A. There is no dropout of x: rows between layers have no keys, so it would not be the same in every
layout.

An adapter wraps a linear layer in a module that keeps it as `base`, never in a subclass of
nn.Linear: tensor parallel and weight decay then treat the base as before. `plain_name` strips
`.base.`, so the base keeps its name in initial values, checkpoints and exports. Wrapped modules
give values to their own parameters as any module does (`models.initial`), and their paths in
`model.plan.tensor` must be rewritten (`STYLES`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn

from cellmill.config.parallel import Style
from cellmill.config.parts.methods import FullConfig, LoraConfig, MethodConfig, PartialConfig
from cellmill.errors import ConfigError, did_you_mean
from cellmill.models.blocks import is_linear, is_transposed
from cellmill.models.family import Model
from cellmill.models.initial import with_std
from cellmill.parallel.materialize import plain_name

STYLES: dict[Style, tuple[Style, Style, Style]] = {
    "columns": ("columns", "norm", "columns"),
    "rows": ("rows", "rows", "norm"),
    "norm": ("norm", "norm", "norm"),
}
"""Tensor-parallel styles of base, A and B of a layer with a style."""


class Method:
    """Base of every fine-tuning method, with its `MethodConfig`. `transform` is called first, with
    a whole model.
    """

    depth: "Depth"

    def __init__(self, config: Any) -> None:
        self.config = config

    def transform(self, model: Model) -> None:
        """Change the whole model, on the meta device, before it is laid out: replace modules,
        rewrite `model.plan`.
        """
        self.depth = Depth.of(model)

    def trains(self, name: str) -> bool:
        """Return whether the parameter with this plain name trains."""
        return True

    def group(self, name: str) -> dict[str, float]:
        """Return options of the optimizer group of a trained parameter, by plain name.

        `lr_scale` multiplies the scheduled learning rate; `weight_decay` replaces that of the
        configuration.
        """
        return {}

    def first_step(self, name: str) -> int:
        """Return the optimizer step, from 0, in which a trained parameter begins to train, by plain
        name.

        Until then its gradient is dropped before the norm: it stays as it is, bit for bit, in every
        layout.
        """
        return 0

    def merge(self, model: Model) -> None:
        """Fold what `transform` added into a whole CPU model with values, leaving exactly the plain
        parameters.
        """

    def adapter(self, model: Model) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
        """Return what an export keeps beside the merged model, before `merge`; None for nothing.

        These are adapter_config.json and the CPU tensors of adapter_model.safetensors, as the
        package peft reads them.
        """
        return None


def load_method(config: MethodConfig) -> Method:
    method: Method = config.load()(config)
    return method


def trained_names(method: Method, model: Model) -> Callable[[str], bool]:
    """Return whether the parameter of the model with a plain name trains: by the method, and by the
    model itself.
    """
    frozen = model.frozen
    return lambda name: name not in frozen and method.trains(name)


def check_trains(method: Method, names: Iterable[str]) -> None:
    """Raise ConfigError if none of the parameters with these plain names trains, or none from the
    first step on.
    """
    trained = [name for name in names if method.trains(name)]
    if not trained:
        raise ConfigError(
            f"finetune.method {method.config.method} trains no parameter of this model; set another"
        )
    first = min(map(method.first_step, trained))
    if first > 0:
        raise ConfigError(
            f"finetune.method {method.config.method} trains no parameter of this model in its first {first} steps: the "
            "objective has no heads; let the trunk begin with step 0"
        )


@dataclass(frozen=True)
class Depth:
    """Names that tell the trunk from the heads, and the number of blocks."""

    heads: frozenset[str]  # modules and parameters of the model that the objective added
    # paths of modules and parameters of the trunk behind the blocks, such as the last norm
    behind: frozenset[str]
    blocks: str
    n_blocks: int

    @classmethod
    def of(cls, model: Model) -> Self:
        plan = model.plan
        heads = frozenset(model.heads or ())
        return cls(
            heads,
            model.behind_blocks(),
            plan.blocks,
            len(list(model.get_submodule(plan.blocks).children())),
        )

    def is_head(self, name: str) -> bool:
        return name.split(".")[0] in self.heads

    def level(self, name: str) -> int:
        """Return 0 before the blocks, as for embeddings, i + 1 in block i, and the last block's
        behind the blocks.
        """
        if name.startswith(f"{self.blocks}."):
            return 1 + int(name.removeprefix(f"{self.blocks}.").split(".")[0])
        is_behind = any(name == path or name.startswith(f"{path}.") for path in self.behind)
        return self.n_blocks if is_behind else 0


def group_rates(method: Method, model: Model) -> dict[str, tuple[float, int]]:
    """Return factor of the scheduled rate and first step of heads, trunk, embeddings, `block_N`;
    empty if alike.
    """
    depth = Depth.of(model)
    trains = trained_names(method, model)
    rates: dict[str, tuple[float, int]] = {}
    for name in (plain_name(name) for name, _ in model.named_parameters()):
        if trains(name):
            level = depth.level(name)
            label = (
                "heads" if depth.is_head(name) else f"block_{level - 1}" if level else "embeddings"
            )
            rates.setdefault(
                label, (method.group(name).get("lr_scale", 1.0), method.first_step(name))
            )
    if set(rates.values()) <= {(1.0, 0)}:
        return {}
    heads = {label: rate for label, rate in rates.items() if label == "heads"}
    trunk = {rate for label, rate in rates.items() if label != "heads"}
    return heads | {"trunk": trunk.pop()} if len(trunk) == 1 else rates


class Full(Method):
    config: FullConfig

    def group(self, name: str) -> dict[str, float]:
        below = self.depth.n_blocks - self.depth.level(name)
        rate = self.config.trunk_lr_frac * self.config.layer_decay**below
        return {} if self.depth.is_head(name) else {"lr_scale": rate}

    def first_step(self, name: str) -> int:
        below = self.depth.n_blocks - self.depth.level(name)
        return (
            0
            if self.depth.is_head(name)
            else self.config.head_steps + self.config.block_steps * below
        )


class Partial(Method):
    config: PartialConfig

    def trains(self, name: str) -> bool:
        frozen_blocks = max(0, self.depth.n_blocks - self.config.last_blocks)
        return self.depth.is_head(name) or self.depth.level(name) > frozen_blocks

    def group(self, name: str) -> dict[str, float]:
        return {} if self.depth.is_head(name) else {"lr_scale": self.config.trunk_lr_frac}


class HeadOnly(Method):
    def trains(self, name: str) -> bool:
        return self.depth.is_head(name)


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

    @property
    def product(self) -> torch.Tensor:
        """What merging adds to the weight of `base`."""
        product: torch.Tensor = self.scale * self.b.weight @ self.a.weight
        # GPT-2's Conv1D has a weight of (in, out)
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
        known = (
            []
            if first is None
            else [path for path, module in first.named_modules() if is_linear(module)]
        )
        if not known:
            raise ConfigError(
                "finetune.method lora: the model's blocks have no linear layers to adapt; set another"
            )
        names = dict.fromkeys(path.split(".")[-1] for path in known)
        targets = self.config.targets
        for target in targets or ():
            if target not in names and target not in known:
                raise ConfigError(
                    f"finetune.targets: no linear layer {target!r}; {did_you_mean(target, names)}"
                )
        layers = [
            path
            for path in known
            if targets is None or path in targets or path.split(".")[-1] in targets
        ]
        self.paths = [
            f"{model.plan.blocks}.{i}.{layer}"
            for i, _ in blocks.named_children()
            for layer in layers
        ]
        for path in self.paths:
            base: Any = model.get_submodule(path)
            model.set_submodule(
                path, AdaptedLinear(base, self.config.rank, self.config.alpha / self.config.rank)
            )
        styles = dict(model.plan.tensor)
        for path in (f"{model.plan.blocks}.*.{layer}" for layer in layers):
            style = styles.pop(path, None)
            if style is not None:
                styles |= zip((f"{path}.base", f"{path}.a", f"{path}.b"), STYLES[style])
        model.plan = replace(model.plan, tensor=styles)

    def trains(self, name: str) -> bool:
        return self.depth.is_head(name) or self._is_adapter(name)

    def group(self, name: str) -> dict[str, float]:
        return (
            {"lr_scale": self.config.trunk_lr_frac, "weight_decay": 0.0}
            if self._is_adapter(name)
            else {}
        )

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
        """Return the files' contents, as package peft from version 0.10 on reads them, with the
        trained heads.
        """
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
            "fan_in_fan_out": any(
                is_transposed(model.get_submodule(f"{path}.base")) for path in self.paths
            ),
            "inference_mode": True,
            "target_modules": self.paths,
            "modules_to_save": [
                name for name in heads if isinstance(getattr(model, name), nn.Module)
            ]
            or None,
        }
        return config, {
            f"base_model.model.{name}": p.detach().contiguous() for name, p in tensors.items()
        }
