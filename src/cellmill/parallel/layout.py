"""From a sharding strategy and a number of processes to the sizes of the mesh's axes. Torch-free arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from cellmill.config.run import Parallel
from cellmill.errors import ConfigError


@dataclass(frozen=True)
class Layout:
    """Sizes of the data-parallel axes; their product is the number of processes."""

    dp_replicate: int
    dp_shard: int


def layout(parallel: Parallel, world: int, local_world: int) -> Layout:
    """The layout of `world` processes, `local_world` of them on each node.

    Raises ConfigError when shard_size does not divide the processes, or is set where nothing reads it.
    """
    strategy = parallel.sharding_strategy
    if parallel.strategy == "ddp" or strategy == "NO_SHARD":
        sizes = Layout(world, 1)
    elif strategy == "HYBRID_SHARD":
        size = local_world if parallel.shard_size is None else parallel.shard_size
        if world % size:
            near = max(n for n in range(1, min(size, world) + 1) if world % n == 0)
            raise ConfigError(
                f"parallel.shard_size {size} does not divide {world} processes; {near} does, "
                "or change nodes and nproc_per_node in the profile"
            )
        sizes = Layout(world // size, size)
    else:
        sizes = Layout(1, world)
    if parallel.shard_size is not None and (parallel.strategy == "ddp" or strategy != "HYBRID_SHARD"):
        name = "strategy ddp" if parallel.strategy == "ddp" else f"sharding_strategy {strategy}"
        raise ConfigError(f"parallel.shard_size is read by HYBRID_SHARD alone, not by {name}; set it to null")
    return sizes
