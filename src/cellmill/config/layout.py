"""Sizes of the mesh axes for a configuration and a number of processes. Torch-free arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from cellmill.config.parallel import Parallel
from cellmill.errors import ConfigError


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh axes; their product is the number of processes."""

    dp_replicate: int
    dp_shard: int
    tp: int = 1
    pp: int = 1

    @property
    def dp(self) -> int:
        """Data-parallel size: groups of processes that read different cells."""
        return self.dp_replicate * self.dp_shard

    @property
    def shared(self) -> str:
        """Axes whose processes share the same cells, as text to append: ` x tp 2`, ` x pp 4`, or empty."""
        return "".join(f" x {name} {size}" for name, size in (("tp", self.tp), ("pp", self.pp)) if size > 1)

    @property
    def dp_words(self) -> str:
        """The data-parallel groups as text: `8 processes`, `4 groups of tp 2`."""
        return f"{self.dp} groups of{self.shared[2:]}" if self.shared else f"{self.dp} processes"


def layout(parallel: Parallel, world: int, local_world: int) -> Layout:
    """Layout of `world` processes, `local_world` of them on each node.

    Raises ConfigError if pp, tp or shard_size does not divide the processes, or if shard_size or cpu_offload does not
    go with the strategy.
    """
    strategy, tp, pp = parallel.sharding_strategy, parallel.tp, parallel.pp
    _check_divides("pp", pp, world, f"{world} processes")
    stage = world // pp
    _check_divides("tp", tp, stage, f"{world} processes" if pp == 1 else f"the {stage} processes of each of pp {pp}")
    data = stage // tp
    if parallel.strategy == "ddp" or strategy == "NO_SHARD":
        sizes = Layout(data, 1, tp, pp)
    elif strategy == "HYBRID_SHARD":
        size = min(_groups_of_a_node(tp, local_world), data) if parallel.shard_size is None else parallel.shard_size
        _check_divides("shard_size", size, data, Layout(data, 1, tp, pp).dp_words)
        sizes = Layout(data // size, size, tp, pp)
    else:
        sizes = Layout(1, data, tp, pp)
    if parallel.shard_size is not None and (parallel.strategy == "ddp" or strategy != "HYBRID_SHARD"):
        name = "strategy ddp" if parallel.strategy == "ddp" else strategy
        raise ConfigError(f"parallel.shard_size requires sharding_strategy HYBRID_SHARD, got {name}; set it to null")
    if parallel.cpu_offload == "full" and sizes.dp == 1:
        raise ConfigError(
            "parallel.cpu_offload full requires two data-parallel processes, got one: "
            f"{world} processes with pp {pp} x tp {tp}; set cpu_offload to optimizer, or change nodes and "
            "nproc_per_node in the profile"
        )
    return sizes


def min_microbatches(parallel: Parallel) -> int:
    """Fewest micro-batches of a step that fill the pipeline schedule: a multiple of `pp`."""
    if parallel.pp == 1:
        return 1
    number = 2 * parallel.stages if parallel.microbatches is None else max(parallel.microbatches, parallel.stages)
    return -(-number // parallel.pp) * parallel.pp


def nearest(wanted: int, possible: list[int]) -> int:
    """The number of `possible` that is nearest to `wanted`; the smaller one of a tie."""
    return min(possible, key=lambda n: (abs(n - wanted), n))


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def _check_divides(name: str, size: int, number: int, what: str) -> None:
    if number % size:
        raise ConfigError(
            f"parallel.{name} {size} does not divide {what}; use {nearest(size, divisors(number))}, or change nodes "
            "and nproc_per_node in the profile"
        )


def _groups_of_a_node(tp: int, local_world: int) -> int:
    """Tensor-parallel groups in a node; 1 where a group spans whole nodes."""
    if local_world % tp and tp % local_world:
        raise ConfigError(
            f"parallel.tp {tp} does not divide the {local_world} processes of a node; "
            f"use {nearest(tp, divisors(local_world))}, or set parallel.shard_size"
        )
    return max(1, local_world // tp)
