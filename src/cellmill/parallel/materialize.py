"""Values for a model built on the meta device, one tensor at a time, of each what this rank keeps (`own_part`).

Values depend only on names and positions, so every layout starts from bitwise the same model.
"""

import re
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from cellmill.parallel.torch_private import is_persistent


def materialize(
    model: nn.Module,
    device: torch.device,
    tensors: Iterable[tuple[str, torch.Tensor]],
    buffer_device: torch.device | None = None,
) -> None:
    """Give every parameter and buffer of `model` memory on `device` and its value. No communication.

    Parameters
    ----------
    tensors
        (plain name, this rank's part as a CPU tensor) of every parameter and buffer, in any order.
    buffer_device
        Device of the buffers, where it is not `device`: FSDP2 offloads parameters, never buffers.
    """
    model.to_empty(device=device)
    if buffer_device not in (None, device):
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(buffer_device))
    filled = fill(model, tensors)
    assert not (empty := {name for name, _ in named_tensors(model)} - filled), f"no value for {sorted(empty)}"


@torch.no_grad()
def fill(model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Copy own parts into parameters and buffers by plain name; returns the names. No communication."""
    targets, filled = dict(named_tensors(model)), set()
    for name, part in tensors:
        target = targets[name]
        own = target.to_local() if isinstance(target, DTensor) else target
        assert own.shape == part.shape, f"{name}: {tuple(part.shape)} for {tuple(own.shape)}"
        own.copy_(part)
        filled.add(name)
    return filled


def named_tensors(model: nn.Module, *, persistent: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, then buffers, by plain name; with `persistent`, only the buffers that a checkpoint keeps."""
    for name, parameter in model.named_parameters():
        yield plain_name(name), parameter
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not (persistent and not is_persistent(module, name)):
                yield plain_name(f"{path}.{name}".removeprefix(".")), buffer


def plain_name(name: str) -> str:
    """Return the name that a parameter or buffer has in the whole, plain model.

    Strips the prefix of a pipeline stage, the wrapper of activation checkpointing, and `.base.`, the attribute in
    which an adapter keeps the module that it wraps.
    """
    return re.sub(r"^parts\.\d+\.|_checkpoint_wrapped_module\.|(?<=\.)base\.", "", name)
