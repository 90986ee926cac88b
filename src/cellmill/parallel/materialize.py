"""Values for a model built on the meta device: full tensors made one at a time and sharded to what each rank keeps.

The iterator of full tensors depends only on names, so every layout starts from bitwise the same model and no rank
holds more than one full tensor beside its shards.
"""

import re
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor


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
        (plain name, full CPU tensor) of every parameter and buffer, in any order, equal on every rank.
    buffer_device
        Device of the buffers, where it is not `device`: FSDP2 offloads parameters, never buffers.
    """
    model.to_empty(device=device)
    if buffer_device not in (None, device):
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(buffer_device)
    filled = fill(model, tensors)
    assert not (empty := {name for name, _ in named_tensors(model)} - filled), f"no value for {sorted(empty)}"


@torch.no_grad()
def fill(model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Copy full CPU tensors into parameters and buffers by plain name; returns the names. No communication."""
    targets, filled = dict(named_tensors(model)), set()
    for name, full in tensors:
        target = targets[name]
        if isinstance(target, DTensor):
            # src_data_rank=None: every rank has the full tensor, so nothing is sent
            full = distribute_tensor(full.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
        target.copy_(full)
        filled.add(name)
    return filled


def named_tensors(model: nn.Module, *, persistent: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, then buffers, by plain name; with `persistent`, only the buffers that a checkpoint keeps."""
    for name, parameter in model.named_parameters():
        yield plain_name(name), parameter
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not (persistent and name in module._non_persistent_buffers_set):
                yield plain_name(f"{path}.{name}".removeprefix(".")), buffer


def plain_name(name: str) -> str:
    """Return the name that a parameter or buffer has in the whole, plain model.

    Strips the prefix of a pipeline stage, the wrapper of activation checkpointing, and `.base.`, the attribute in
    which an adapter keeps the module that it wraps.
    """
    return re.sub(r"^parts\.\d+\.|_checkpoint_wrapped_module\.|(?<=\.)base\.", "", name)
