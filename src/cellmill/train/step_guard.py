"""Steps whose loss or gradient norm is not finite are skipped, and float16 losses are scaled so
that few are.

A number on the device decides if a step is applied. It is equal on all ranks to the last bit, and
fused AdamW reads it there (`found_inf`), so nothing waits for it. The loop learns of it when it
reads the step's report, one step late, and only then collects the cells of the batch. After
`train.max_bad_steps` skipped in a row the run ends.

Loss scaling keeps small gradients above the smallest float16 number. The loss is multiplied before
the backward pass and gradients are divided after it, so norm and clipping see true gradients. The
scale halves after a skipped step and doubles after `GROWTH_STEPS` applied ones. Source:
Micikevicius et al. 2018 (mixed precision training), section 3.2.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cellmill.parallel.mesh import Mesh, gather_json, local_of
from cellmill.parallel.torch_private import AsyncCollectiveTensor, scale_all, update_loss_scale

INITIAL_SCALE = 2.0**16
GROWTH_STEPS = 2000
SHOWN = 4  # cells named in the error; the log has all of them


def step_if(applied: Tensor, optimizer: torch.optim.Optimizer, fused: bool = True) -> None:
    """Step where the bool scalar `applied` is true, else leave all bit for bit; the host waits
    unless `fused`.
    """
    first = next(
        (parameter for group in optimizer.param_groups for parameter in group["params"]), None
    )
    if first is None or not (fused or applied.item()):
        return
    if fused:
        # torch would copy it without blocking, and a step on the CPU would read it before it is
        # there
        optimizer.found_inf = (~applied).to(torch.float32).to(first.device)  # type: ignore[attr-defined]
    optimizer.step()


class LossScale:
    """Dynamic loss scale on `device`, from `read` of a resumed run. Every rank calls alike; none
    communicates.
    """

    def __init__(
        self, device: torch.device, value: float | None = None, good_steps: int = 0
    ) -> None:
        self.value = torch.tensor(
            INITIAL_SCALE if value is None else value, dtype=torch.float32, device=device
        )
        self.good_steps = torch.tensor(good_steps, dtype=torch.int32, device=device)

    def unscale(self, model: nn.Module) -> None:
        inverse = self.value.reciprocal()
        shards: dict[torch.device, list[Tensor]] = {}
        for parameter in model.parameters():
            if parameter.grad is not None:
                # scaling shards, or the parts of a partial sum, scales the whole
                shard = local_of(parameter.grad)
                shard = shard.trigger_wait() if isinstance(shard, AsyncCollectiveTensor) else shard
                shards.setdefault(shard.device, []).append(shard)
        for device, group in shards.items():
            scale_all(group, inverse.to(device))

    def adapt(self, applied: Tensor) -> Tensor:
        """Update the scale after a step (`applied`: bool scalar, equal on all ranks); return a copy
        of the next one.
        """
        update_loss_scale(self.value, self.good_steps, (~applied).to(self.value), GROWTH_STEPS)
        return self.value.clone()

    def read(self) -> tuple[float, int]:
        """Return the scale and the applied steps since it last changed. Waits for the device."""
        return float(self.value), int(self.good_steps)


def name_cells(
    mesh: Mesh, finite: bool, cells: list[int], names: Callable[[np.ndarray], Sequence[str]]
) -> str:
    """Return cells of a bad step, of ranks with a bad loss or of all; print this rank's.
    Collective: every rank.
    """

    def described(rank: int, cells: list[int]) -> str:
        more = f" and {len(cells) - SHOWN} more cells (see the log)" if len(cells) > SHOWN else ""
        return f"rank {rank} had {', '.join(names(np.array(cells[:SHOWN]))) + more if cells else 'no cells'}"

    every = gather_json([mesh.dp_rank, finite, cells], mesh.device)
    bad = {dp_rank for dp_rank, was_finite, _ in every if not was_finite}
    named = dict[int, list[int]]()
    seen = set[int]()
    for rank, (dp_rank, _, read) in enumerate(every):
        # model-parallel peers read the same cells: the first of them speaks
        if dp_rank not in seen and (dp_rank in bad or not bad):
            named[rank] = read
        seen.add(dp_rank)
    rank = dist.get_rank()
    if rank in named:
        print(f"rank {rank} had the cells {', '.join(names(np.array(cells)))}", flush=True)
    return "; ".join(described(rank, read) for rank, read in named.items())


class AsyncScalars:
    """Copy of device scalars to the host, queued when created: `read` does not wait for work that
    is queued later.
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
