"""The contract of a fine-tuning method, and the methods that add nothing to the model.

`Method` itself changes nothing, and trains everything at one rate. In `full` every parameter
trains, the trunk at a rate that may fall with depth and its blocks unfrozen step by step if wanted;
in `partial` the last blocks, the norm after them and the heads; in `head_only` the objective's
heads, on vectors of an unchanged trunk. Rates that fall from block to block, and gradual unfreezing
(there by epochs), follow Howard & Ruder 2018 (ULMFiT).

A method may wrap modules (`finetune.lora`). Wrapped modules give values to their own parameters as
any module does (`models.initial`), and their paths in `model.plan.tensor` must be rewritten.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from cellmill.config.parts.methods import FullConfig, MethodConfig, PartialConfig
from cellmill.errors import ConfigError
from cellmill.models.family import Model
from cellmill.parallel.materialize import plain_name


class Method:
    """Base of every fine-tuning method, with its `MethodConfig`.

    `transform` is called first, with a whole model.
    """

    depth: "Depth"

    def __init__(self, config: Any) -> None:
        self.config = config

    def transform(self, model: Model) -> None:
        """Change the whole model, on the meta device, before it is laid out.

        It may replace modules and rewrite `model.plan`.
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
        """Return the optimizer step, from 0, in which a trained parameter begins to train.

        Until then its gradient is dropped before the norm: it stays as it is, bit for bit, in every
        layout.
        """
        return 0

    def merge(self, model: Model) -> None:
        """Fold what `transform` added into the plain parameters of a whole CPU model with values."""

    def adapter(self, model: Model) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Return what an export keeps next to the merged model, before `merge`; None for nothing.

        These are adapter_config.json and the CPU tensors of adapter_model.safetensors, as the
        package peft reads them.
        """
        return None


def load_method(config: MethodConfig) -> Method:
    method: Method = config.load()(config)
    return method


def make_is_trained(method: Method, model: Model) -> Callable[[str], bool]:
    """Make the test of a plain name: True if both the method and the model train the parameter."""
    frozen = model.frozen
    return lambda name: name not in frozen and method.trains(name)


def check_trains(method: Method, names: Iterable[str]) -> None:
    """Raise ConfigError if no parameter with these plain names trains, or none from step 0 on."""
    trained = [name for name in names if method.trains(name)]
    if not trained:
        raise ConfigError(
            f"finetune.method {method.config.method} trains no parameter of this model; set another"
        )
    first_step = min(map(method.first_step, trained))
    if first_step > 0:
        raise ConfigError(
            f"finetune.method {method.config.method} trains no parameter of this model in its first {first_step} "
            "steps: the objective has no heads; let the trunk begin with step 0"
        )


@dataclass(frozen=True)
class Depth:
    """Depth of parameters in the trunk, by name, and the names of the heads."""

    heads: frozenset[str]  # modules and parameters of the model that the objective added
    after_blocks: frozenset[str]
    """Paths of modules and parameters of the trunk after the blocks, such as the last norm."""
    blocks: str
    n_blocks: int

    @classmethod
    def of(cls, model: Model) -> Self:
        path = model.plan.blocks
        n_blocks = len(list(model.get_submodule(path).children()))
        return cls(frozenset(model.heads or ()), model.after_blocks(), path, n_blocks)

    def is_head(self, name: str) -> bool:
        return name.split(".")[0] in self.heads

    def level(self, name: str) -> int:
        """Return i + 1 in block i, the last block's level after the blocks, and 0 before them."""
        if name.startswith(f"{self.blocks}."):
            return 1 + int(name.removeprefix(f"{self.blocks}.").split(".")[0])
        if any(name == path or name.startswith(f"{path}.") for path in self.after_blocks):
            return self.n_blocks
        return 0

    def label(self, name: str) -> str:
        """Return the part of the model that a parameter is in, as logs name it."""
        if self.is_head(name):
            return "heads"
        level = self.level(name)
        return f"block_{level - 1}" if level else "embeddings"


def group_rates(method: Method, model: Model) -> dict[str, tuple[float, int]]:
    """Return factor of the scheduled rate and first step, by part of the model; empty if alike.

    Parts are heads and trunk, or heads, embeddings and each `block_N` if rates of the trunk differ.
    """
    depth = Depth.of(model)
    is_trained = make_is_trained(method, model)
    rates: dict[str, tuple[float, int]] = {}
    for parameter_name, _ in model.named_parameters():
        name = plain_name(parameter_name)
        if is_trained(name):
            rate = (method.group(name).get("lr_scale", 1.0), method.first_step(name))
            rates.setdefault(depth.label(name), rate)
    if set(rates.values()) <= {(1.0, 0)}:
        return {}
    trunk = {rate for label, rate in rates.items() if label != "heads"}
    if len(trunk) != 1:
        return rates
    heads = {"heads": rates["heads"]} if "heads" in rates else {}
    return heads | {"trunk": trunk.pop()}


class Full(Method):
    config: FullConfig

    def group(self, name: str) -> dict[str, float]:
        if self.depth.is_head(name):
            return {}
        decay = self.config.layer_decay ** self._blocks_after(name)
        return {"lr_scale": self.config.trunk_lr_frac * decay}

    def first_step(self, name: str) -> int:
        if self.depth.is_head(name):
            return 0
        return self.config.head_steps + self.config.block_steps * self._blocks_after(name)

    def _blocks_after(self, name: str) -> int:
        return self.depth.n_blocks - self.depth.level(name)


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
