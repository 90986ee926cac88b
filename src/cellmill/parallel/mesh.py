"""The device mesh: four axes, `pp, dp_replicate, dp_shard, tp`, whatever the strategy; an unused axis has size 1.

Data-parallel coordinates are `(dp_replicate, dp_shard)`. Which cells a process reads follows from its coordinate,
not its global rank, since tp and pp peers share their cells.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from cellmill.config.layout import layout
from cellmill.config.run import Parallel

AXES = ("pp", "dp_replicate", "dp_shard", "tp")


@dataclass(frozen=True)
class Mesh:
    """Where this process stands in the layout."""

    devices: DeviceMesh
    dp_rank: int
    """Data-parallel coordinate of this process, 0 to dp_world - 1."""
    dp_world: int
    dp_group: dist.ProcessGroup
    """All processes that read different cells of the same step."""
    model_parallel_size: int
    """Processes that read the same cells: tensor-parallel ones and those of a pipeline."""

    @property
    def device(self) -> torch.device:
        """Where this process computes, wherever its parameters are."""
        kind = self.devices.device_type
        return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)

    @property
    def pp(self) -> DeviceMesh:
        """The processes of this one's pipeline, in the order of its stages."""
        return self.devices["pp"]

    @property
    def tensors_cut(self) -> bool:
        """Whether parameters are cut by tensor parallel, which DistributedDataParallel does not take."""
        return self.devices["tp"].size() > 1

    @property
    def fsdp(self) -> DeviceMesh:
        """The mesh FSDP2 is given: 2-D (replicate, shard) when there are replicas, else 1-D (shard)."""
        if self.devices["dp_replicate"].size() > 1:
            return self.devices["dp_replicate", "dp_shard"]
        return self.devices["dp_shard"]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, summed in place over all processes, what several have alike once. Collective: every rank.

        Over all, not over those that read different cells: each process must get the same number to the last bit, and
        learn of a signal that only one of them got, or they would part ways.
        """
        if self.dp_world * self.model_parallel_size > 1:
            dist.all_reduce(tensor)
        if self.model_parallel_size > 1:
            tensor.div_(self.model_parallel_size) if tensor.is_floating_point() else tensor.floor_divide_(
                self.model_parallel_size
            )
        return tensor


def build_mesh(parallel: Parallel, local_world: int, device_type: str) -> Mesh:
    """The mesh of the initialised default process group. Collective: every rank.

    Raises ConfigError when the number of processes does not fit the strategy or tp.
    """
    world = dist.get_world_size()
    sizes = layout(parallel, world, local_world)
    devices = init_device_mesh(
        device_type, (sizes.pp, sizes.dp_replicate, sizes.dp_shard, sizes.tp), mesh_dim_names=AXES
    )
    if sizes.tp > 1:
        devices["dp_shard", "tp"]._flatten("shard_tp")  # DTensor then sums a norm over both at once
    data = devices["dp_replicate", "dp_shard"]
    flat = data._flatten("dp")
    return Mesh(devices, flat.get_local_rank(), flat.size(), flat.get_group(), sizes.tp * sizes.pp)


def set_timeouts(timeout: timedelta) -> None:
    """Gives every process group of this process `timeout`: those of a mesh have torch's, not that of the first."""
    for group in list(distributed_c10d._world.pg_map):
        if isinstance(group, dist.ProcessGroup):
            distributed_c10d._set_pg_timeout(timeout, group)


def mesh_of(tensor: torch.Tensor) -> DeviceMesh | None:
    """The mesh a tensor is spread over; None for one that each process has whole."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None
