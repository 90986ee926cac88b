"""The device mesh: four axes, `pp, dp_replicate, dp_shard, tp`, whatever the strategy; an unused axis has size 1.

Data-parallel coordinates are `(dp_replicate, dp_shard)`. Which cells a process reads follows from its coordinate,
not its global rank, since tp and pp peers share their cells.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cellmill.config.run import Parallel
from cellmill.parallel.layout import layout

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

    @property
    def fsdp(self) -> DeviceMesh:
        """The mesh FSDP2 is given: 2-D (replicate, shard) when there are replicas, else 1-D (shard)."""
        if self.devices["dp_replicate"].size() > 1:
            return self.devices["dp_replicate", "dp_shard"]
        return self.devices["dp_shard"]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, summed in place over the data-parallel processes. Collective: every rank."""
        if self.dp_world > 1:
            dist.all_reduce(tensor, group=self.dp_group)
        return tensor


def build_mesh(parallel: Parallel, local_world: int, device_type: str) -> Mesh:
    """The mesh of the initialised default process group. Collective: every rank.

    Raises ConfigError when the number of processes does not fit the sharding strategy.
    """
    world = dist.get_world_size()
    sizes = layout(parallel, world, local_world)
    devices = init_device_mesh(device_type, (1, sizes.dp_replicate, sizes.dp_shard, 1), mesh_dim_names=AXES)
    data = devices["dp_replicate", "dp_shard"]
    flat = data._flatten("dp")
    return Mesh(devices, flat.get_local_rank(), flat.size(), flat.get_group())
