"""Choice of two partitions for a new profile: for the training, and for stages without a GPU."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from cellmill.errors import UserError
from cellmill.planner.devices import DEVICES, SLICE, recognise_device
from cellmill.preflight.job_request import describe_gpus
from cellmill.preflight.site import Node, Partition, SlurmFacts

DAY_MIN = 1440
T = TypeVar("T")


class Reasoned(NamedTuple, Generic[T]):
    """A value and its source, in words."""

    value: T
    why: str = ""


@dataclass(frozen=True)
class Request:
    """The user's wishes; empty or None leaves the choice to `choose_training`."""

    partition: str = ""
    nodes: str = ""
    gpus: int | None = None  # per node; 0 for processes on CPU cores
    account: str = ""
    qos: str = ""
    cluster: str = ""


@dataclass(frozen=True)
class Offer:
    """Nodes of a partition that can run the training, and the GPUs it gets on each."""

    partition: Partition
    nodes: list[Node]
    gpus: int = 0
    kind: str = ""  # type of the GPUs as SLURM names it; "" for GPUs without a type

    @property
    def is_sliced(self) -> bool:
        return bool(SLICE.search(self.kind))

    @property
    def merits(self) -> dict[str, int]:
        """Reasons to prefer the offer, the most important first."""
        return {
            "whole GPUs": int(not self.is_sliced),
            "most GPUs per node": self.gpus,
            "without GPUs": int(not any(node.gpus for node in self.nodes)),
            "the default": int(self.partition.default),
            # 0 for an unknown type
            "fastest GPUs": int(
                DEVICES[recognise_device(self.kind) or "cpu"].half_flops_per_s or 0
            ),
            "longest time limit": find_useful_limit(self.partition),
            "most nodes": len(self.nodes),
        }

    @property
    def sort_key(self) -> tuple[list[int], str, str]:
        """Key that sorts the best offer first."""
        return [-value for value in self.merits.values()], self.partition.name, self.kind


def choose_training(facts: SlurmFacts, request: Request) -> Reasoned[Offer]:
    """Choose the best offer.

    Raise UserError if there is no such partition, or it has less than requested.
    """
    partitions = _list_candidates(facts, request.partition)
    offers = [offer for partition in partitions for offer in _list_offers(partition, request)]
    if request.gpus != 0 and any(partition.has_gpus for partition in partitions):
        offers = [offer for offer in offers if offer.gpus]
    if not offers:
        wish = f"--partition {request.partition} " if request.partition else ""
        wish += f"--nodes {request.nodes or 1}"
        if request.gpus is not None:
            wish += f" --gpus {request.gpus}"
        contents = [
            f"{partition.name}: {_describe_contents(partition)}" for partition in partitions
        ]
        available = "; ".join(sorted(contents)) or "nothing"
        raise UserError(f"{wish}: expected at most what is up, which is {available}")
    best, *others = sorted(offers, key=lambda offer: offer.sort_key)
    if request.partition:
        return Reasoned(best, "--partition")
    others = [offer for offer in others if offer.partition.name != best.partition.name]
    return Reasoned(best, _explain_choice(best, others))


def _list_candidates(facts: SlurmFacts, name: str) -> list[Partition]:
    """List the usable partitions, or only the one called `name`.

    Raise UserError if there is no such partition or it is not up.
    """
    if not name:
        return facts.list_usable()
    if name not in facts.partitions:
        known = ", ".join(sorted(facts.partitions))
        raise UserError(f"--partition {name}: there is none; expected one of {known}")
    partition = facts.partitions[name]
    if partition.state != "up":
        raise UserError(f"--partition {name}: it is {partition.state}; expected one that is up")
    return [partition]


def _explain_choice(best: Offer, others: list[Offer]) -> str:
    """Name the first merit in which the best offer differs from the next of other partitions."""
    if not others:
        kind = "with GPUs" if best.gpus else "that is up"
        return f"the only one {kind} (scontrol)"
    reason = "the first by name"
    for merit, value in best.merits.items():
        if value != others[0].merits[merit]:
            reason = merit
            break
    names = ", ".join(dict.fromkeys(offer.partition.name for offer in others))
    kind = "with GPUs" if best.gpus else "that are up"
    return f"{reason} of those {kind}; also {names} (scontrol)"


def choose_for_stages(facts: SlurmFacts, training: Partition) -> Reasoned[Partition]:
    """Choose the partition of stages that need no GPU."""
    usable = facts.list_usable()
    without = [partition for partition in usable if not partition.has_gpus]
    mixed = [partition for partition in usable if not all(node.gpus for node in partition.up)]
    if not mixed:  # the default is where the site wants jobs that request nothing
        for partition in usable:
            if partition.default:
                why = "the default: all nodes that are up have GPUs (scontrol)"
                return Reasoned(partition, why)
        return Reasoned(training, "as train: all nodes that are up have GPUs (scontrol)")
    best = min(
        without or mixed,
        key=lambda partition: (
            not partition.default,
            -find_useful_limit(partition),
            -len(partition.up),
            partition.name,
        ),
    )
    reason = "without GPUs" if without else "has nodes without GPUs"
    if best.default:
        reason = f"the default, {reason}"
    return Reasoned(best, f"{reason} (scontrol)")


def _list_offers(partition: Partition, request: Request) -> Iterator[Offer]:
    """Yield an offer for each type of GPU that enough nodes have.

    By default it has as many GPUs per node as `n_nodes` nodes have; one for slices. If none are
    requested, or no node has any, yield one offer without GPUs.
    """
    nodes = partition.up
    n_nodes = int(request.nodes.rpartition("-")[2] or 1)
    if n_nodes > min(partition.max_nodes or n_nodes, len(nodes)):
        return
    kinds = sorted({kind for node in nodes for kind in node.gpus})
    if request.gpus == 0 or not (request.gpus or kinds):
        yield Offer(partition, nodes)
        return
    for kind in kinds:
        gpus_by_node = sorted((node.gpus.get(kind, 0) for node in nodes), reverse=True)
        max_gpus = gpus_by_node[n_nodes - 1]
        gpus = request.gpus or max_gpus
        if not request.gpus and SLICE.search(kind):
            gpus = min(1, max_gpus)  # processes on several slices cannot form one training
        if 0 < gpus <= max_gpus:
            able = [node for node in nodes if node.gpus.get(kind, 0) >= gpus]
            yield Offer(partition, able, gpus, kind)


def find_useful_limit(partition: Partition) -> int:
    """Return the time limit in minutes, at most a day, as a longer training takes several jobs."""
    return min(partition.limit_min or DAY_MIN, DAY_MIN)


def _describe_contents(partition: Partition) -> str:
    """Describe the nodes of a partition that are up, by their GPUs."""
    kinds = Counter(describe_gpus(node.gpus) or "no GPU" for node in partition.up)
    texts = []
    for kind, number in kinds.items():
        texts.append(f"{number} {'node' if number == 1 else 'nodes'} with {kind}")
    contents = ", ".join(texts) or "no node that is up"
    if partition.max_nodes:
        contents += f", at most {partition.max_nodes} in a job"
    return contents
