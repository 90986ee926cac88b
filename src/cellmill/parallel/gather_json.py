"""Small values of all ranks, exchanged as JSON: unpickling what another process sent could run its code."""

import json
from typing import Any

import torch
import torch.distributed as dist


def gather_json(value: Any, device: torch.device, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return `value` of every rank, in the order of ranks. Collective: every rank of `group`.

    Parameters
    ----------
    value
        Anything that JSON can hold.
    device
        A device that the group's backend communicates on.
    group
        None for all ranks.
    """
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    lengths = [int(length) for length in _gathered(torch.tensor([len(text)], device=device), group)]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: len(text)] = text
    texts = _gathered(padded, group)
    return [json.loads(bytes(text[:length].cpu().numpy())) for text, length in zip(texts, lengths, strict=True)]


def _gathered(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Return the tensor of each rank, all of one shape."""
    # not into one tensor: torch renames that function in 2.13, and lists are the same in all versions
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, tensor, group=group)
    return every
