"""Values of a new profile and the reason of each, from SLURM's answers and the user's wishes."""

import re
from dataclasses import dataclass

from cellmill.config.load import check_options
from cellmill.config.machine import Machine
from cellmill.planner.devices import assumption, known_device, sizes_of
from cellmill.preflight.partition_choice import (
    DAY_MIN,
    Offer,
    Request,
    choose_for_stages,
    choose_training,
)
from cellmill.preflight.profile_writer import Place, ProfileValues
from cellmill.preflight.slurm_facts import SlurmFacts, up
from cellmill.preflight.slurm_site import Node, Partition

SAVE_WITHIN_S = 300
LEAST_JOB_AGE_S = 200
"""The plugin queries a job every 180 s at least; squeue must still list it."""
ASSUMED = "a100"
"""Device of the plan where SLURM does not name one that the planner knows."""
_GPU_MODEL = re.compile(r"[A-Za-z0-9_.]+")  # what the plugin accepts


Reasons = dict[str, str]


@dataclass(frozen=True)
class Reasoned:
    """A value and where it is from."""

    value: str
    why: str = ""


def choose_values(facts: SlurmFacts, request: Request, name: str) -> ProfileValues:
    """Every value of the profile `name`. Raises UserError if SLURM has no such machine."""
    offer, chosen = choose_training(facts, request)
    partition, chosen_for_stages = choose_for_stages(facts, offer.partition)
    account = _account(facts, request, offer.partition)
    qos = Reasoned(request.qos, "--qos") if request.qos else _qos(facts, offer.partition, account.value)
    stages_qos = qos if partition.name == offer.partition.name else _qos(facts, partition, account.value)
    stages = _place(facts, partition, up(partition), account.value, stages_qos.value)
    vectors = _place(facts, offer.partition, offer.nodes, account.value, qos.value) if offer.gpus else stages
    status, device = _status_command(facts), _device(offer)
    machine, why = _machine(facts, request, offer, account.value, qos.value)
    why |= {
        "status_command": status.why,
        "stages_partition": f"{chosen_for_stages} (sinfo)",
        "account": account.why,
        "stages_qos": stages_qos.why,
        "growth": _growth(stages, vectors),
        "device": device.why,
        "partition": chosen if request.partition else f"{chosen} (sinfo)",
        "qos": qos.why,
        "vectors_qos": qos.why,
        "vectors_gpu": "one GPU, in the plugin's terms",
        "vectors_gres": "one GPU; this site supports only --gres",
        "vectors_gpu_model": "the site's name of it (sinfo)",
        "vectors_tasks_per_gpu": "otherwise the script runs once per GPU",
    }
    return ProfileValues(
        head=_head(name, machine),
        machine=machine,
        device=device.value,
        stages=stages,
        vectors=vectors,
        vectors_gpu=_vectors_gpu(facts, offer, qos.value),
        status_command=status.value,
        why=why,
    )


def _head(name: str, machine: Machine) -> str:
    gpus = machine.gpus_per_node or machine.gres
    gpus = f" with GPUs {gpus}" if gpus else ""
    return (
        f"# Nodes of partition {machine.slurm_partition}{gpus}, written by `cellmill profiles new {name}`\n"
        "# from the answers of sinfo, scontrol and sacctmgr, named in brackets. "
        f"`cellmill preflight --profile {name}` checks it."
    )


def _machine(facts: SlurmFacts, request: Request, offer: Offer, account: str, qos: str) -> tuple[Machine, Reasons]:
    """The machine of train and the reasons of its values."""
    limit, source = facts.limit(offer.partition, account, qos)
    runtime = max(1, min(limit or DAY_MIN, DAY_MIN))
    cpus, memory = _cpus(facts, offer), _memory(facts, offer)
    per_node = f"{offer.kind}:{offer.gpus}" if offer.kind else str(offer.gpus)
    gres_only = _gres_only(facts)
    options = {
        "launcher": "slurm",
        "nodes": request.nodes or "1",
        "nproc_per_node": offer.gpus or 1,
        "slurm_partition": offer.partition.name,
        "slurm_account": account,
        "qos": qos,
        "gpus_per_node": per_node if offer.gpus and not gres_only else "",
        "gres": f"gpu:{per_node}" if offer.gpus and gres_only else "",
        "runtime": runtime,
        "mem_mb": int(memory.value),
        "cpus_per_task": int(cpus.value),
        "save_within_s": min(SAVE_WITHIN_S, 15 * runtime),
    }
    machine: Machine = check_options(Machine, options, f"partition {offer.partition.name}")
    return machine, {
        "nproc_per_node": "one process per GPU" if offer.gpus else "no GPUs: one process on the node's cores",
        "gpus": f"{'slices cannot form one training; ' if offer.sliced else ''}{_gpus_there(offer)} (sinfo)"
        + (f"; {gres_only} supports only --gres (scontrol)" if gres_only else ""),
        "runtime": _limit_text(limit, source),
        "mem_mb": memory.why,
        "cpus": cpus.why,
    }


def _limit_text(limit: int | None, source: str) -> str:
    if limit is None:
        return f"a day; there is no limit of {source}"
    return f"{'limit' if limit <= DAY_MIN else f'a day, below the limit of {limit} min'} of {source}"


def _gpus_there(offer: Offer) -> str:
    counts = sorted({node.gpus[offer.kind] for node in offer.nodes} if offer.gpus else ())
    return f"of {' or '.join(map(str, counts))} on a node"


def _cpus(facts: SlurmFacts, offer: Offer) -> Reasoned:
    """The smallest node's CPUs, or the share of them that goes with the GPUs."""
    shares = [facts.cpus(offer.partition, node) * _gpus_frac(offer, node) for node in offer.nodes]
    why = f"{'all' if _is_whole(offer) else 'the share of its GPUs'} of the smallest node (sinfo, scontrol)"
    return Reasoned(str(max(1, int(min(shares)))), why)


def _memory(facts: SlurmFacts, offer: Offer) -> Reasoned:
    """All memory of a node, or the share of the smallest that goes with the GPUs."""
    usable = [facts.memory_mb(offer.partition, node) for node in offer.nodes]
    if not all(usable):
        return Reasoned("0", "SLURM does not manage memory here (sinfo)")
    if not _is_whole(offer):
        least = min(megabytes * _gpus_frac(offer, node) for megabytes, node in zip(usable, offer.nodes))
        return Reasoned(str(int(least)), "per node: the share of its GPUs, of the smallest node (sinfo)")
    if any(megabytes < node.memory_mb for megabytes, node in zip(usable, offer.nodes)):
        return Reasoned(str(min(usable)), f"limit of partition {offer.partition.name} per node (scontrol)")
    return Reasoned("0", f"all of a node's memory, {min(usable)} MB or more (sinfo)")


def _gpus_frac(offer: Offer, node: Node) -> float:
    return offer.gpus / node.gpus_of("") if offer.gpus else 1.0


def _is_whole(offer: Offer) -> bool:
    """True if the job gets all GPUs of every node that it may run on."""
    return all(_gpus_frac(offer, node) == 1 for node in offer.nodes)


def _gres_only(facts: SlurmFacts) -> str:
    """The SelectType that does not know --gpus-per-node and --gpus; empty if they work."""
    select = facts.configuration.get("SelectType", "select/cons_tres")
    return "" if select == "select/cons_tres" else select


def _place(facts: SlurmFacts, partition: Partition, nodes: list[Node], account: str, qos: str) -> Place:
    """The partition with the most that a job of one node may request there."""
    memory = [facts.memory_mb(partition, node) for node in nodes]
    return Place(
        partition=partition.name,
        qos=qos,
        limit_min=facts.limit(partition, account, qos)[0],
        mem_mb=max(memory) if all(memory) else 0,
        cpus=max(facts.cpus(partition, node) for node in nodes),
    )


def _vectors_gpu(facts: SlurmFacts, offer: Offer, qos: str) -> dict[str, str | int]:
    """Keys of a stage on one GPU."""
    if not offer.gpus:
        return {}
    keys: dict[str, str | int] = {"slurm_partition": offer.partition.name}
    if qos:
        keys["qos"] = qos
    kind = offer.kind if _GPU_MODEL.fullmatch(offer.kind) else ""
    if _gres_only(facts):
        keys["gres"] = f"gpu:{kind}:1" if kind else "gpu:1"
    else:
        keys |= {"gpu": 1} | ({"gpu_model": kind} if kind else {})
    return keys | {"tasks_per_gpu": 0}


def _growth(stages: Place, vectors: Place) -> str:
    """The limits that the stages' memory and time stay within."""
    return "; ".join(
        f"at most {'any time' if place.limit_min is None else f'{place.limit_min} min'}"
        f"{f' and {place.mem_mb} MB' if place.mem_mb else ''} in partition {place.partition}"
        for place in dict.fromkeys((stages, vectors))
    )


def _account(facts: SlurmFacts, request: Request, partition: Partition) -> Reasoned:
    if request.account:
        return Reasoned(request.account, "--account")
    if not facts.accounts:
        return Reasoned("", "not needed: sacctmgr knows none of yours")
    accepted = facts.rules_of(partition).accounts
    mine = sorted(name for name in facts.accounts if accepted is None or name in accepted)
    if facts.default_account in mine:
        return Reasoned(facts.default_account, "your default account (sacctmgr)")
    if len(mine) == 1:
        of_several = f" that partition {partition.name} accepts" if len(facts.accounts) > 1 else ""
        return Reasoned(mine[0], f"your only account{of_several} (sacctmgr)")
    return Reasoned("", f"one of {', '.join(mine or sorted(facts.accounts))} (sacctmgr); --account chooses it")


def _qos(facts: SlurmFacts, partition: Partition, account: str) -> Reasoned:
    """A QOS of this user, if the partition does not accept every one."""
    accepted = facts.rules_of(partition).qos
    mine = facts.accounts[account] if account in facts.accounts else set().union(*facts.accounts.values())
    both = sorted(mine & accepted, key=lambda name: (name != "normal", name)) if accepted is not None else []
    return (
        Reasoned(both[0], f"one of yours that partition {partition.name} accepts (scontrol)") if both else Reasoned("")
    )


def _status_command(facts: SlurmFacts) -> Reasoned:
    if not facts.no_accounting:
        return Reasoned("sacct", "it answers, also while the controller does not")
    text = facts.configuration.get("MinJobAge", "unknown")
    age = re.match(r"\d+", text)
    if age is not None and int(age[0]) < LEAST_JOB_AGE_S:
        said = f"; MinJobAge is {text} (scontrol), so squeue may forget a job before its end was seen: have it raised"
    else:
        said = f"; MinJobAge is {text} (scontrol)"
    return Reasoned("squeue", f"no accounting ({facts.no_accounting}){said}")


def _device(offer: Offer) -> Reasoned:
    """The planner's device for the type of the GPUs, or for a feature of their nodes where the type has no name."""
    if not offer.gpus:
        return Reasoned("cpu")
    features = sorted(frozenset.intersection(*(node.features for node in offer.nodes)))
    for name, source in ((offer.kind, "type"), *((feature, "feature") for feature in features)):
        if known := known_device(name):
            slice_ = "; a slice has less memory than it assumes" if offer.sliced else ""
            # such as gpu_40gb beside a100; 40g may be the network's
            told = [feature for feature in features if "gb" in feature.lower() and sizes_of(known)]
            sized = {known_device(f"{known} {feature}"): f" and feature {feature}" for feature in told}
            sized.pop(known, None)
            if len(sized) == 1 and not offer.sliced:
                ((known, more),) = sized.items()
                return Reasoned(known, f"{source} {name}{more} of the nodes (sinfo)")
            assumed = "" if offer.sliced or not assumption(known) else f"; assumed: {assumption(known)}"
            return Reasoned(known, f"{source} {name} of the nodes (sinfo){slice_}{assumed}")
    called = f"GPU type {offer.kind} (sinfo)" if offer.kind else "GPUs without a type (sinfo)"
    return Reasoned(ASSUMED, f"assumed: the planner does not know {called}; {assumption(ASSUMED)}")
