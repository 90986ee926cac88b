"""Initial values of parameters and buffers, module by module, independent of layout and order.

A module defines its own in a method `initial_value(name) -> Fill | None`, or sets `initial_std` for its weight; linear
layers, embeddings and layer norms have a default. A parameter or buffer without a value is an error.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

STD = 0.02  # of weights, unless a module sets `initial_std` (Radford et al. 2019)

Fill = Callable[[torch.Tensor, torch.Generator], object]
"""Function that fills a full CPU tensor in place; its generator depends only on seed and name."""
AnyModule = TypeVar("AnyModule", bound=nn.Module)


def with_std(module: AnyModule, std: float) -> AnyModule:
    """Set the initial weight of `module` to Normal(0, std), and return it."""
    module.initial_std = std  # type: ignore[assignment]
    return module


def normal(std: float) -> Fill:
    return lambda tensor, generator: tensor.normal_(0.0, std, generator=generator)


def zeros(tensor: torch.Tensor, generator: torch.Generator) -> object:
    return tensor.zero_()


def ones(tensor: torch.Tensor, generator: torch.Generator) -> object:
    return tensor.fill_(1)


def initial_values(model: nn.Module) -> dict[str, Fill]:
    """Return the function that fills each parameter and buffer of the whole `model`, by name.

    Raises TypeError for the first one without an initial value.
    """
    fills = {}
    for path, module in model.named_modules():
        for name, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            full_name = f"{path}.{name}" if path else name
            if (fill := _fill_of(module, name)) is None:
                raise TypeError(
                    f"no initial value for {full_name} of {type(module).__name__}; define initial_value(name) on it"
                )
            fills[full_name] = fill
    return fills


def _fill_of(module: nn.Module, name: str) -> Fill | None:
    own = getattr(module, "initial_value", None)
    if own is not None and (fill := own(name)) is not None:
        return fill  # type: ignore[no-any-return]
    if isinstance(module, nn.LayerNorm):
        return ones if name == "weight" else zeros
    if isinstance(module, nn.Linear | nn.Embedding):
        return normal(getattr(module, "initial_std", STD)) if name == "weight" else zeros
    return None
