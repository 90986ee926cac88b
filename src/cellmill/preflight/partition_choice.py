"""Choice of a new profile's partitions: one for the training, one for the stages without a GPU."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from cellmill.errors import UserError
from cellmill.planner.devices import DEVICES, known_device
from cellmill.preflight.site_checks import gpus_text
from cellmill.preflight.slurm_facts import SlurmFacts, up
from cellmill.preflight.slurm_site import Node, Partition

DAY_MIN = 1440
_SLICE = re.compile(r"\d+g\.\d+gb")  # a part of a GPU (MIG); processes on several cannot form one training


@dataclass(frozen=True)
class Request:
    """The user's wishes; empty or None leaves the choice to `choose_training`."""

    partition: str = ""
    nodes: str = ""
    gpus: int | None = None
    """Per node; 0 for processes on CPU cores."""
    account: str = ""
    qos: str = ""

    @property
    def most_nodes(self) -> int:
        return int(self.nodes.rpartition("-")[2] or 1)

    def __str__(self) -> str:
        partition = f"--partition {self.partition} " if self.partition else ""
        gpus = "" if self.gpus is None else f" --gpus {self.gpus}"
        return f"{partition}--nodes {self.nodes or 1}{gpus}"


@dataclass(frozen=True)
class Offer:
    """Nodes of a partition that can run the training, and the GPUs it gets on each."""

    partition: Partition
    nodes: list[Node]
    gpus: int = 0
    kind: str = ""
    """Type of the GPUs as SLURM names it; "" for one without a name."""

    @property
    def sliced(self) -> bool:
        return bool(_SLICE.search(self.kind))


def choose_training(facts: SlurmFacts, request: Request) -> tuple[Offer, str]:
    """The best offer and the reason. Raises UserError if there is no such partition, or not as much of it."""
    if request.partition:
        among = [_named(facts, request.partition)]
    else:
        among = facts.usable()
    offers = [offer for partition in among for offer in _offers(facts, partition, request)]
    has_gpus = any(node.gpus for partition in among for node in up(partition))
    offers = [offer for offer in offers if offer.gpus or request.gpus == 0 or not has_gpus]
    if not offers:
        there = "; ".join(sorted(f"{partition.name}: {_contents(facts, partition)}" for partition in among))
        raise UserError(f"{request}: expected at most what is up, which is {there or 'nothing'}")
    offers.sort(key=lambda offer: ([-value for value in _merits(offer).values()], offer.partition.name, offer.kind))
    best = offers[0]
    if request.partition:
        return best, "--partition"
    others = [offer for offer in offers if offer.partition.name != best.partition.name]
    if not others:
        return best, f"the only one {'with GPUs' if best.gpus else 'that is up'}"
    merits, next_best = _merits(best), _merits(others[0])
    reason = next((merit for merit in merits if merits[merit] != next_best[merit]), "the first by name")
    names = ", ".join(dict.fromkeys(offer.partition.name for offer in others))
    return best, f"{reason} of those {'with GPUs' if best.gpus else 'that are up'}; also {names}"


def choose_for_stages(facts: SlurmFacts, training: Partition) -> tuple[Partition, str]:
    """The partition of stages that need no GPU, and the reason."""
    usable = facts.usable()
    without = [partition for partition in usable if not any(node.gpus for node in up(partition))]
    mixed = [partition for partition in usable if not all(node.gpus for node in up(partition))]
    pool, reason = (without, "without GPUs") if without else (mixed, "has nodes without GPUs")
    if not pool:  # the default is where the site wants jobs that ask for nothing
        default = next((partition for partition in usable if partition.default), None)
        where = f"{'as train' if default is None else 'the default'}: all nodes that are up have GPUs"
        return default or training, where
    best = min(pool, key=lambda p: (not p.default, -_limit(p), -len(up(p)), p.name))
    return best, f"the default, {reason}" if best.default else reason


def _named(facts: SlurmFacts, name: str) -> Partition:
    partition = facts.partitions.get(name)
    if partition is None:
        raise UserError(f"--partition {name}: there is none; expected one of {', '.join(sorted(facts.partitions))}")
    if partition.state != "up":
        raise UserError(f"--partition {name}: it is {partition.state}; expected one that is up")
    return partition


def _offers(facts: SlurmFacts, partition: Partition, request: Request) -> Iterator[Offer]:
    """At most one offer for each type of GPU: as many on each node as enough nodes have."""
    nodes, number = up(partition), request.most_nodes
    if number > (facts.rules_of(partition).max_nodes or number):
        return
    kinds = sorted({kind for node in nodes for kind in node.gpus})
    if (not request.gpus and not kinds) or request.gpus == 0:
        if len(nodes) >= number:
            yield Offer(partition, nodes)
        return
    for kind in kinds:
        counts = sorted((node.gpus.get(kind, 0) for node in nodes), reverse=True)
        most = counts[number - 1] if len(counts) >= number else 0
        gpus = request.gpus or (min(1, most) if _SLICE.search(kind) else most)
        if 0 < gpus <= most:
            yield Offer(partition, [node for node in nodes if node.gpus.get(kind, 0) >= gpus], gpus, kind)


def _merits(offer: Offer) -> dict[str, int]:
    """Reasons to prefer an offer, the first difference decides."""
    return {
        "whole GPUs": int(not offer.sliced),
        "most GPUs per node": offer.gpus,
        "without GPUs": int(not any(node.gpus for node in offer.nodes)),
        "the default": int(offer.partition.default),
        "fastest GPUs": int(_speed(offer.kind)),
        "longest time limit": _limit(offer.partition),
        "most nodes": len(offer.nodes),
    }


def _speed(kind: str) -> float:
    """FLOP/s of a type of GPU; 0 for one that the planner does not know."""
    return DEVICES[known_device(kind) or "cpu"].bf16_flops or 0


def _limit(partition: Partition) -> int:
    """Time limit; more than a day is no advantage, as a longer training takes several jobs."""
    return min(partition.limit_min or DAY_MIN, DAY_MIN)


def _contents(facts: SlurmFacts, partition: Partition) -> str:
    """Nodes of a partition that are up, by their GPUs."""
    kinds = Counter(gpus_text(node.gpus) or "no GPU" for node in up(partition))
    listed = ", ".join(f"{number} {'node' if number == 1 else 'nodes'} with {kind}" for kind, number in kinds.items())
    most = facts.rules_of(partition).max_nodes
    return f"{listed or 'no node that is up'}{f', at most {most} in a job' if most else ''}"
