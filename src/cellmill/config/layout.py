"""From a configuration and a number of processes to the sizes of the mesh's axes. Torch-free arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from cellmill.config.run import Parallel, nearest
from cellmill.errors import ConfigError


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh's axes; their product is the number of processes."""

    dp_replicate: int
    dp_shard: int
    tp: int = 1

    @property
    def dp(self) -> int:
        """Processes that read different cells, but for those that share them."""
        return self.dp_replicate * self.dp_shard


def layout(parallel: Parallel, world: int, local_world: int) -> Layout:
    """The layout of `world` processes, `local_world` of them on each node.

    Raises ConfigError when tp or shard_size does not divide the processes, or shard_size is set where nothing reads it.
    """
    strategy, tp = parallel.sharding_strategy, parallel.tp
    if world % tp:
        raise ConfigError(
            f"parallel.tp {tp} does not divide {world} processes; {nearest(tp, _divisors(world))} does, "
            "or change nodes and nproc_per_node in the profile"
        )
    data = world // tp
    if parallel.strategy == "ddp" or strategy == "NO_SHARD":
        sizes = Layout(data, 1, tp)
    elif strategy == "HYBRID_SHARD":
        size = _of_a_node(tp, local_world) if parallel.shard_size is None else parallel.shard_size
        if data % size:
            groups = f"{world} processes" if tp == 1 else f"the {data} groups of tp {tp} in {world} processes"
            raise ConfigError(
                f"parallel.shard_size {size} does not divide {groups}; {nearest(size, _divisors(data))} does, "
                "or change nodes and nproc_per_node in the profile"
            )
        sizes = Layout(data // size, size, tp)
    else:
        sizes = Layout(1, data, tp)
    if parallel.shard_size is not None and (parallel.strategy == "ddp" or strategy != "HYBRID_SHARD"):
        name = "strategy ddp" if parallel.strategy == "ddp" else f"sharding_strategy {strategy}"
        raise ConfigError(f"parallel.shard_size is read by HYBRID_SHARD alone, not by {name}; set it to null")
    return sizes


def _of_a_node(tp: int, local_world: int) -> int:
    """Groups of `tp` in a node; one where a group is some whole nodes."""
    if local_world % tp and tp % local_world:
        raise ConfigError(
            f"parallel.tp {tp} cuts nodes of {local_world} processes; {nearest(tp, _divisors(local_world))} fits, "
            "or set parallel.shard_size"
        )
    return max(1, local_world // tp)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
