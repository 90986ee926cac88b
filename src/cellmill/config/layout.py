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
    pp: int = 1

    @property
    def dp(self) -> int:
        """Processes that read different cells, but for those that share them."""
        return self.dp_replicate * self.dp_shard

    @property
    def shared(self) -> str:
        """How processes share the same cells, as words to append: ` x tp 2`, ` x pp 4`; empty where they do not."""
        return "".join(f" x {name} {size}" for name, size in (("tp", self.tp), ("pp", self.pp)) if size > 1)

    @property
    def data_parallel_words(self) -> str:
        """What shares the cells, in words."""
        return f"{self.dp} groups of{self.shared[2:]}" if self.shared else f"{self.dp} processes"


def layout(parallel: Parallel, world: int, local_world: int) -> Layout:
    """The layout of `world` processes, `local_world` of them on each node.

    Raises ConfigError when pp, tp or shard_size does not divide the processes, or shard_size is set where nothing
    reads it.
    """
    strategy, tp, pp = parallel.sharding_strategy, parallel.tp, parallel.pp
    _check_divides("pp", pp, world, f"{world} processes")
    stage = world // pp
    _check_divides("tp", tp, stage, f"{world} processes" if pp == 1 else f"the {stage} processes of each of pp {pp}")
    data = stage // tp
    if parallel.strategy == "ddp" or strategy == "NO_SHARD":
        sizes = Layout(data, 1, tp, pp)
    elif strategy == "HYBRID_SHARD":
        size = min(_of_a_node(tp, local_world), data) if parallel.shard_size is None else parallel.shard_size
        groups = Layout(data, 1, tp, pp)
        _check_divides(
            "shard_size", size, data, f"{data} " + (f"groups of{groups.shared[2:]}" if tp * pp > 1 else "processes")
        )
        sizes = Layout(data // size, size, tp, pp)
    else:
        sizes = Layout(1, data, tp, pp)
    if parallel.shard_size is not None and (parallel.strategy == "ddp" or strategy != "HYBRID_SHARD"):
        name = "strategy ddp" if parallel.strategy == "ddp" else f"sharding_strategy {strategy}"
        raise ConfigError(f"parallel.shard_size is read by HYBRID_SHARD alone, not by {name}; set it to null")
    if parallel.cpu_offload == "full" and sizes.dp == 1:
        raise ConfigError(
            f"parallel.cpu_offload full is FSDP2's, which needs two data-parallel processes; {world} with pp {pp} x tp "
            f"{tp} are one: set it to optimizer, or change nodes and nproc_per_node in the profile"
        )
    return sizes


def check_lanes(lanes: int, batch: int, sizes: Layout) -> None:
    """Raises ConfigError when the processes cannot share stream.lanes evenly, with the nearest numbers that work."""
    world = sizes.dp
    if lanes % world == 0:
        return
    processes = min((n for n in range(1, lanes + 1) if lanes % n == 0), key=lambda n: abs(n - world))
    dividing = [n for n in range(world, batch + 1, world) if batch % n == 0]
    if dividing:
        other = f"stream.lanes {min(dividing, key=lambda n: abs(n - lanes))}"
    else:
        other = f"stream.lanes {world} with train.global_batch {max(1, round(batch / world)) * world}"
    raise ConfigError(
        f"stream.lanes {lanes} is not a multiple of {sizes.data_parallel_words}: use {processes} of them "
        f"(the profile), or {other}"
    )


def min_microbatches(parallel: Parallel) -> int:
    """A step has at least so many, and a multiple of `pp`: what the schedule can be filled with."""
    if parallel.pp == 1:
        return 1
    wanted = 2 * parallel.stages if parallel.microbatches is None else max(parallel.microbatches, parallel.stages)
    return -(-wanted // parallel.pp) * parallel.pp


def _check_divides(name: str, size: int, number: int, what: str) -> None:
    if number % size:
        raise ConfigError(
            f"parallel.{name} {size} does not divide {what}; {nearest(size, _divisors(number))} does, "
            "or change nodes and nproc_per_node in the profile"
        )


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
