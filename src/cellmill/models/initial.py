"""Initial values of parameters and buffers, module by module, independent of layout and order.

A module defines its own in a method `initial_value(name) -> Fill | None`, or sets `initial_std` for
its weight; linear layers, embeddings and norms have a default. A parameter or buffer without a
value is an error.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn

from cellmill.parallel.materialize import Part

STD = 0.02  # of weights, unless a module sets `initial_std` (Radford et al. 2019)

PIECE = 1 << 20  # elements that are made at once of a tensor of which a rank keeps a part
# torch draws normal values in groups of as many, and makes the last group of a tensor again
GROUP = 16

Fill = Callable[[Tensor, torch.Generator], object]
"""Function that fills a full CPU tensor in place; its generator depends only on seed and name."""
AnyModule = TypeVar("AnyModule", bound=nn.Module)


def with_std(module: AnyModule, std: float) -> AnyModule:
    """Set the initial weight of `module` to Normal(0, std), and return it."""
    module.initial_std = std  # type: ignore[assignment]
    return module


@dataclass(frozen=True)
class _Normal:
    std: float

    def __call__(self, tensor: Tensor, generator: torch.Generator) -> object:
        return tensor.normal_(0.0, self.std, generator=generator)


normal: Callable[[float], Fill] = _Normal


def zeros(tensor: Tensor, generator: torch.Generator) -> object:
    return tensor.zero_()


def ones(tensor: Tensor, generator: torch.Generator) -> object:
    return tensor.fill_(1)


def fill_part(fill: Fill, empty: Tensor, part: Part, generator: torch.Generator) -> Tensor:
    """Return `part` of a CPU tensor like `empty` as `fill` makes it, bit for bit; in pieces where
    that can be.
    """
    is_all = all(index == slice(None) for index in part)
    if is_all or not (isinstance(fill, _Normal) or fill in (zeros, ones)):
        full = torch.empty(empty.shape, dtype=empty.dtype)
        fill(full, generator)
        return full if is_all else full[part].clone()
    own = torch.empty(
        [len(torch.arange(n)[index]) for index, n in zip(part, empty.shape)], dtype=empty.dtype
    )
    place = torch.full((empty.shape[0],), -1)  # of each row of the tensor in `own`
    place[part[0]] = torch.arange(len(own))
    width = empty.shape[1:].numel()
    rows = -(-PIECE // max(width, 1) // GROUP) * GROUP
    borders = [*range(0, max(len(place) - rows, 0) + 1, rows), len(place)]
    for first, last in pairwise(borders):
        piece = torch.empty((last - first, *empty.shape[1:]), dtype=empty.dtype)
        fill(piece, generator)
        here = place[first:last]
        own[here[here >= 0]] = piece[here >= 0][(slice(None), *part[1:])]
    return own


def initial_values(model: nn.Module) -> dict[str, Fill]:
    """Return the function that fills each parameter and buffer, by name. Raises TypeError if one
    has none.
    """
    fills = {}
    for path, module in model.named_modules():
        for name, _ in [
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ]:
            full_name = f"{path}.{name}" if path else name
            own = getattr(module, "initial_value", lambda name: None)(name)
            fill = own or default_fill(module, name)
            if fill is None:
                raise TypeError(
                    f"no initial value for {full_name} of {type(module).__name__}; define initial_value(name) on it"
                )
            fills[full_name] = fill
    return fills


def default_fill(module: nn.Module, name: str, std: float = STD) -> Fill | None:
    """Return the function for a parameter of a norm, linear layer or embedding; None for another
    module.
    """
    kind = type(module).__name__
    if kind.endswith("Norm"):
        return {"weight": ones, "bias": zeros}.get(name)
    # transformers' linear layer
    if isinstance(module, nn.Linear | nn.Embedding) or kind == "Conv1D":
        return normal(getattr(module, "initial_std", std)) if name == "weight" else zeros
    return None
