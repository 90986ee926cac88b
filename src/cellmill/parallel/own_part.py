"""Elements of a full tensor that a rank keeps, from torch's own placements: no layout is computed here."""

import torch
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

Part = tuple[slice | list[int], ...]
"""Index of each dim, which together choose a block of a tensor: a slice, or positions that are not a range."""


def own_part(tensor: torch.Tensor) -> Part:
    """Return the part of a DTensor's full tensor that is this rank's; of a plain tensor all of it. No communication."""
    part = tuple(_own(tensor, dim) for dim in range(tensor.ndim))
    assert sum(isinstance(index, list) for index in part) <= 1, "two lists would choose elements, not a block"
    return part


def is_all(part: Part) -> bool:
    """True if `part` is a whole tensor, of any size."""
    return all(index == slice(None) for index in part)


def positions(index: slice | list[int], n: int) -> torch.Tensor:
    """Return the positions, int64, that `index` chooses of `n`."""
    return torch.arange(n)[index]


def as_index(chosen: list[int]) -> slice | list[int]:
    """Return these positions as a slice, if they are a range."""
    first = chosen[0] if chosen else 0
    return slice(first, first + len(chosen)) if chosen == list(range(first, first + len(chosen))) else chosen


def _own(tensor: torch.Tensor, dim: int) -> slice | list[int]:
    if not isinstance(tensor, DTensor):
        return slice(None)
    # a tensor may be cut along one dim over several axes of the mesh, and in an order of its own
    placements = [placed if getattr(placed, "dim", None) == dim else Replicate() for placed in tensor.placements]
    if all(placed == Replicate() for placed in placements):
        return slice(None)
    n = tensor.shape[dim]
    every = torch.arange(n, device=tensor.device_mesh.device_type).view(
        [n if d == dim else 1 for d in range(tensor.ndim)]
    )
    # src_data_rank=None: every rank has the full tensor, so nothing is sent
    part = distribute_tensor(every, tensor.device_mesh, placements, src_data_rank=None)
    own: list[int] = part.to_local().flatten().tolist()
    return slice(None) if len(own) == n else as_index(own)
