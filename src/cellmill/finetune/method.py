"""The contract of a fine-tuning method. `Method` itself changes nothing, and trains everything at one rate.

An adapter wraps a linear layer in a module that keeps it as `base`, never in a subclass of nn.Linear: tensor parallel
and weight decay then treat the base as before. `plain_name` strips `.base.`, so the base keeps its name in initial
values, checkpoints and exports. Wrapped modules give values to their own parameters as any module does
(`models.initial`), and their paths in `model.plan.tensor` must be rewritten:

    style of the wrapped layer    its base     first adapter layer     second adapter layer
    columns                       columns      norm                    columns
    rows                          rows         rows                    norm
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from cellmill.config.finetune import MethodConfig
from cellmill.errors import ConfigError
from cellmill.models.family import Model


class Method:
    """Base of every fine-tuning method. `transform` is called, with a whole model, before any other method.

    Parameters
    ----------
    config
        Its options, a `cellmill.config.finetune.MethodConfig`.
    """

    def __init__(self, config: Any) -> None:
        self.config = config

    def transform(self, model: Model) -> None:
        """Change the whole model, on the meta device, before it is laid out: replace modules, rewrite `model.plan`."""

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
    """Return the method that these options choose."""
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
