"""Values of a new profile, each with its reason, from what SLURM says of the site."""

import re

from cellmill.config.load import check_options
from cellmill.config.machine import Machine
from cellmill.planner.devices import describe_assumption, list_sized_devices, recognise_device
from cellmill.preflight.partitions import (
    DAY_MIN,
    Offer,
    Reasoned,
    Request,
    choose_for_stages,
    choose_training,
)
from cellmill.preflight.profile_text import Site, StagePartition, quote_for_python
from cellmill.preflight.site import Node, Partition, SlurmFacts

SAVE_WITHIN_S = 300
LEAST_JOB_AGE_S = 200  # the plugin queries a job every 180 s at least; squeue must still list it
ASSUMED = "a100"  # device of the plan if SLURM does not name one that the planner knows


def choose_values(facts: SlurmFacts, request: Request, name: str) -> Site:
    """Every value of the profile `name`. Raise UserError if SLURM has no such machine."""
    training = choose_training(facts, request)
    offer = training.value
    stages = choose_for_stages(facts, offer.partition)
    account = _account(facts, request, offer.partition)
    qos = stages_qos = _qos(facts, offer.partition, account.value)
    if request.qos:
        qos = stages_qos = Reasoned(request.qos, "--qos")
    if stages.value.name != offer.partition.name:
        stages_qos = _qos(facts, stages.value, account.value)
    for_stages = _stage_partition(
        facts, stages.value, stages.value.up, account.value, stages_qos.value
    )
    for_vectors = for_stages
    if offer.gpus:
        for_vectors = _stage_partition(
            facts, offer.partition, offer.nodes, account.value, qos.value
        )
    select = facts.configuration.get("SelectType", "select/cons_tres")
    gres_only = select != "select/cons_tres"  # others do not know --gpus-per-node and --gpus
    memory_key, memory = _memory(offer)
    runtime = _runtime(facts, offer.partition, account.value, qos.value)
    why_processes = (
        "one process per GPU" if offer.gpus else "no GPUs: one process on the node's cores"
    )
    values: dict[str, Reasoned[str] | Reasoned[int]] = {
        "launcher": Reasoned("slurm"),
        "slurm_cluster": Reasoned(request.cluster, request.cluster and "--cluster"),
        "nodes": Reasoned(request.nodes or "1"),
        "nproc_per_node": Reasoned(offer.gpus or 1, why_processes),
        "slurm_partition": Reasoned(offer.partition.name, training.why),
        "slurm_account": account,
        "qos": qos,
        "gres" if gres_only else "gpus_per_node": _gpus(offer, select if gres_only else ""),
        "runtime": runtime,
        memory_key: memory,
        "cpus_per_task": _cpus(offer),
        "save_within_s": Reasoned(min(SAVE_WITHIN_S, 15 * runtime.value)),
    }
    options = {key: reasoned.value for key, reasoned in values.items()}
    machine: Machine = check_options(Machine, options, f"partition {offer.partition.name}")
    status_command = _status_command(facts)
    device = _device(offer)
    limits = dict.fromkeys((for_stages, for_vectors))
    why = {key: reasoned.why for key, reasoned in values.items()} | {
        "status_command": status_command.why,
        "stages_partition": stages.why,
        "stages_qos": stages_qos.why,
        "growth": "; ".join(map(str, limits)),
        "device": device.why,
        "gpu": "gpu_model is the site's name of it (scontrol)",
    }
    if gres_only:
        why["gpu"] = "this site supports only --gres"
    gpus = machine.gpus_per_node or machine.gres
    return Site(
        head=f"# Nodes of partition {machine.slurm_partition}{gpus and f' with GPUs {gpus}'}, written by "
        f"`cellmill profiles new {name}`\n# from the answers of scontrol and sacctmgr, named in brackets. "
        f"`cellmill preflight --profile {name}` checks "
        "it;\n# profiles/README.md explains each key, which is an option of `snakemake`.",
        machine=machine,
        device=device.value,
        stages=for_stages,
        gpu_stages=for_vectors,
        gpu=_one_gpu(offer, qos.value, gres_only) if offer.gpus else {},
        status_command=status_command.value,
        why=why,
    )


def _stage_partition(
    facts: SlurmFacts, partition: Partition, nodes: list[Node], account: str, qos: str
) -> StagePartition:
    """The partition, with the largest request of a job of one node."""
    memory_mb = [node.usable_mb for node in nodes]
    limit_min, _ = facts.limit(partition, account, qos)
    return StagePartition(
        partition.name,
        qos,
        limit_min,
        max(memory_mb) if all(memory_mb) else 0,
        max(node.cpus for node in nodes),
    )


def _account(facts: SlurmFacts, request: Request, partition: Partition) -> Reasoned[str]:
    if request.account:
        return Reasoned(request.account, "--account")
    if not facts.accounts:
        return Reasoned("", "not needed: sacctmgr knows none of yours")
    accepted = partition.accounts
    mine = sorted(name for name in facts.accounts if accepted is None or name in accepted)
    if facts.default_account in mine:
        return Reasoned(facts.default_account, "your default account (sacctmgr)")
    if len(mine) == 1:
        if len(facts.accounts) == 1:
            return Reasoned(mine[0], "your only account (sacctmgr)")
        why = f"your only account that partition {partition.name} accepts (sacctmgr)"
        return Reasoned(mine[0], why)
    names = ", ".join(mine or sorted(facts.accounts))
    return Reasoned("", f"one of {names} (sacctmgr); --account chooses it")


def _qos(facts: SlurmFacts, partition: Partition, account: str) -> Reasoned[str]:
    """A QOS of this user that the partition names; empty if there is none, or it names none."""
    accepted = facts.list_qos(account) & (partition.qos or set())
    if not accepted:
        return Reasoned("")
    name = min(accepted, key=lambda qos: (qos != "normal", qos))
    return Reasoned(name, f"one of yours that partition {partition.name} accepts (scontrol)")


def _gpus(offer: Offer, select: str) -> Reasoned[str]:
    """GPUs per node. `select` is the SelectType of a site that supports only --gres."""
    numbers = [0]
    gpus = ""
    if offer.gpus:
        numbers = sorted({node.gpus[offer.kind] for node in offer.nodes})
        gpus = ":".join(filter(None, (offer.kind, str(offer.gpus))))
    why = f"of {' or '.join(map(str, numbers))} on a node (scontrol)"
    if offer.is_sliced:
        why = f"slices cannot form one training; {why}"
    if select:
        why += f"; {select} supports only --gres (scontrol)"
        gpus = gpus and f"gpu:{gpus}"
    return Reasoned(gpus, why)


def _runtime(facts: SlurmFacts, partition: Partition, account: str, qos: str) -> Reasoned[int]:
    limit, source = facts.limit(partition, account, qos)
    runtime = max(1, min(limit or DAY_MIN, DAY_MIN))
    if limit is None:
        why = f"a day; there is no limit of {source}"
    elif runtime == limit:
        why = f"limit of {source}"
    else:
        why = f"a day, below the limit of {limit} min of {source}"
    return Reasoned(runtime, why)


def _shares(offer: Offer) -> list[float]:
    """Fraction of each node that goes with the training's GPUs."""
    if not offer.gpus:
        return [1.0] * len(offer.nodes)
    return [offer.gpus / node.count_gpus("") for node in offer.nodes]


def _memory(offer: Offer) -> tuple[str, Reasoned[int]]:
    """The key and MB that request memory.

    What the partition says per GPU or CPU; else per node all memory, or the GPUs' share of it.
    """
    partition = offer.partition
    if offer.gpus and partition.mb_per_gpu:
        why = f"DefMemPerGPU of partition {partition.name} (scontrol)"
        return "mem_mb_per_gpu", Reasoned(partition.mb_per_gpu, why)
    if partition.mb_per_cpu:
        why = f"MaxMemPerCPU of partition {partition.name} (scontrol)"
        return "mem_mb_per_cpu", Reasoned(partition.mb_per_cpu, why)
    return "mem_mb", _memory_per_node(offer)


def _memory_per_node(offer: Offer) -> Reasoned[int]:
    usable_mb = [node.usable_mb for node in offer.nodes]
    shares = _shares(offer)
    if not all(usable_mb):
        return Reasoned(0, "SLURM does not manage memory here (scontrol)")
    if any(share != 1 for share in shares):
        least = min(megabytes * share for megabytes, share in zip(usable_mb, shares))
        why = "per node: the share of its GPUs, of the smallest node (scontrol)"
        return Reasoned(int(least), why)
    least_mb = min(usable_mb)
    if any(node.usable_mb < node.memory_mb for node in offer.nodes):
        return Reasoned(least_mb, f"limit of partition {offer.partition.name} per node (scontrol)")
    return Reasoned(0, f"all of a node's memory, {least_mb} MB or more (scontrol)")


def _cpus(offer: Offer) -> Reasoned[int]:
    shares = _shares(offer)
    least = min(node.cpus * share for node, share in zip(offer.nodes, shares))
    part = "all" if set(shares) == {1} else "the share of its GPUs"
    return Reasoned(max(1, int(least)), f"{part} of the smallest node (scontrol)")


def _status_command(facts: SlurmFacts) -> Reasoned[str]:
    if not facts.no_accounting:
        return Reasoned("sacct", "it answers, also while the controller does not")
    age = facts.configuration.get("MinJobAge", "unknown")
    why = f"no accounting ({facts.no_accounting}); MinJobAge is {age} (scontrol)"
    seconds = re.match(r"\d+", age)
    if seconds is not None and int(seconds[0]) < LEAST_JOB_AGE_S:
        why += ", so squeue may forget a job before its end was seen: have it raised"
    return Reasoned("squeue", why)


def _device(offer: Offer) -> Reasoned[str]:
    """The planner's device for the type of the GPUs, or for a feature of their nodes."""
    if not offer.gpus:
        return Reasoned("cpu")
    features = sorted(frozenset.intersection(*(node.features for node in offer.nodes)))
    sources = dict.fromkeys(features, "feature") | {offer.kind: "type"}
    for name in (offer.kind, *features):
        device = recognise_device(name)
        if not device:
            continue
        source = f"{sources[name]} {name}"
        if offer.is_sliced:
            why = f"{source} of the nodes (scontrol); a slice has less memory than it assumes"
            return Reasoned(device, why)
        # a feature such as gpu_40gb next to a100; 40g alone may be the network's
        sized = {}
        for feature in features if list_sized_devices(device) else ():
            if "gb" in feature.lower():
                sized[recognise_device(f"{device} {feature}")] = feature
        sized.pop(device, None)
        if len(sized) == 1:
            [(device, feature)] = sized.items()
            why = f"{source} and feature {feature} of the nodes (scontrol)"
            return Reasoned(device, why)
        assumed = describe_assumption(device)
        why = f"{source} of the nodes (scontrol)"
        return Reasoned(device, f"{why}; assumed: {assumed}" if assumed else why)
    kind = f"GPU type {offer.kind} (scontrol)" if offer.kind else "GPUs without a type (scontrol)"
    why = f"assumed: the planner does not know {kind}; {describe_assumption(ASSUMED)}"
    return Reasoned(ASSUMED, why)


def _one_gpu(offer: Offer, qos: str, gres_only: bool) -> dict[str, str | int]:
    """Keys of a stage on one GPU."""
    keys: dict[str, str | int] = {"slurm_partition": quote_for_python(offer.partition.name)}
    if qos:
        keys["qos"] = quote_for_python(qos)
    # the plugin accepts no other characters
    kind = offer.kind if re.fullmatch(r"[A-Za-z0-9_.]+", offer.kind) else ""
    if gres_only:
        keys["gres"] = quote_for_python(f"gpu:{kind}:1" if kind else "gpu:1")
    else:
        keys |= {"gpu": 1} | ({"gpu_model": quote_for_python(kind)} if kind else {})
    return keys | {"tasks_per_gpu": 0}
