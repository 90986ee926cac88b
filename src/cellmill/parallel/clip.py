"""Gradient clipping by the global norm, equal in every layout."""

from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cellmill.parallel.mesh import mesh_of


def clip_grad_norm(model: nn.Module, max_norm: float | None, pipeline: DeviceMesh) -> torch.Tensor:
    """Scale gradients so that their 2-norm over all ranks is at most `max_norm`; None only computes the norm.

    Returns the norm before clipping, a scalar on the parameters' device. Collective: every rank, also one whose
    parameters are all frozen.

    Parameters
    ----------
    model
        What this rank holds: the model, or the `PipelineStages` of a pipeline.
    pipeline
        Mesh axis of the ranks that hold the other pipeline stages.
    """
    tied: frozenset[int] = getattr(model, "tied", frozenset())
    # one group for each mesh: torch's norm takes no list of tensors on different meshes
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            groups.setdefault(mesh_of(parameter), []).append(parameter)
    norms = []
    for group in groups.values():
        gradients = [_placed_as_parameter(parameter) for parameter in group if id(parameter) not in tied]
        norm = nn.utils.get_total_norm(gradients, foreach=True)
        # a DTensor's norm is a partial sum until it is reduced
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not norms:  # a pipeline stage without trained parameters
        norms = [torch.zeros((), device=next(model.parameters()).device)]
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if pipeline.size() > 1:
        squares = total.square()
        dist.all_reduce(squares, group=pipeline.get_group())
        total = squares.sqrt()
    if max_norm is not None:
        for group in groups.values():
            nn.utils.clip_grads_with_norm_(group, max_norm, total, foreach=True)
    return total


def _placed_as_parameter(parameter: nn.Parameter) -> torch.Tensor:
    """Return the gradient with the parameter's placements: of a norm over some of the tokens it is a partial sum."""
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(gradient, DTensor):
        placements = cast(DTensor, parameter).placements
        if gradient.placements != placements:
            gradient = parameter.grad = gradient.redistribute(placements=placements)
    return gradient
