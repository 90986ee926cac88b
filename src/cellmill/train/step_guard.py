"""Skip steps whose loss or gradient norm is not finite, and scale float16 losses so that few are.

A number on the device decides if a step is applied. It is equal on all ranks to the last bit, and
fused AdamW reads it there (`found_inf`), so nothing waits for it. The loop sees it when it
reads the step's report, one step late, and only then collects the cells of the batch. After
`train.max_bad_steps` skipped in a row the run ends.

Loss scaling keeps small gradients above the smallest float16 number. The loss is multiplied before
the backward pass and gradients are divided after it, so norm and clipping see true gradients. The
scale halves after a skipped step and doubles after `GROWTH_STEPS` applied steps. Source:
Micikevicius et al. 2018 (mixed precision training), section 3.2.
"""

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cellmill.parallel.mesh import Mesh, gather_json, to_local
from cellmill.parallel.torch_private import AsyncCollectiveTensor, scale_all, update_loss_scale

INITIAL_SCALE = 2.0**16
GROWTH_STEPS = 2000
SHOWN = 4  # cells named in the error; the log has all of them


def step_if(applied: Tensor, optimizer: torch.optim.Optimizer, fused: bool = True) -> None:
    """Step if the bool scalar `applied` is true, otherwise leave everything bit for bit.

    The host waits unless `fused`.
    """
    parameters = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    if not parameters:
        return
    if fused:
        # torch would copy it without blocking, and a step on the CPU would read it too early
        found_inf = (~applied).to(torch.float32).to(parameters[0].device)
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    elif not applied.item():
        return
    optimizer.step()


class LossScale:
    """Dynamic loss scale on `device`, from `read` of a resumed run.

    Every rank makes the same calls; none communicates.
    """

    def __init__(
        self, device: torch.device, value: float | None = None, good_steps: int = 0
    ) -> None:
        if value is None:
            value = INITIAL_SCALE
        self.value = torch.tensor(value, dtype=torch.float32, device=device)
        self.good_steps = torch.tensor(good_steps, dtype=torch.int32, device=device)

    def unscale(self, model: nn.Module) -> None:
        inverse = self.value.reciprocal()
        shards: dict[torch.device, list[Tensor]] = {}
        for parameter in model.parameters():
            if parameter.grad is not None:
                # scaling shards, or the parts of a partial sum, scales the whole
                shard = to_local(parameter.grad)
                shard = shard.trigger_wait() if isinstance(shard, AsyncCollectiveTensor) else shard
                shards.setdefault(shard.device, []).append(shard)
        for device, group in shards.items():
            scale_all(group, inverse.to(device))

    def adapt(self, applied: Tensor) -> Tensor:
        """Update the scale after a step, and return a copy of the next scale.

        `applied` is a bool scalar, equal on all ranks.
        """
        update_loss_scale(self.value, self.good_steps, (~applied).to(self.value), GROWTH_STEPS)
        return self.value.clone()

    def read(self) -> tuple[float, int]:
        """Return the scale and the applied steps since it last changed. Waits for the device."""
        return float(self.value), int(self.good_steps)


def name_cells(
    mesh: Mesh, is_finite: bool, cells: list[int], names: Callable[[np.ndarray], Sequence[str]]
) -> str:
    """Return the words for the cells of a bad step, and print this rank's. Collective.

    Only ranks with a bad loss are listed, or all if there are none.
    """
    reports = gather_json([mesh.dp_rank, is_finite, cells], mesh.device)
    bad_ranks = {dp_rank for dp_rank, was_finite, _ in reports if not was_finite}
    listed = dict[int, list[int]]()
    seen = set[int]()
    for rank, (dp_rank, _, rank_cells) in enumerate(reports):
        # model-parallel peers read the same cells: the first of them is listed
        if dp_rank not in seen and (dp_rank in bad_ranks or not bad_ranks):
            listed[rank] = rank_cells
        seen.add(dp_rank)
    rank = dist.get_rank()
    if rank in listed:
        print(f"rank {rank} had the cells {', '.join(names(np.array(cells)))}", flush=True)
    parts = []
    for rank, rank_cells in listed.items():
        text = "no cells"
        if rank_cells:
            text = ", ".join(names(np.array(rank_cells[:SHOWN])))
        if len(rank_cells) > SHOWN:
            text += f" and {len(rank_cells) - SHOWN} more cells (see the log)"
        parts.append(f"rank {rank} had {text}")
    return "; ".join(parts)


class AsyncScalars:
    """Copy of device scalars to the host, queued when created.

    `read` does not wait for work that is queued later.
    """

    def __init__(self, scalars: Tensor) -> None:
        self._host = scalars
        self._copied = None
        if scalars.is_cuda:
            self._host = torch.empty(scalars.shape, dtype=scalars.dtype, pin_memory=True)
            self._host.copy_(scalars, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(scalars.device))

    def read(self) -> list[float]:
        """Return the scalars as a flat list; waits for the copy."""
        if self._copied is not None:
            self._copied.synchronize()
        scalars: list[float] = self._host.flatten().tolist()
        return scalars


def to_device(scalars: Sequence[float] | np.ndarray, device: torch.device) -> Tensor:
    """Copy to `device` as float64, without blocking the host."""
    tensor = torch.tensor(scalars, dtype=torch.float64)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
