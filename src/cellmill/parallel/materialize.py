"""Values for a model built on the meta device, made one tensor at a time; each rank keeps only its
own part.

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
"""Index of each dim, which together choose a block of a tensor: a slice, or positions that are not
a range.
"""


def materialize(
    model: nn.Module,
    device: torch.device,
    tensors: Iterable[tuple[str, Tensor]],
    buffer_device: torch.device | None = None,
) -> None:
    """Give every parameter and buffer of `model` memory on `device` and its value. No
    communication.

    `tensors` are (plain name, this rank's part as a CPU tensor) of all, in any order.
    `buffer_device` is the buffers' if another: FSDP2 offloads parameters, never buffers.
    """
    to_empty(model, device)
    if buffer_device not in (None, device):
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(buffer_device))
    filled = fill(model, tensors)
    assert not (empty := {name for name, _ in named_tensors(model)} - filled), (
        f"no value for {sorted(empty)}"
    )


class WithoutCompiler(TorchFunctionMode):
    """Keep torch from importing its compiler for meta tensors: in `empty_like`, and in `nn.init`,
    which fills none.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is torch.empty_like and args[0].is_meta and not is_dtensor(args[0]):
            return torch.empty_strided(
                args[0].shape, args[0].stride(), dtype=args[0].dtype, **given
            )
        if getattr(func, "__module__", None) == "torch.nn.init":
            tensor: Tensor = args[0] if args else given["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **given)


def to_empty(model: AnyModule, device: torch.device | str) -> AnyModule:
    """Give every parameter and buffer of `model` memory on `device`, in place; returns the model."""
    with WithoutCompiler():
        return model.to_empty(device=device)


@torch.no_grad()
def fill(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Copy own parts into parameters and buffers by plain name; returns the names. No
    communication.
    """
    targets = dict(named_tensors(model))
    filled = set()
    for name, part in tensors:
        target = targets[name]
        own = target.to_local() if is_dtensor(target) else target
        assert own.shape == part.shape, f"{name}: {tuple(part.shape)} for {tuple(own.shape)}"
        own.copy_(part)
        filled.add(name)
    return filled


def named_tensors(model: nn.Module, *, persistent: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, then buffers, by plain name; with `persistent`, only the buffers that a
    checkpoint keeps.
    """
    for name, parameter in model.named_parameters():
        yield plain_name(name), parameter
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not (persistent and not is_persistent(module, name)):
                yield plain_name(f"{path}.{name}".removeprefix(".")), buffer


def plain_name(name: str) -> str:
    """Return the name in the whole, plain model: without stage, checkpoint wrapper, and an
    adapter's `.base.`.
    """
    return re.sub(r"^parts\.\d+\.|_checkpoint_wrapped_module\.|(?<=\.)base\.", "", name)


def own_part(tensor: Tensor) -> Part:
    """Return the part of a DTensor's full tensor that is this rank's; of a plain tensor all of it.
    No communication.
    """
    part = tuple(_own_positions(tensor, dim) for dim in range(tensor.ndim))
    assert sum(isinstance(index, list) for index in part) <= 1, (
        "two lists would choose elements, not a block"
    )
    return part


def as_index(chosen: list[int]) -> slice | list[int]:
    """Return these positions as a slice, if they are a range."""
    first = chosen[0] if chosen else 0
    return (
        slice(first, first + len(chosen))
        if chosen == list(range(first, first + len(chosen)))
        else chosen
    )


def _own_positions(tensor: Tensor, dim: int) -> slice | list[int]:
    if not is_dtensor(tensor):
        return slice(None)
    dt = torch.distributed.tensor
    whole = dt.Replicate()
    # a tensor may be cut along one dim over several axes of the mesh, and in an order of its own
    placements = [
        placed if getattr(placed, "dim", None) == dim else whole for placed in tensor.placements
    ]
    if all(placed == whole for placed in placements):
        return slice(None)
    n = tensor.shape[dim]
    shape = [n if d == dim else 1 for d in range(tensor.ndim)]
    every = torch.arange(n, device=tensor.device_mesh.device_type).view(shape)
    # src_data_rank=None: every rank has the full tensor, so nothing is sent
    part = dt.distribute_tensor(every, tensor.device_mesh, placements, src_data_rank=None)
    own: list[int] = part.to_local().flatten().tolist()
    return slice(None) if len(own) == n else as_index(own)
