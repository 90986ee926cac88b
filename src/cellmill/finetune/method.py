"""The contract of a fine-tuning method. `Method` itself is the method `full`: everything trains, nothing changes.

An adapter wraps a linear layer in a module that keeps it as `base`, never in a subclass of nn.Linear: tensor parallel
and weight decay then treat the base as before. `plain_name` strips `.base.`, so the base keeps its name in initial
values, checkpoints and exports. Wrapped modules give values to their own parameters as any module does
(`models.initial`), and their paths in `model.plan.tensor` must be rewritten:

    style of the wrapped layer    its base     first adapter layer     second adapter layer
    columns                       columns      norm                    columns
    rows                          rows         rows                    norm
"""

from collections.abc import Iterable
from typing import Any

from cellmill.config.finetune import MethodConfig
from cellmill.errors import ConfigError
from cellmill.models.family import Model


class Method:
    """Base of every fine-tuning method.

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

    def merge(self, model: Model) -> None:
        """Fold what `transform` added into a whole CPU model with values, leaving exactly the plain parameters."""


def load_method(config: MethodConfig) -> Method:
    """Return the method that these options choose."""
    method: Method = config.load()(config)
    return method


def check_trains(method: Method, names: Iterable[str]) -> None:
    """Raise ConfigError if none of the parameters with these plain names trains."""
    if not any(map(method.trains, names)):
        raise ConfigError(f"finetune.method {method.config.method} trains no parameter of this model; set another")
