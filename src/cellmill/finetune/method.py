"""The contract of a fine-tuning method, and the methods `full`, `partial` and `head_only`.

`Method` itself changes nothing, and trains everything at one rate. In `full` every parameter trains, the trunk at a
rate that may fall with depth and its blocks unfrozen step by step if wanted; in `partial` the last blocks, the norm
behind them and the heads; in `head_only` the objective's heads, on vectors of an unchanged trunk. Rates that fall from
block to block, and gradual unfreezing (there by epochs), follow Howard & Ruder 2018 (ULMFiT).

An adapter wraps a linear layer in a module that keeps it as `base`, never in a subclass of nn.Linear: tensor parallel
and weight decay then treat the base as before. `plain_name` strips `.base.`, so the base keeps its name in initial
values, checkpoints and exports. Wrapped modules give values to their own parameters as any module does
(`models.initial`), and their paths in `model.plan.tensor` must be rewritten (`finetune.lora.STYLES`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch

from cellmill.config.parts.methods import FullConfig, MethodConfig, PartialConfig
from cellmill.errors import ConfigError
from cellmill.models.family import Model
from cellmill.parallel.materialize import plain_name


class Method:
    """Base of every fine-tuning method, with its `MethodConfig`. `transform` is called first, with a whole model."""

    depth: "Depth"

    def __init__(self, config: Any) -> None:
        self.config = config

    def transform(self, model: Model) -> None:
        """Change the whole model, on the meta device, before it is laid out: replace modules, rewrite `model.plan`."""
        self.depth = Depth.of(model)

    def trains(self, name: str) -> bool:
        """Return whether the parameter with this plain name trains."""
        return True

    def group(self, name: str) -> dict[str, float]:
        """Return options of the optimizer group of a trained parameter, by plain name.

        `lr_scale` multiplies the scheduled learning rate; `weight_decay` replaces that of the configuration.
        """
        return {}

    def first_step(self, name: str) -> int:
        """Return the optimizer step, from 0, in which a trained parameter begins to train, by plain name.

        Until then its gradient is dropped before the norm: it stays as it is, bit for bit, in every layout.
        """
        return 0

    def merge(self, model: Model) -> None:
        """Fold what `transform` added into a whole CPU model with values, leaving exactly the plain parameters."""

    def adapter(self, model: Model) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
        """Return what an export keeps beside the merged model, before `merge`; None for nothing.

        These are adapter_config.json and the CPU tensors of adapter_model.safetensors, as the package peft reads them.
        """
        return None


def load_method(config: MethodConfig) -> Method:
    method: Method = config.load()(config)
    return method


def trained_names(method: Method, model: Model) -> Callable[[str], bool]:
    """Return whether the parameter of the model with a plain name trains: by the method, and by the model itself."""
    frozen = model.frozen
    return lambda name: name not in frozen and method.trains(name)


def check_trains(method: Method, names: Iterable[str]) -> None:
    """Raise ConfigError if none of the parameters with these plain names trains, or none from the first step on."""
    trained = [name for name in names if method.trains(name)]
    if not trained:
        raise ConfigError(f"finetune.method {method.config.method} trains no parameter of this model; set another")
    if (first := min(map(method.first_step, trained))) > 0:
        raise ConfigError(
            f"finetune.method {method.config.method} trains no parameter of this model in its first {first} steps: the "
            "objective has no heads; let the trunk begin with step 0"
        )


@dataclass(frozen=True)
class Depth:
    """Names that tell the trunk from the heads, and the number of blocks."""

    heads: frozenset[str]  # modules and parameters of the model that the objective added
    behind: frozenset[str]  # paths of modules and parameters of the trunk behind the blocks, such as the last norm
    blocks: str
    n_blocks: int

    @classmethod
    def of(cls, model: Model) -> Self:
        plan, heads = model.plan, frozenset(model.heads or ())
        return cls(heads, model.behind_blocks(), plan.blocks, len(list(model.get_submodule(plan.blocks).children())))

    def is_head(self, name: str) -> bool:
        return name.split(".")[0] in self.heads

    def level(self, name: str) -> int:
        """Return 0 before the blocks, as for embeddings, i + 1 in block i, and the last block's behind the blocks."""
        if name.startswith(f"{self.blocks}."):
            return 1 + int(name.removeprefix(f"{self.blocks}.").split(".")[0])
        is_behind = any(name == path or name.startswith(f"{path}.") for path in self.behind)
        return self.n_blocks if is_behind else 0


def group_rates(method: Method, model: Model) -> dict[str, tuple[float, int]]:
    """Return factor of the scheduled rate and first step of heads, trunk, embeddings, `block_N`; empty if alike."""
    depth, trains = Depth.of(model), trained_names(method, model)
    rates: dict[str, tuple[float, int]] = {}
    for name in (plain_name(name) for name, _ in model.named_parameters()):
        if trains(name):
            level = depth.level(name)
            label = "heads" if depth.is_head(name) else f"block_{level - 1}" if level else "embeddings"
            rates.setdefault(label, (method.group(name).get("lr_scale", 1.0), method.first_step(name)))
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
        return 0 if self.depth.is_head(name) else self.config.head_steps + self.config.block_steps * below


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
