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

STD = 0.02
"""Standard deviation of weights, unless a module sets `initial_std` (Radford et al. 2019)."""
PIECE = 1 << 20  # elements computed at once of a tensor of which a rank keeps a part
GROUP = 16  # torch draws normal values in groups of 16; a last group that is not full differs
Fill = Callable[[Tensor, torch.Generator], object]
"""Function that fills a full CPU tensor; its generator depends only on seed and name."""
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
    """Return `part` of a CPU tensor like `empty`, with the bits that it has if `fill` fills the whole.

    Normal values and constants are computed in pieces, so that the whole tensor never takes memory.
    """
    is_all = all(index == slice(None) for index in part)
    if is_all or not (isinstance(fill, _Normal) or fill in (zeros, ones)):
        full = torch.empty(empty.shape, dtype=empty.dtype)
        fill(full, generator)
        return full if is_all else full[part].clone()
    n_rows, *row_shape = empty.shape
    sizes = [len(torch.arange(n)[index]) for index, n in zip(part, empty.shape)]
    values = torch.empty(sizes, dtype=empty.dtype)
    # (rows,): row of `values` for each row of the tensor, -1 for rows outside the part
    part_row = torch.full((n_rows,), -1)
    part_row[part[0]] = torch.arange(len(values))
    # rows of a piece: about PIECE elements, rounded up to whole groups
    piece_rows = -(-PIECE // max(empty.shape[1:].numel(), 1) // GROUP) * GROUP
    # the last piece also has the rows that are left, so that its last group is the tensor's
    borders = [*range(0, max(n_rows - piece_rows, 0) + 1, piece_rows), n_rows]
    for start, end in pairwise(borders):
        piece = torch.empty((end - start, *row_shape), dtype=empty.dtype)
        fill(piece, generator)
        rows = part_row[start:end]
        is_in_part = rows >= 0
        values[rows[is_in_part]] = piece[is_in_part][(slice(None), *part[1:])]
    return values


def initial_values(model: nn.Module) -> dict[str, Fill]:
    """Return the function that fills each parameter and buffer, by name.

    Raise TypeError if there is none for one of them.
    """
    fills = {}
    for path, module in model.named_modules():
        parameters = module.named_parameters(recurse=False)
        for name, _ in [*parameters, *module.named_buffers(recurse=False)]:
            full_name = f"{path}.{name}" if path else name
            fill = None
            if hasattr(module, "initial_value"):
                fill = module.initial_value(name)
            fill = fill or default_fill(module, name)
            if fill is None:
                raise TypeError(
                    f"no initial value for {full_name} of {type(module).__name__}; define initial_value(name) on it"
                )
            fills[full_name] = fill
    return fills


def default_fill(module: nn.Module, name: str, std: float = STD) -> Fill | None:
    """Return the function for a parameter of a norm, linear layer or embedding, otherwise None."""
    kind = type(module).__name__
    if kind.endswith("Norm"):
        return {"weight": ones, "bias": zeros}.get(name)
    if isinstance(module, nn.Linear | nn.Embedding) or kind == "Conv1D":
        return normal(getattr(module, "initial_std", std)) if name == "weight" else zeros
    return None
