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
    sizes = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(sizes, torch.tensor([len(text)], device=device), group=group)
    longest = int(sizes.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(text)] = text
    texts = torch.zeros(len(sizes) * longest, dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(texts, padded, group=group)
    rows = texts.view(len(sizes), longest).cpu().numpy()
    return [json.loads(bytes(row[:size])) for row, size in zip(rows, sizes.tolist(), strict=True)]
