"""A new profile in one file: the choice of partitions, its values with a reason for each, and its
text.

The template is the same for the profiles of this repository and those of `cellmill profiles new`.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from cellmill.config.load import check_options
from cellmill.config.machine import Machine
from cellmill.errors import UserError
from cellmill.planner.devices import DEVICES, assumption, known_device, sizes_of
from cellmill.preflight.checks import DECLARED, ON_A_GPU, gpus_text
from cellmill.preflight.profile import assigned, evaluate
from cellmill.preflight.site import Node, Partition, SlurmFacts

DAY_MIN = 1440
# a part of a GPU (MIG); processes on several cannot form one training
_SLICE = re.compile(r"\d+g\.\d+gb")
RETRIES = 2
COMMENTS_AT = 28  # column of the comments, where the text before them is not longer
SAVE_WITHIN_S = 300
LEAST_JOB_AGE_S = 200  # the plugin queries a job every 180 s at least; squeue must still list it
ASSUMED = "a100"  # device of the plan where SLURM does not name one that the planner knows
Reasoned = tuple[str, str]  # a value and where it is from


@dataclass(frozen=True)
class Request:
    """The user's wishes; empty or None leaves the choice to `choose_training`."""

    partition: str = ""
    nodes: str = ""
    gpus: int | None = None  # per node; 0 for processes on CPU cores
    account: str = ""
    qos: str = ""


@dataclass(frozen=True)
class Offer:
    """Nodes of a partition that can run the training, and the GPUs it gets on each."""

    partition: Partition
    nodes: list[Node]
    gpus: int = 0
    kind: str = ""  # type of the GPUs as SLURM names it; "" for one without a name

    @property
    def sliced(self) -> bool:
        return bool(_SLICE.search(self.kind))

    @property
    def merits(self) -> dict[str, int]:
        """Reasons to prefer it; the first difference decides."""
        return {
            "whole GPUs": int(not self.sliced),
            "most GPUs per node": self.gpus,
            "without GPUs": int(not any(node.gpus for node in self.nodes)),
            "the default": int(self.partition.default),
            # 0 for an unknown type
            "fastest GPUs": int(DEVICES[known_device(self.kind) or "cpu"].bf16_flops or 0),
            "longest time limit": _limit(self.partition),
            "most nodes": len(self.nodes),
        }


def choose_training(facts: SlurmFacts, request: Request) -> tuple[Offer, str]:
    """The best offer and the reason. Raises UserError if there is no such partition, or not as much
    of it.
    """
    among = facts.usable()
    name = request.partition
    if name:
        if name not in facts.partitions:
            known = ", ".join(sorted(facts.partitions))
            raise UserError(f"--partition {name}: there is none; expected one of {known}")
        among = [facts.partitions[name]]
        if among[0].state != "up":
            raise UserError(f"--partition {name}: it is {among[0].state}; expected one that is up")
    offers = [offer for partition in among for offer in _offers(partition, request)]
    if request.gpus != 0 and any(node.gpus for partition in among for node in partition.up):
        offers = [offer for offer in offers if offer.gpus]
    if not offers:
        wish = f"--partition {name} " if name else ""
        wish += f"--nodes {request.nodes or 1}" + (
            "" if request.gpus is None else f" --gpus {request.gpus}"
        )
        there = "; ".join(
            sorted(f"{partition.name}: {_contents(partition)}" for partition in among)
        )
        raise UserError(f"{wish}: expected at most what is up, which is {there or 'nothing'}")
    offers.sort(
        key=lambda offer: (
            [-value for value in offer.merits.values()],
            offer.partition.name,
            offer.kind,
        )
    )
    best = offers[0]
    others = [offer for offer in offers if offer.partition.name != best.partition.name]
    if name:
        return best, "--partition"
    if not others:
        return best, f"the only one {'with GPUs' if best.gpus else 'that is up'} (scontrol)"
    pairs = zip(best.merits.items(), others[0].merits.values())
    reason = next(
        (merit for (merit, value), next_best in pairs if value != next_best), "the first by name"
    )
    names = ", ".join(dict.fromkeys(offer.partition.name for offer in others))
    return (
        best,
        f"{reason} of those {'with GPUs' if best.gpus else 'that are up'}; also {names} (scontrol)",
    )


def choose_for_stages(facts: SlurmFacts, training: Partition) -> tuple[Partition, str]:
    """The partition of stages that need no GPU, and the reason."""
    usable = facts.usable()
    without = [partition for partition in usable if not any(node.gpus for node in partition.up)]
    mixed = [partition for partition in usable if not all(node.gpus for node in partition.up)]
    if not mixed:  # the default is where the site wants jobs that request nothing
        default = next((partition for partition in usable if partition.default), None)
        where = (
            f"{'as train' if default is None else 'the default'}: all nodes that are up have GPUs"
        )
        return default or training, f"{where} (scontrol)"
    best = min(without or mixed, key=lambda p: (not p.default, -_limit(p), -len(p.up), p.name))
    reason = "without GPUs" if without else "has nodes without GPUs"
    return best, f"{'the default, ' if best.default else ''}{reason} (scontrol)"


def _offers(partition: Partition, request: Request) -> Iterator[Offer]:
    """At most one offer for each type of GPU: as many on each node as enough nodes have."""
    nodes, number = partition.up, int(request.nodes.rpartition("-")[2] or 1)
    kinds = sorted({kind for node in nodes for kind in node.gpus})
    if number > min(partition.max_nodes or number, len(nodes)):
        return
    if request.gpus == 0 or not (request.gpus or kinds):
        yield Offer(partition, nodes)
        return
    for kind in kinds:
        most = sorted((node.gpus.get(kind, 0) for node in nodes), reverse=True)[number - 1]
        gpus = request.gpus or (min(1, most) if _SLICE.search(kind) else most)
        if 0 < gpus <= most:
            yield Offer(
                partition, [node for node in nodes if node.gpus.get(kind, 0) >= gpus], gpus, kind
            )


def _limit(partition: Partition) -> int:
    """Time limit; more than a day has no advantage, as a longer training takes several jobs."""
    return min(partition.limit_min or DAY_MIN, DAY_MIN)


def _contents(partition: Partition) -> str:
    """Nodes of a partition that are up, by their GPUs."""
    kinds = Counter(gpus_text(node.gpus) or "no GPU" for node in partition.up)
    listed = ", ".join(
        f"{number} {'node' if number == 1 else 'nodes'} with {kind}"
        for kind, number in kinds.items()
    )
    most = partition.max_nodes
    return f"{listed or 'no node that is up'}{f', at most {most} in a job' if most else ''}"


@dataclass(frozen=True)
class Place:
    """Partition in which stages run, and the most that a job may request there; None for no limit."""

    partition: str = ""
    qos: str = ""
    limit_min: int | None = None
    mem_mb: int | None = None  # 0 where SLURM does not manage memory: no job may request any
    cpus: int | None = None


@dataclass(frozen=True)
class Site:
    """What a profile knows of its cluster, and the rules do not."""

    head: str  # first comment
    machine: Machine  # of train
    device: str  # of plan
    stages: Place
    vectors: Place  # of the stages ON_A_GPU
    # resources of these stages; comments if `vectors` has no partition
    gpu: Mapping[str, str | int]
    status_command: str
    # reason of a value, after the general comment of its key
    why: Mapping[str, str] = field(default_factory=dict)

    @property
    def default_mem_mb(self) -> int:
        """Enough for the two small snakemake processes in each job, some 600 MB."""
        return min(4000, 4000 if self.stages.mem_mb is None else self.stages.mem_mb)

    def threads(self) -> str:
        """CPU cores of stages that can use more than their rules declare."""
        known = [
            ("preprocess", 2),
            ("shard", 4),
            ("shard_part", 4),
            *((stage, 8) for stage in ON_A_GPU),
        ]
        return _flow(
            {stage: min(number, self.place(stage).cpus or number) for stage, number in known}
        )

    def place(self, stage: str) -> Place:
        return self.vectors if stage in ON_A_GPU else self.stages

    def resources(self) -> list[str]:
        """Lines of set-resources, but for train and plan: GPUs, and requests that the partition
        limits.
        """
        texts = {}
        for stage, declared in DECLARED.items():
            keys = dict(self.gpu if stage in ON_A_GPU else {})
            place = self.place(stage)
            for key, limit in (("mem_mb", place.mem_mb), ("runtime", place.limit_min)):
                base, per = declared[key]
                if limit is not None and (per is not None or base * (1 + RETRIES) > limit):
                    sized = base if per is None else f"int({base} + input.size_mb / {per})"
                    keys[key] = limit if limit <= base else f"min({sized} * attempt, {limit})"
            if keys:
                texts[stage] = _flow(keys)
        lines = []
        anchors = dict[str, str]()
        number_of = Counter(texts.values())
        for stage, text in texts.items():
            line = f"{stage}: *{anchors[text]}" if text in anchors else f"{stage}: {text}"
            if text not in anchors and number_of[text] > 1:
                anchors[text], line = stage, f"{stage}: &{stage} {text}"
            lines.append(line if self.place(stage).partition else f"# {line}")
        return lines


def render(site: Site) -> str:
    """The profile's config.yaml."""
    loader = PackageLoader("cellmill", "preflight")
    environment = Environment(
        loader=loader, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )

    def note(name: str, general: str = "") -> str:
        said = "; ".join(filter(None, (general, site.why.get(name))))
        return f" # {said}" if said else ""

    def aligned(line: re.Match[str]) -> str:
        return f"{line[1].ljust(max(COMMENTS_AT, len(line[1]) + 2))}# {line[2]}"

    template = environment.get_template("profile_template.yaml")
    text = template.render(site=site, machine=site.machine, retries=RETRIES, note=note, text=quoted)
    return (
        re.sub(r"^( *(?:# )?[\w-]+:.*?) # (.*)$", aligned, text.rstrip("\n"), flags=re.MULTILINE)
        + "\n"
    )


def quoted(text: str) -> str:
    """`text` as YAML in which Snakemake reads a text: in both quotes if it could be Python, as
    `all` and 2-4 are.
    """
    inner = _inner(text)
    plain = re.fullmatch(r"[A-Za-z][\w.,:/-]*", inner) and yaml.safe_load(f"k: {inner}") == {
        "k": inner
    }
    return inner if plain else f'"{inner}"'


def _inner(text: str) -> str:
    """`text`, in quotes unless Snakemake evaluates it to a text or number that prints the same."""
    try:
        stays = str(evaluate(assigned(f"text={text}"))["text"]) == text
    except Exception:  # whatever the expression raises
        stays = False
    return text if stays else f"'{text}'"


def _flow(keys: Mapping[str, str | int]) -> str:
    """A mapping in one line of YAML."""
    return str(
        yaml.safe_dump(dict(keys), default_flow_style=True, sort_keys=False, width=math.inf)
    ).strip()


def choose_values(facts: SlurmFacts, request: Request, name: str) -> Site:
    """Every value of the profile `name`. Raises UserError if SLURM has no such machine."""
    offer, why_train = choose_training(facts, request)
    partition, why_stages = choose_for_stages(facts, offer.partition)
    account, why_account = _account(facts, request, offer.partition)
    qos, why_qos = (request.qos, "--qos") if request.qos else _qos(facts, offer.partition, account)
    same = partition.name == offer.partition.name
    stages_qos, why_stages_qos = (qos, why_qos) if same else _qos(facts, partition, account)
    (status, why_status), (device, why_device) = _status_command(facts), _device(offer)

    def place(partition: Partition, nodes: list[Node], qos: str) -> Place:
        """The partition with the most that a job of one node may request there."""
        memory = [node.usable_mb for node in nodes]
        cpus = max(node.cpus for node in nodes)
        limit_min, _ = facts.limit(partition, account, qos)
        return Place(partition.name, qos, limit_min, max(memory) if all(memory) else 0, cpus)

    stages = place(partition, partition.up, stages_qos)
    vectors = place(offer.partition, offer.nodes, qos) if offer.gpus else stages
    limits = [
        f"at most {'any time' if each.limit_min is None else f'{each.limit_min} min'}"
        f"{f' and {each.mem_mb} MB' if each.mem_mb else ''} in partition {each.partition}"
        for each in dict.fromkeys((stages, vectors))
    ]
    limit, source = facts.limit(offer.partition, account, qos)
    runtime = max(1, min(limit or DAY_MIN, DAY_MIN))
    below = "limit" if runtime == limit else f"a day, below the limit of {limit} min"
    shares = [offer.gpus / node.gpus_of("") if offer.gpus else 1.0 for node in offer.nodes]
    select = facts.configuration.get("SelectType", "select/cons_tres")
    gres_only = select != "select/cons_tres"  # others do not know --gpus-per-node and --gpus
    gpus = ":".join(filter(None, (offer.kind, str(offer.gpus)))) if offer.gpus else ""
    counts = sorted({node.gpus[offer.kind] for node in offer.nodes} if offer.gpus else ())
    why_gpus = f"{'slices cannot form one training; ' if offer.sliced else ''}of {' or '.join(map(str, counts))} on a "
    why_gpus += (
        f"node (scontrol){f'; {select} supports only --gres (scontrol)' if gres_only else ''}"
    )
    one_each = "one process per GPU" if offer.gpus else "no GPUs: one process on the node's cores"
    chosen: dict[str, tuple[str | int, str]] = {
        "launcher": ("slurm", ""),
        "nodes": (request.nodes or "1", ""),
        "nproc_per_node": (offer.gpus or 1, one_each),
        "slurm_partition": (offer.partition.name, why_train),
        "slurm_account": (account, why_account),
        "qos": (qos, why_qos),
        "gres" if gres_only else "gpus_per_node": (
            f"gpu:{gpus}" if gpus and gres_only else gpus,
            why_gpus,
        ),
        "runtime": (
            runtime,
            f"{'a day; there is no limit' if limit is None else below} of {source}",
        ),
        "mem_mb": _memory(offer, shares),
        "cpus_per_task": (
            max(1, int(min(node.cpus * share for node, share in zip(offer.nodes, shares)))),
            f"{'all' if set(shares) == {1} else 'the share of its GPUs'} of the smallest node (scontrol)",
        ),
        "save_within_s": (min(SAVE_WITHIN_S, 15 * runtime), ""),
    }
    options = {key: value for key, (value, _) in chosen.items()}
    machine: Machine = check_options(Machine, options, f"partition {offer.partition.name}")
    gpus = machine.gpus_per_node or machine.gres
    return Site(
        head=f"# Nodes of partition {machine.slurm_partition}{gpus and f' with GPUs {gpus}'}, written by "
        f"`cellmill profiles new {name}`\n# from the answers of scontrol and sacctmgr, named in brackets. "
        f"`cellmill preflight --profile {name}` checks "
        "it;\n# profiles/README.md explains each key, which is an option of `snakemake`.",
        machine=machine,
        device=device,
        stages=stages,
        vectors=vectors,
        gpu=_one_gpu(offer, qos, gres_only) if offer.gpus else {},
        status_command=status,
        why={key: reason for key, (_, reason) in chosen.items()}
        | {
            "status_command": why_status,
            "stages_partition": why_stages,
            "stages_qos": why_stages_qos,
            "growth": "; ".join(limits),
            "device": why_device,
            "gpu": "this site supports only --gres"
            if gres_only
            else "gpu_model is the site's name of it (scontrol)",
        },
    )


def _one_gpu(offer: Offer, qos: str, gres_only: bool) -> dict[str, str | int]:
    """Keys of a stage on one GPU."""
    keys: dict[str, str | int] = {"slurm_partition": _inner(offer.partition.name)}
    if qos:
        keys["qos"] = _inner(qos)
    # as the plugin accepts it
    kind = offer.kind if re.fullmatch(r"[A-Za-z0-9_.]+", offer.kind) else ""
    if gres_only:
        keys["gres"] = _inner(f"gpu:{kind}:1" if kind else "gpu:1")
    else:
        keys |= {"gpu": 1} | ({"gpu_model": _inner(kind)} if kind else {})
    return keys | {"tasks_per_gpu": 0}


def _memory(offer: Offer, shares: list[float]) -> tuple[int, str]:
    """All memory of a node, or the share of the smallest that goes with the GPUs."""
    usable = [node.usable_mb for node in offer.nodes]
    if not all(usable):
        return 0, "SLURM does not manage memory here (scontrol)"
    if any(share != 1 for share in shares):
        least = min(megabytes * share for megabytes, share in zip(usable, shares))
        return int(least), "per node: the share of its GPUs, of the smallest node (scontrol)"
    if any(node.usable_mb < node.memory_mb for node in offer.nodes):
        return min(usable), f"limit of partition {offer.partition.name} per node (scontrol)"
    return 0, f"all of a node's memory, {min(usable)} MB or more (scontrol)"


def _account(facts: SlurmFacts, request: Request, partition: Partition) -> Reasoned:
    if request.account:
        return request.account, "--account"
    if not facts.accounts:
        return "", "not needed: sacctmgr knows none of yours"
    accepted = partition.accounts
    mine = sorted(name for name in facts.accounts if accepted is None or name in accepted)
    if facts.default_account in mine:
        return facts.default_account, "your default account (sacctmgr)"
    if len(mine) == 1:
        of_several = f" that partition {partition.name} accepts" if len(facts.accounts) > 1 else ""
        return mine[0], f"your only account{of_several} (sacctmgr)"
    return (
        "",
        f"one of {', '.join(mine or sorted(facts.accounts))} (sacctmgr); --account chooses it",
    )


def _qos(facts: SlurmFacts, partition: Partition, account: str) -> Reasoned:
    """A QOS of this user, if the partition does not accept every one."""
    both = sorted(
        facts.qos_of(account) & (partition.qos or set()), key=lambda name: (name != "normal", name)
    )
    return (
        (both[0], f"one of yours that partition {partition.name} accepts (scontrol)")
        if both
        else ("", "")
    )


def _status_command(facts: SlurmFacts) -> Reasoned:
    if not facts.no_accounting:
        return "sacct", "it answers, also while the controller does not"
    text = facts.configuration.get("MinJobAge", "unknown")
    age = re.match(r"\d+", text)
    early = ", so squeue may forget a job before its end was seen: have it raised"
    advice = early if age is not None and int(age[0]) < LEAST_JOB_AGE_S else ""
    return (
        "squeue",
        f"no accounting ({facts.no_accounting}); MinJobAge is {text} (scontrol){advice}",
    )


def _device(offer: Offer) -> Reasoned:
    """The planner's device for the type of the GPUs, or for a feature of their nodes where the type
    has no name.
    """
    if not offer.gpus:
        return "cpu", ""
    features = sorted(frozenset.intersection(*(node.features for node in offer.nodes)))
    for name, source in ((offer.kind, "type"), *((feature, "feature") for feature in features)):
        known = known_device(name)
        if known:
            slice_ = "; a slice has less memory than it assumes" if offer.sliced else ""
            # such as gpu_40gb beside a100; 40g may be the network's
            named = [feature for feature in features if "gb" in feature.lower() and sizes_of(known)]
            sized = {
                known_device(f"{known} {feature}"): f" and feature {feature}" for feature in named
            }
            sized.pop(known, None)
            if len(sized) == 1 and not offer.sliced:
                ((known, more),) = sized.items()
                return known, f"{source} {name}{more} of the nodes (scontrol)"
            assumed = (
                "" if offer.sliced or not assumption(known) else f"; assumed: {assumption(known)}"
            )
            return known, f"{source} {name} of the nodes (scontrol){slice_}{assumed}"
    called = f"GPU type {offer.kind} (scontrol)" if offer.kind else "GPUs without a type (scontrol)"
    return ASSUMED, f"assumed: the planner does not know {called}; {assumption(ASSUMED)}"
