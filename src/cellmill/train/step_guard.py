"""Steps whose loss or gradient norm is not finite: never applied, counted, and after so many in a row the end.

Whether a step is applied is decided on the device, by a number that all processes have alike to the last bit, and
fused AdamW reads it there (`found_inf`): nobody waits for it. The loop learns of it when it reads the step's report,
one step late, and only then are the cells of the batch asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

SHOWN = 4  # cells named in the line; all of them are in the log


def step_if(applied: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """One step of `optimizer`, which leaves parameters and state as they are, bit for bit, where `applied` is false.

    Parameters
    ----------
    applied
        Bool scalar. The host waits for it where it lies on a device and the parameters do not.
    optimizer
        Fused: no other looks.
    """
    found = (~applied).to(torch.float32)
    first = next(parameter for group in optimizer.param_groups for parameter in group["params"])
    # torch would move it without waiting, and parameters on the CPU would read what is not there yet
    optimizer.found_inf = found.to(first.device)  # type: ignore[attr-defined]
    optimizer.step()


@dataclass(frozen=True)
class Suspects:
    """The cells one process took in a step, and whether its own loss was finite."""

    dp_rank: int
    finite: bool
    cells: np.ndarray
    """(cells,) int64 ids."""


def name_cells(mine: Suspects, names: Callable[[np.ndarray], Sequence[str]]) -> str:
    """The cells that may be to blame for a step, by rank: of ranks whose own loss was not finite, of all when each was.

    Prints what this process took in full. Collective: every rank.

    Parameters
    ----------
    names
        The names of cells by their ids.
    """
    found: list[Suspects | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    known = [(rank, suspects) for rank, suspects in enumerate(found) if suspects is not None]
    bad = {suspects.dp_rank for _, suspects in known if not suspects.finite} or {s.dp_rank for _, s in known}
    first = {suspects.dp_rank: rank for rank, suspects in reversed(known)}  # those that share its cells say no more
    own = dist.get_rank()
    if first[mine.dp_rank] == own and mine.dp_rank in bad:
        print(f"rank {own} had the cells {', '.join(names(mine.cells))}", flush=True)
    return "; ".join(
        f"rank {rank} had {_some(suspects.cells, names)}"
        for rank, suspects in known
        if suspects.dp_rank in bad and first[suspects.dp_rank] == rank
    )


def _some(cells: np.ndarray, names: Callable[[np.ndarray], Sequence[str]]) -> str:
    more = f" and {len(cells) - SHOWN} more cells, which are in the log" if len(cells) > SHOWN else ""
    return ", ".join(names(cells[:SHOWN])) + more if len(cells) else "no cells"
