"""Resources of a SLURM site: partitions and nodes, accounts, an estimated start. Queues nothing.

Every value reaches SLURM's commands as one argument of a list. An answer that cannot be parsed is a CommandError;
nothing is concluded from it.
"""

import getpass
import grp
import os
import re
import sys
from collections import defaultdict
from dataclasses import dataclass, field, replace

from cellmill.config.machine import Machine, flags, gpus_in
from cellmill.errors import UserError
from cellmill.launch.submit import TRANSIENT, sbatch_options, submitting
from cellmill.runs.jobs import CommandError, ask, call, seconds

_DOWN = {"down", "drain", "drained", "draining", "fail", "failing", "future", "maint", "unknown", "error", "blocked"}


class Refused(Exception):
    """SLURM would not accept the job; its reason."""


@dataclass(frozen=True)
class Node:
    """One node of one partition."""

    name: str
    state: str
    gpus: dict[str, int]
    """Number of GPUs by type; "" for GPUs without one."""
    cpus: int
    memory_mb: int
    features: frozenset[str]

    @property
    def up(self) -> bool:
        """True if jobs may be placed on it, now or once others have ended."""
        # flags follow the word: * not responding; ~ and # powered down, started for a job
        return self.state.rstrip("*~#!%$@^+-").lower() not in _DOWN and "*" not in self.state

    def gpus_of(self, kind: str) -> int:
        """Number of GPUs of a type; of all types for ""."""
        return sum(number for name, number in self.gpus.items() if kind in ("", name))


@dataclass(frozen=True)
class Partition:
    name: str
    default: bool
    state: str
    """up, or another of sinfo's states."""
    limit_min: int | None
    """Time limit; None for none."""
    nodes: list[Node]


@dataclass(frozen=True)
class Rules:
    """Limits of a partition that sinfo does not print; None for none."""

    max_nodes: int | None = None
    max_cpus: int | None = None
    """Per node."""
    max_mem_mb: int | None = None
    """Per node."""
    max_mem_per_cpu_mb: int | None = None
    accounts: frozenset[str] | None = None
    """Accounts that may use it."""
    qos: frozenset[str] | None = None
    """QOS that may be used in it."""
    groups: frozenset[str] | None = None
    """Groups whose users may use it."""
    own_qos: str = ""
    """QOS whose limits all its jobs have."""
    reserved: bool = False
    """Hidden, or for root or reservations only."""


def ask_partitions() -> dict[str, Partition]:
    """Every partition visible to this user, by name. Raises CommandError."""
    answer = ask(["sinfo", "-h", "-a", "-N", "-o", "%N|%P|%a|%l|%T|%c|%m|%G|%f"])
    known: dict[str, Partition] = {}
    for line in answer.splitlines():
        cells = [cell.strip() for cell in line.split("|", 8)]
        if len(cells) != 9 or not re.fullmatch(r"\d+\+?", cells[5]) or not re.fullmatch(r"\d+\+?", cells[6]):
            raise CommandError(f"sinfo answered {line.strip()[:80]!r}")
        name = cells[1].removesuffix("*")
        node = Node(
            name=cells[0],
            state=cells[4],
            gpus=gpus_in(cells[7]),
            cpus=int(cells[5].rstrip("+")),
            memory_mb=int(cells[6].rstrip("+")),
            features=frozenset(cells[8].split(",")) - {"(null)", ""},
        )
        partition = Partition(name, cells[1].endswith("*"), cells[2], minutes(cells[3]), [])
        known.setdefault(name, partition).nodes.append(node)
    return known


def partition_rules() -> dict[str, Rules]:
    """Limits of every partition by its name. Raises CommandError."""
    known = {}
    for fields in _records(["scontrol", "-a", "-o", "show", "partition"], "PartitionName"):
        known[fields["PartitionName"]] = Rules(
            max_nodes=limit(fields.get("MaxNodes")),
            max_cpus=limit(fields.get("MaxCPUsPerNode")),
            max_mem_mb=limit(fields.get("MaxMemPerNode")),
            max_mem_per_cpu_mb=limit(fields.get("MaxMemPerCPU")),
            accounts=_names(fields.get("AllowAccounts")),
            qos=_names(fields.get("AllowQos")),
            groups=_names(fields.get("AllowGroups")),
            own_qos=",".join(_names(fields.get("QoS")) or ()),
            reserved="YES" in (fields.get("Hidden"), fields.get("RootOnly"), fields.get("ReqResv")),
        )
    return known


def usable_cpus() -> dict[str, int]:
    """CPUs of each node that jobs may use: without cores reserved for the system. Raises CommandError."""
    nodes = _records(["scontrol", "-a", "-o", "show", "node"], "NodeName")
    return {node["NodeName"]: int(node.get("CPUEfctv") or node.get("CPUTot") or 0) for node in nodes}


def ask_configuration() -> dict[str, str]:
    """SLURM's configuration by key: SelectType, MinJobAge … Raises CommandError."""
    pairs = (line.partition("=") for line in ask(["scontrol", "show", "config"]).splitlines())
    return {key.strip(): value.strip() for key, equals, value in pairs if equals}


def default_account() -> str:
    """Account that SLURM charges if none is named; empty if accounting has none. Raises CommandError."""
    answer = ask(["sacctmgr", "-n", "-P", "show", "user", getpass.getuser(), "format=DefaultAccount"])
    return next((line.strip() for line in answer.splitlines() if line.strip() not in ("", "(null)")), "")


def qos_limits() -> dict[str, int]:
    """Minutes that a job may take in each QOS that has such a limit. Raises CommandError."""
    answer = ask(["sacctmgr", "-n", "-P", "show", "qos", "format=Name,MaxWall"])
    rows = (line.partition("|") for line in answer.splitlines() if line.strip())
    limits = {name: minutes(text.strip() or "UNLIMITED") for name, _, text in rows}
    return {name: limit for name, limit in limits.items() if limit is not None}


def associations() -> dict[str, set[str]]:
    """The QOS of each account that this user may charge; empty if accounting has none. Raises CommandError."""
    fields = "format=Account,Partition,QOS"
    answer = ask(["sacctmgr", "-n", "-P", "show", "assoc", f"user={getpass.getuser()}", fields])
    rows = [line.split("|") for line in answer.splitlines() if line.strip()]
    if any(len(row) != 3 for row in rows):
        raise CommandError(f"sacctmgr answered {answer.strip()[:80]!r}")
    known: dict[str, set[str]] = defaultdict(set)
    for account, _, qos in rows:
        known[account] |= set(qos.split(",")) - {""}
    return known


def accounting() -> None:
    """Raises CommandError if sacct has no accounting to read."""
    ask(["sacct", "-n", "-X", "-P", "-S", "now", "-o", "JobID"])


def estimate(machine: Machine) -> str:
    """Expected start time and node of a training's job on this machine, by SLURM (`sbatch --test-only`).

    Raises Refused with SLURM's reason, CommandError without an answer.
    """
    options = flags(sbatch_options(machine))
    with submitting(machine):
        done = call(["sbatch", "--test-only", "--job-name=cellmill-preflight", *options, "--wrap=true"])
    said = " ".join(line.removeprefix("sbatch: ") for line in done.stderr.splitlines() if line.strip())
    if done.returncode == 0:
        match = re.search(r"to start at (\S+).*?(?: on nodes? (\S+))?(?: in partition|$)", said)
        if match is None:
            raise CommandError(f"sbatch --test-only answered {said[:80]!r}")
        return f"{match[1].replace('T', ' ')}{f' on {match[2]}' if match[2] else ''}"
    if TRANSIENT.search(said):
        raise CommandError(f"sbatch --test-only: {said[:200]}")
    raise Refused(said.replace("error: ", "")[:300])


def minutes(text: str) -> int | None:
    """Minutes in SLURM's `days-hours:minutes:seconds`, with leading parts left out; None for no limit."""
    if text in ("infinite", "UNLIMITED", "n/a"):
        return None
    limit_s = seconds(text)
    if limit_s is None:
        raise CommandError(f"sinfo: expected a time limit, got {text[:40]!r}")
    return int(limit_s) // 60


def _records(command: list[str], key: str) -> list[dict[str, str]]:
    """The fields of each line of `scontrol -o show …`; words after a value's first (Reason, OS) are left out."""
    lines = [line for line in ask(command).splitlines() if line.strip()]
    records = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines]
    if any(key not in fields for fields in records):
        raise CommandError(f"scontrol answered {' '.join(lines)[:80]!r}")
    return records


def limit(text: str | None) -> int | None:
    """The number of a limit; None for UNLIMITED, N/A, (null), 0 or none."""
    match = re.match(r"\d+", text or "")
    return int(match[0]) or None if match else None


def _names(text: str | None) -> frozenset[str] | None:
    """The names of a list; None if it allows all."""
    return None if text in (None, "ALL", "N/A", "(null)") else frozenset(text.split(","))


@dataclass(frozen=True)
class SlurmFacts:
    """SLURM's answers."""

    partitions: dict[str, Partition]
    rules: dict[str, Rules]
    configuration: dict[str, str]
    no_accounting: str = ""
    """The reason, if sacct has nothing to read."""
    accounts: dict[str, set[str]] = field(default_factory=dict)
    """QOS of each account of this user."""
    default_account: str = ""
    qos_min: dict[str, int] = field(default_factory=dict)
    """Minutes that a job may take in each QOS that has such a limit."""
    groups: frozenset[str] = frozenset()
    """Unix groups of this user."""

    def rules_of(self, partition: Partition) -> Rules:
        return self.rules.get(partition.name, Rules())

    def usable(self) -> list[Partition]:
        """Partitions that are up, have a node that is up, and accept this user."""
        return [p for p in self.partitions.values() if p.state == "up" and up(p) and self._accepts(self.rules_of(p))]

    def _accepts(self, rules: Rules) -> bool:
        qos = set().union(*self.accounts.values())
        lists = ((rules.accounts, set(self.accounts)), (rules.qos, qos), (rules.groups, set(self.groups)))
        return not rules.reserved and all(not mine or allowed is None or allowed & mine for allowed, mine in lists)

    def limit(self, partition: Partition, account: str, qos: str) -> tuple[int | None, str]:
        """Minutes that a job may take, None for no limit, and where that is from.

        Without a named QOS it is known only to a user whose account has one.
        """
        named = {qos} if qos else self.accounts.get(account, set())
        applying = {self.rules_of(partition).own_qos} | (named if len(named) == 1 else set())
        limits = {f"partition {partition.name} (sinfo)": partition.limit_min}
        limits |= {f"QOS {name} (sacctmgr)": self.qos_min.get(name) for name in applying}
        source = min(limits, key=lambda name: limits[name] or sys.maxsize)
        return limits[source], source

    def memory_mb(self, partition: Partition, node: Node) -> int:
        """Memory that a job may request of a node; 0 if SLURM does not manage memory."""
        rules = self.rules_of(partition)
        by_cpu = rules.max_mem_per_cpu_mb and rules.max_mem_per_cpu_mb * self.cpus(partition, node)
        # an unset RealMemory is 1
        return 0 if node.memory_mb <= 1 else min(filter(None, (node.memory_mb, rules.max_mem_mb, by_cpu)))

    def cpus(self, partition: Partition, node: Node) -> int:
        """CPUs that a job may request of a node."""
        return min(filter(None, (node.cpus, self.rules_of(partition).max_cpus)))


def up(partition: Partition) -> list[Node]:
    """Nodes of a partition that are up."""
    return [node for node in partition.nodes if node.up]


def ask_slurm() -> SlurmFacts:
    """SLURM's answers. Raises UserError in one line if a command is missing or the controller does not answer."""
    try:
        partitions, rules = ask_partitions(), partition_rules()
        cpus, configuration = usable_cpus(), ask_configuration()
    except CommandError as error:
        missing = str(error).endswith("not on PATH")
        remedy = "run this on a login node of the cluster" if missing else "try again when SLURM's controller answers"
        raise UserError(f"{error}; {remedy}") from None
    if not partitions:
        raise UserError("sinfo lists no partition; expected at least one")
    try:
        accounting()
        no_accounting = ""
    except CommandError as error:
        no_accounting = str(error)
    try:
        accounts, default = associations(), default_account()
        qos_min = qos_limits()
    except CommandError:
        accounts, default, qos_min = {}, "", {}
    return SlurmFacts(
        partitions={name: _with_cpus(partition, cpus) for name, partition in partitions.items()},
        rules={name: _with_defaults(limits, configuration) for name, limits in rules.items()},
        configuration=configuration,
        no_accounting=no_accounting,
        accounts={name: qos for name, qos in accounts.items() if name},
        default_account=default,
        qos_min=qos_min,
        groups=frozenset(_groups()),
    )


def _with_cpus(partition: Partition, usable: dict[str, int]) -> Partition:
    """`partition` without the CPUs that are reserved for the system."""
    nodes = [replace(node, cpus=min(node.cpus, usable.get(node.name) or node.cpus)) for node in partition.nodes]
    return replace(partition, nodes=nodes)


def _with_defaults(rules: Rules, configuration: dict[str, str]) -> Rules:
    """`rules` with the cluster's limits of memory where the partition sets none."""
    if rules.max_mem_mb or rules.max_mem_per_cpu_mb:
        return rules
    per_node, per_cpu = (limit(configuration.get(f"MaxMemPer{what}")) for what in ("Node", "CPU"))
    return replace(rules, max_mem_mb=per_node, max_mem_per_cpu_mb=per_cpu)


def _groups() -> list[str]:
    """Names of this user's Unix groups; those without a name are left out."""
    names = []
    for number in {os.getgid(), *os.getgroups()}:
        try:
            names.append(grp.getgrgid(number).gr_name)
        except KeyError:
            continue
    return names
