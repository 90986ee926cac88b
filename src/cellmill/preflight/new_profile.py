"""Values of a new profile, each with its reason, from what SLURM says of the site."""

import re

from cellmill.config.load import check_options
from cellmill.config.machine import Machine
from cellmill.planner.devices import (
    DEVICES,
    describe_assumption,
    find_other_memory_gb,
    list_sized_devices,
    recognise_device,
)
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
ASSUMED_DEVICE = "a100"  # device of the plan if SLURM names none that the planner knows
CONS_TRES = "select/cons_tres"  # SelectType that knows --gpus-per-node and --gpus


def choose_values(facts: SlurmFacts, request: Request, name: str) -> Site:
    """Choose every value of the profile `name`. Raise UserError if SLURM has no such machine."""
    training = choose_training(facts, request)
    offer = training.value
    stages = choose_for_stages(facts, offer.partition)
    account = _choose_account(facts, request, offer.partition)
    qos = _choose_qos(facts, offer.partition, account.value)
    if request.qos:
        qos = Reasoned(request.qos, "--qos")
    stages_qos = qos
    if stages.value.name != offer.partition.name:
        stages_qos = _choose_qos(facts, stages.value, account.value)
    values = _choose_machine(facts, request, training, account, qos)
    options = {key: reasoned.value for key, reasoned in values.items()}
    machine: Machine = check_options(Machine, options, f"partition {offer.partition.name}")
    for_stages = _stage_partition(
        facts, stages.value, stages.value.up, account.value, stages_qos.value
    )
    for_gpu_stages = for_stages
    if offer.gpus:
        for_gpu_stages = _stage_partition(
            facts, offer.partition, offer.nodes, account.value, qos.value
        )
    device = _choose_device(offer)
    status_command = _choose_status_command(facts)
    limits = dict.fromkeys((for_stages, for_gpu_stages))
    gres_select_type = _find_gres_select_type(facts)
    why = {key: reasoned.why for key, reasoned in values.items()} | {
        "status_command": status_command.why,
        "stages_partition": stages.why,
        "stages_qos": stages_qos.why,
        "growth": "; ".join(map(str, limits)),
        "device": device.why,
        "gpu": "gpu_model is the site's name of it (scontrol)",
    }
    if gres_select_type:
        why["gpu"] = "this site supports only --gres"
    return Site(
        head=_write_head(machine, name),
        machine=machine,
        device=device.value,
        stages=for_stages,
        gpu_stages=for_gpu_stages,
        gpu=_list_gpu_keys(offer, qos.value, bool(gres_select_type)) if offer.gpus else {},
        status_command=status_command.value,
        why=why,
    )


def _choose_machine(
    facts: SlurmFacts,
    request: Request,
    training: Reasoned[Offer],
    account: Reasoned[str],
    qos: Reasoned[str],
) -> dict[str, Reasoned[str] | Reasoned[int]]:
    """Choose the options of the training's `Machine`."""
    offer = training.value
    gres_select_type = _find_gres_select_type(facts)
    why_processes = "no GPUs: one process on the node's cores"
    if offer.gpus:
        why_processes = "one process per GPU"
    memory_key, memory = _choose_memory(offer)
    runtime = _choose_runtime(facts, offer.partition, account.value, qos.value)
    return {
        "launcher": Reasoned("slurm"),
        "slurm_cluster": Reasoned(request.cluster, "--cluster" if request.cluster else ""),
        "nodes": Reasoned(request.nodes or "1"),
        "nproc_per_node": Reasoned(offer.gpus or 1, why_processes),
        "slurm_partition": Reasoned(offer.partition.name, training.why),
        "slurm_account": account,
        "qos": qos,
        "gres" if gres_select_type else "gpus_per_node": _choose_gpus(offer, gres_select_type),
        "runtime": runtime,
        memory_key: memory,
        "cpus_per_task": _choose_cpus(offer),
        # at most a quarter of the job
        "save_within_s": Reasoned(min(SAVE_WITHIN_S, 15 * runtime.value)),
    }


def _find_gres_select_type(facts: SlurmFacts) -> str:
    """Return the SelectType of a site that knows --gres but not --gpus-per-node and --gpus; else ""."""
    select_type = facts.configuration.get("SelectType", CONS_TRES)
    return "" if select_type == CONS_TRES else select_type


def _write_head(machine: Machine, name: str) -> str:
    """Write the first comment of the profile `name`."""
    gpus = machine.gpus_per_node or machine.gres
    with_gpus = f" with GPUs {gpus}" if gpus else ""
    return (
        f"# Nodes of partition {machine.slurm_partition}{with_gpus}, written by `cellmill profiles new {name}`\n"
        f"# from the answers of scontrol and sacctmgr, named in brackets. `cellmill preflight --profile {name}` checks "
        "it;\n# profiles/README.md explains each key, which is an option of `snakemake`."
    )


def _stage_partition(
    facts: SlurmFacts, partition: Partition, nodes: list[Node], account: str, qos: str
) -> StagePartition:
    """Describe a partition for stages, with the largest request of a job on one of `nodes`."""
    memory_mb = [node.usable_mb for node in nodes]
    limit_min, _ = facts.limit(partition, account, qos)
    return StagePartition(
        partition.name,
        qos,
        limit_min,
        max(memory_mb) if all(memory_mb) else 0,
        max(node.cpus for node in nodes),
    )


def _choose_account(facts: SlurmFacts, request: Request, partition: Partition) -> Reasoned[str]:
    """Choose an account that the partition accepts; empty if this user has several or none."""
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


def _choose_qos(facts: SlurmFacts, partition: Partition, account: str) -> Reasoned[str]:
    """Choose a QOS of this user that the partition names; empty if there is none."""
    accepted = facts.list_qos(account) & (partition.qos or set())
    if not accepted:
        return Reasoned("")
    name = min(accepted, key=lambda qos: (qos != "normal", qos))
    return Reasoned(name, f"one of yours that partition {partition.name} accepts (scontrol)")


def _choose_gpus(offer: Offer, gres_select_type: str) -> Reasoned[str]:
    """Choose the GPUs per node.

    `gres_select_type` is the SelectType of a site that supports only --gres, else "".
    """
    numbers = [0]
    gpus = ""
    if offer.gpus:
        numbers = sorted({node.gpus[offer.kind] for node in offer.nodes})
        gpus = ":".join(filter(None, (offer.kind, str(offer.gpus))))
    why = f"of {' or '.join(map(str, numbers))} on a node (scontrol)"
    if offer.is_sliced:
        why = f"slices cannot form one training; {why}"
    if gres_select_type:
        why += f"; {gres_select_type} supports only --gres (scontrol)"
        gpus = f"gpu:{gpus}" if gpus else ""
    return Reasoned(gpus, why)


def _choose_runtime(
    facts: SlurmFacts, partition: Partition, account: str, qos: str
) -> Reasoned[int]:
    """Choose the minutes per job: the limit, at most a day."""
    limit_min, source = facts.limit(partition, account, qos)
    runtime = max(1, min(limit_min or DAY_MIN, DAY_MIN))
    if limit_min is None:
        why = f"a day; there is no limit of {source}"
    elif runtime == limit_min:
        why = f"limit of {source}"
    else:
        why = f"a day, below the limit of {limit_min} min of {source}"
    return Reasoned(runtime, why)


def _list_shares(offer: Offer) -> list[float]:
    """List the fraction of each node's GPUs that the training gets; 1 without GPUs."""
    if not offer.gpus:
        return [1.0] * len(offer.nodes)
    return [offer.gpus / node.count_gpus("") for node in offer.nodes]


def _choose_memory(offer: Offer) -> tuple[str, Reasoned[int]]:
    """Choose the key that requests memory, and its MB.

    They are those of the partition per GPU or CPU; otherwise all memory of a node, or the share of
    its GPUs.
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
    """Choose the MB of memory per node; 0 is all of it."""
    usable_mb = [node.usable_mb for node in offer.nodes]
    shares = _list_shares(offer)
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


def _choose_cpus(offer: Offer) -> Reasoned[int]:
    """Choose the CPU cores per node: the share of its GPUs, on the node with the fewest cores."""
    shares = _list_shares(offer)
    least = min(node.cpus * share for node, share in zip(offer.nodes, shares))
    part = "all" if set(shares) == {1} else "the share of its GPUs"
    return Reasoned(max(1, int(least)), f"{part} of the smallest node (scontrol)")


def _choose_status_command(facts: SlurmFacts) -> Reasoned[str]:
    """Choose the command by which Snakemake's plugin looks up the states of jobs."""
    if not facts.no_accounting:
        return Reasoned("sacct", "it answers, also while the controller does not")
    age = facts.configuration.get("MinJobAge", "unknown")
    why = f"no accounting ({facts.no_accounting}); MinJobAge is {age} (scontrol)"
    seconds = re.match(r"\d+", age)
    if seconds is not None and int(seconds[0]) < LEAST_JOB_AGE_S:
        why += ", so squeue may forget a job before its end was seen: have it raised"
    return Reasoned("squeue", why)


def _choose_device(offer: Offer) -> Reasoned[str]:
    """Choose the device of the plan by the type of the GPUs, or by a feature of their nodes."""
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
        memory_gb = find_other_memory_gb(name, device)
        if memory_gb is not None:
            assumed = f"{DEVICES[device].memory_gb:g} GB; set plan.memory_gb to {memory_gb} in the configuration"
        why = f"{source} of the nodes (scontrol)"
        return Reasoned(device, f"{why}; assumed: {assumed}" if assumed else why)
    kind = f"GPU type {offer.kind} (scontrol)" if offer.kind else "GPUs without a type (scontrol)"
    why = f"assumed: the planner does not know {kind}; {describe_assumption(ASSUMED_DEVICE)}"
    return Reasoned(ASSUMED_DEVICE, why)


def _list_gpu_keys(offer: Offer, qos: str, gres_only: bool) -> dict[str, str | int]:
    """List the keys of a stage on one GPU."""
    keys: dict[str, str | int] = {"slurm_partition": quote_for_python(offer.partition.name)}
    if qos:
        keys["qos"] = quote_for_python(qos)
    # the plugin accepts no other characters
    kind = offer.kind if re.fullmatch(r"[A-Za-z0-9_.]+", offer.kind) else ""
    if gres_only:
        keys["gres"] = quote_for_python(f"gpu:{kind}:1" if kind else "gpu:1")
    else:
        keys["gpu"] = 1
        if kind:  # the plugin takes no number for a text
            is_number = kind.replace(".", "").isdigit()
            keys["gpu_model"] = f"'{kind}'" if is_number else quote_for_python(kind)
    return keys | {"tasks_per_gpu": 0}
