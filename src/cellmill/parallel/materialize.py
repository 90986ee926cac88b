"""Parameters from the meta device to memory: full values made one at a time and cut to what each rank keeps.

The values come from a generator of full tensors that depends on a parameter's name alone, so that every layout
starts from bitwise the same model and no rank holds more than one full parameter beside its shards.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor


def materialize(model: nn.Module, device: torch.device, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Gives every parameter of `model` memory on `device` and its value. No communication.

    Parameters
    ----------
    tensors
        (name, full CPU tensor) of every parameter, in any order; the same on every rank.
    """
    model.to_empty(device=device)
    parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, full in tensors:
            parameter = parameters.pop(name)
            if isinstance(parameter, DTensor):
                # src_data_rank=None: every rank has the full tensor, so none is sent
                local = distribute_tensor(
                    full.to(device), parameter.device_mesh, parameter.placements, src_data_rank=None
                )
                parameter.copy_(local)
            else:
                parameter.copy_(full)
    assert not parameters, f"no value was given for {sorted(parameters)}"


def plain_name(name: str) -> str:
    """A parameter's name in the whole model, without what activation checkpointing and stages put into it."""
    return re.sub(r"^parts\.\d+\.|_checkpoint_wrapped_module\.", "", name)
