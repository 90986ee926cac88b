"""Values for a model built on the meta device, one tensor at a time; a rank keeps only its part.

Values depend only on names and positions, so every layout starts from bitwise the same model. The
elements that a rank keeps come from torch's own placements; no layout is computed here.
"""

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cellmill.parallel.torch_private import is_dtensor, is_persistent

if TYPE_CHECKING:  # takes half a second to import; where there is a DTensor, it has been
    import torch.distributed.tensor


AnyModule = TypeVar("AnyModule", bound=nn.Module)
Part = tuple[slice | list[int], ...]
"""Index of each dim, a slice or a list of positions, which together choose a block of a tensor."""


def materialize(
    model: nn.Module,
    device: torch.device,
    tensors: Iterable[tuple[str, Tensor]],
    buffer_device: torch.device | None = None,
) -> None:
    """Give every parameter and buffer of `model` memory on `device` and its value.

    `tensors` are plain name and this rank's part as a CPU tensor, in any order. Buffers go to
    `buffer_device` if given: FSDP2 offloads parameters, never buffers. No communication.
    """
    to_empty(model, device)
    if buffer_device not in (None, device):
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(buffer_device))
    missing = {name for name, _ in named_tensors(model)} - fill(model, tensors)
    assert not missing, f"no value for {sorted(missing)}"


class WithoutCompiler(TorchFunctionMode):
    """Keep torch from importing its compiler for meta tensors.

    It would in `empty_like`, and in `nn.init`, which fills no meta tensor.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty_like and args[0].is_meta and not is_dtensor(args[0]):
            like = args[0]
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, **kwargs)
        if getattr(func, "__module__", None) == "torch.nn.init":
            tensor: Tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


def to_empty(model: AnyModule, device: torch.device | str) -> AnyModule:
    """Give every parameter and buffer of `model` memory on `device`, in place, and return the model."""
    with WithoutCompiler():
        return model.to_empty(device=device)


@torch.no_grad()
def fill(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Copy this rank's parts into parameters and buffers by plain name, and return the names.

    No communication.
    """
    targets = dict(named_tensors(model))
    names = set()
    for name, part in tensors:
        target = targets[name]
        local = target.to_local() if is_dtensor(target) else target
        assert local.shape == part.shape, f"{name}: {tuple(part.shape)} for {tuple(local.shape)}"
        local.copy_(part)
        names.add(name)
    return names


def named_tensors(model: nn.Module, *, persistent: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, then buffers, by plain name.

    With `persistent`, yield only buffers that a checkpoint keeps.
    """
    for name, parameter in model.named_parameters():
        yield plain_name(name), parameter
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not persistent or is_persistent(module, name):
                yield plain_name(f"{path}.{name}".removeprefix(".")), buffer


def plain_name(name: str) -> str:
    """Return the name in the plain model: without stage, checkpoint wrapper and adapter's `.base.`."""
    return re.sub(r"^parts\.\d+\.|_checkpoint_wrapped_module\.|(?<=\.)base\.", "", name)


def own_part(tensor: Tensor) -> Part:
    """Return this rank's part of a DTensor, and all of a plain tensor. No communication."""
    part = tuple(_find_positions(tensor, dim) for dim in range(tensor.ndim))
    assert sum(isinstance(index, list) for index in part) <= 1, (
        "two lists would choose elements, not a block"
    )
    return part


def as_index(positions: list[int]) -> slice | list[int]:
    """Return positions as a slice, if they are a range."""
    first = positions[0] if positions else 0
    end = first + len(positions)
    return slice(first, end) if positions == list(range(first, end)) else positions


def _find_positions(tensor: Tensor, dim: int) -> slice | list[int]:
    """Return the positions along `dim` that this rank has."""
    if not is_dtensor(tensor):
        return slice(None)
    dt = torch.distributed.tensor
    # a tensor may be cut along one dim over several axes of the mesh, and in an order of its own
    placements = []
    for placement in tensor.placements:
        is_cut = getattr(placement, "dim", None) == dim
        placements.append(placement if is_cut else dt.Replicate())
    if all(placement.is_replicate() for placement in placements):
        return slice(None)
    n = tensor.shape[dim]
    shape = [1] * tensor.ndim
    shape[dim] = n
    numbers = torch.arange(n, device=tensor.device_mesh.device_type).view(shape)
    # src_data_rank=None: every rank has the full tensor, so nothing is sent
    part = dt.distribute_tensor(numbers, tensor.device_mesh, placements, src_data_rank=None)
    positions: list[int] = part.to_local().flatten().tolist()
    return slice(None) if len(positions) == n else as_index(positions)
