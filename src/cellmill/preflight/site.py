"""A SLURM site as SLURM's commands describe it: partitions, nodes, accounts, an estimated start.

Nothing is queued. Every value reaches SLURM's commands as one argument of a list. An answer that cannot be parsed is a
CommandError; nothing is concluded from it.
"""

import getpass
import grp
import os
import re
import sys
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field

from cellmill.config.machine import Machine, flags, gpus_in
from cellmill.errors import UserError
from cellmill.launch.submit import TRANSIENT, sbatch_options, submitting
from cellmill.runs.slurm import CommandError, ask, call, on_cluster, parse_duration

Fields = dict[str, str]
"""Fields of one of scontrol's records, by name."""
Records = dict[str, Fields]
_DOWN = set(
    "DOWN DRAIN DRAINED DRAINING FAIL FAILING FUTURE INVALID INVALID_REG MAINT MAINTENANCE UNKNOWN ERROR "
    "NOT_RESPONDING".split()
)
"""States of a node on which SLURM places no job. Not among them: powered down, since a job starts
the node, and blocked, which ends with another job.
"""


class Refused(Exception):
    """SLURM would not accept the job, for the reason in the text."""


@dataclass(frozen=True)
class Node:
    """One node of one partition."""

    up: bool  # jobs may be placed on it, now or once others have ended
    gpus: dict[str, int]  # number of GPUs by type; "" for GPUs without one
    cpus: int  # cores that a job may request, without those reserved for the system
    memory_mb: int
    usable_mb: int  # memory that a job may request; 0 if SLURM does not manage memory
    features: frozenset[str]

    def count_gpus(self, kind: str) -> int:
        """Number of GPUs of a type; of all types for ""."""
        return sum(number for name, number in self.gpus.items() if kind in ("", name))


@dataclass(frozen=True)
class Partition:
    """A partition and its limits; None for none."""

    name: str
    default: bool
    state: str  # up, down, drain or inactive
    limit_min: int | None
    nodes: list[Node]
    max_nodes: int | None = None
    accounts: frozenset[str] | None = None  # accounts that may use it
    qos: frozenset[str] | None = None  # QOS that may be used in it
    groups: frozenset[str] | None = None  # groups whose users may use it
    own_qos: str = ""  # QOS whose limits all its jobs have
    mb_per_cpu: int | None = None  # most memory that a job may request per CPU
    mb_per_gpu: int | None = None  # memory that a job gets per GPU by default
    reserved: bool = False  # hidden, or for root or reservations only

    @property
    def up(self) -> list[Node]:
        """Nodes that are up."""
        return [node for node in self.nodes if node.up]

    @property
    def has_gpus(self) -> bool:
        """True if a node that is up has GPUs."""
        return any(node.gpus for node in self.up)


@dataclass
class SlurmFacts:
    """SLURM's answers."""

    partitions: dict[str, Partition]
    configuration: dict[str, str]  # SLURM's own, by key: SelectType, MinJobAge …
    no_accounting: str = ""  # the reason, if sacct has nothing to read
    accounts: dict[str, set[str]] = field(default_factory=dict)  # QOS of each account of this user
    default_account: str = ""
    # minutes that a job may take in each QOS with such a limit
    qos_min: dict[str, int] = field(default_factory=dict)
    groups: set[str] = field(default_factory=set)  # Unix groups of this user

    def usable(self) -> list[Partition]:
        """Partitions that are up, have a node that is up, and accept this user."""
        usable = []
        for partition in self.partitions.values():
            is_open = partition.state == "up" and partition.up and not partition.reserved
            if is_open and self._is_accepted(partition):
                usable.append(partition)
        return usable

    def _is_accepted(self, partition: Partition) -> bool:
        """True if the partition accepts an account, a QOS and a group of this user, if known."""
        for allowed, mine in (
            (partition.accounts, self.accounts.keys()),
            (partition.qos, self.list_qos("")),
            (partition.groups, self.groups),
        ):
            if mine and allowed is not None and not allowed & mine:
                return False
        return True

    def list_qos(self, account: str) -> set[str]:
        """QOS of an account of this user; of all accounts if it is unknown."""
        if account in self.accounts:
            return self.accounts[account]
        return set().union(*self.accounts.values())

    def limit(self, partition: Partition, account: str, qos: str) -> tuple[int | None, str]:
        """Minutes that a job may take, None for no limit, and where that is from.

        Without a named QOS it is known only to a user whose account has a single QOS.
        """
        named = {qos} if qos else self.accounts.get(account, set())
        limits = {f"partition {partition.name} (scontrol)": partition.limit_min}
        for name in {partition.own_qos} | (named if len(named) == 1 else set()):
            limits[f"QOS {name} (sacctmgr)"] = self.qos_min.get(name)
        source = min(limits, key=lambda name: limits[name] or sys.maxsize)
        return limits[source], source


def ask_slurm(cluster: str = "") -> SlurmFacts:
    """SLURM's answers, of `cluster` if the site has several.

    Raise UserError in one line if a command is missing or the controller does not answer.
    """
    try:
        rules = _records("partition", "PartitionName", cluster)
        nodes = _records("node", "NodeName", cluster)
        configuration = {}
        for line in ask(["scontrol", *on_cluster(cluster, "show", "config")]).splitlines():
            key, equals, value = line.partition("=")
            if equals:
                configuration[key.strip()] = value.strip()
        partitions = _partitions(rules, nodes, configuration)
    except CommandError as error:
        remedy = "try again when SLURM's controller answers"
        if str(error).endswith("not on PATH"):
            remedy = "run this on a login node of the cluster"
        raise UserError(f"{error}; {remedy}") from None
    facts = SlurmFacts(partitions, configuration)
    try:
        ask(["sacct", *on_cluster(cluster), "-n", "-X", "-P", "-S", "now", "-o", "JobID"])
    except CommandError as error:
        facts.no_accounting = str(error)
    with suppress(CommandError):  # without them a profile names no account
        _add_accounts(facts, getpass.getuser())
    for number in {os.getgid(), *os.getgroups()}:
        with suppress(KeyError):  # a group without a name
            facts.groups.add(grp.getgrgid(number).gr_name)
    return facts


def _add_accounts(facts: SlurmFacts, user: str) -> None:
    """Add the user's accounts and the limits of QOS, by sacctmgr."""
    accounts: dict[str, set[str]] = defaultdict(set)
    associations = _sacctmgr(3, "assoc", f"user={user}", "format=Account,Partition,QOS")
    for account, _, qos in associations:
        accounts[account] |= set(qos.split(",")) - {""}
    defaults = _sacctmgr(1, "user", user, "format=DefaultAccount")
    for name, text in _sacctmgr(2, "qos", "format=Name,MaxWall"):
        limit_min = parse_minutes(text or "UNLIMITED")
        if limit_min is not None:
            facts.qos_min[name] = limit_min
    names = [name for (name,) in defaults if name != "(null)"]
    facts.default_account = names[0] if names else ""
    facts.accounts = {name: qos for name, qos in accounts.items() if name}


def _partitions(
    rules: Records,
    nodes: Records,
    configuration: Fields,
) -> dict[str, Partition]:
    """Partitions by name, with their nodes, from scontrol's records of both."""
    partitions = {
        name: Partition(
            name,
            default=rule.get("Default") == "YES",
            state=rule.get("State", "up").lower(),
            limit_min=parse_minutes(rule.get("MaxTime", "UNLIMITED")),
            nodes=[],
            max_nodes=parse_limit(rule.get("MaxNodes")),
            accounts=_names(rule.get("AllowAccounts")),
            qos=_names(rule.get("AllowQos")),
            groups=_names(rule.get("AllowGroups")),
            own_qos=",".join(_names(rule.get("QoS")) or ()),
            mb_per_cpu=_memory_limits(rule)[1],
            mb_per_gpu=parse_limit(rule.get("JobDefaults", "").partition("DefMemPerGPU=")[2]),
            reserved="YES" in (rule.get("Hidden"), rule.get("RootOnly"), rule.get("ReqResv")),
        )
        for name, rule in rules.items()
    }
    for fields in nodes.values():
        for name in partitions.keys() & fields.get("Partitions", "").split(","):
            partitions[name].nodes.append(_node(fields, rules[name], configuration))
    return partitions


def _node(fields: Fields, rule: Fields, configuration: Fields) -> Node:
    """A node of the partition with `rule`, by scontrol's records."""
    state = fields.get("State", "")
    cpu_limits = (
        parse_limit(fields.get("CPUEfctv") or fields.get("CPUTot")),
        parse_limit(rule.get("MaxCPUsPerNode")),
    )
    cpus = min(filter(None, cpu_limits), default=0)
    memory_mb = parse_limit(fields.get("RealMemory")) or 0
    mb_per_node, mb_per_cpu = _memory_limits(rule)
    # the cluster's limits hold if the partition sets none
    if mb_per_node is None and mb_per_cpu is None:
        mb_per_node, mb_per_cpu = _memory_limits(configuration)
    usable_mb = 0  # an unset RealMemory is 1
    if memory_mb > 1:
        usable_mb = min(filter(None, (memory_mb, mb_per_node, mb_per_cpu and mb_per_cpu * cpus)))
    return Node(
        # SLURM before 21.08 writes IDLE* for IDLE+NOT_RESPONDING
        up="*" not in state and not _DOWN & set(re.findall("[A-Z_]+", state)),
        gpus=gpus_in(fields.get("Gres", "")),
        cpus=cpus,
        memory_mb=memory_mb,
        usable_mb=usable_mb,
        features=frozenset(fields.get("AvailableFeatures", "").split(",")) - {"(null)", ""},
    )


def _memory_limits(fields: Fields) -> tuple[int | None, int | None]:
    """MB of memory that a job may request on a node, and for each of its CPUs."""
    return parse_limit(fields.get("MaxMemPerNode")), parse_limit(fields.get("MaxMemPerCPU"))


def _records(kind: str, key: str, cluster: str) -> Records:
    """Fields of each line of `scontrol -o show KIND` by name.

    Of a value with spaces (Reason, OS) only the first word is kept.
    """
    records = {}
    answer = ask(["scontrol", *on_cluster(cluster), "-a", "-o", "show", kind])
    for line in filter(str.strip, answer.splitlines()):
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if key not in fields:
            raise CommandError(f"scontrol answered {' '.join(answer.splitlines())[:80]!r}")
        records[fields[key]] = fields
    return records


def _sacctmgr(columns: int, *what: str) -> list[list[str]]:
    """Rows of `sacctmgr show`. Raise CommandError for a row of another number of columns."""
    answer = ask(["sacctmgr", "-n", "-P", "show", *what])
    rows = []
    for line in filter(str.strip, answer.splitlines()):
        row = [cell.strip() for cell in line.split("|")]
        if len(row) != columns:
            raise CommandError(f"sacctmgr answered {answer.strip()[:80]!r}")
        rows.append(row)
    return rows


def parse_limit(text: str | None) -> int | None:
    """The number of a limit; None for UNLIMITED, N/A, (null), 0 or none."""
    match = re.match(r"\d+", text or "")
    return int(match[0]) or None if match else None


def _names(text: str | None) -> frozenset[str] | None:
    """The names of a list; None if it allows all."""
    return None if text in (None, "ALL", "N/A", "(null)") else frozenset(text.split(","))


def estimate_start(machine: Machine) -> str:
    """Expected start and node of a training's job, by `sbatch --test-only`.

    Raise Refused with SLURM's reason, CommandError without an answer.
    """
    options = ["--job-name=cellmill-preflight", *flags(sbatch_options(machine)), "--wrap=true"]
    with submitting(machine):
        done = call(["sbatch", "--test-only", *options])
    lines = filter(str.strip, done.stderr.splitlines())
    answer = " ".join(line.removeprefix("sbatch: ") for line in lines)
    if done.returncode:
        if TRANSIENT.search(answer):
            raise CommandError(f"sbatch --test-only: {answer[:200]}")
        raise Refused(answer.replace("error: ", "")[:300])
    match = re.search(r"to start at (\S+).*?(?: on nodes? (\S+))?(?: in partition|$)", answer)
    if match is None:
        raise CommandError(f"sbatch --test-only answered {answer[:80]!r}")
    start = match[1].replace("T", " ")
    return f"{start} on {match[2]}" if match[2] else start


def parse_minutes(text: str) -> int | None:
    """Minutes of SLURM's `days-hours:minutes:seconds`, without leading parts; None for no limit."""
    if text in ("infinite", "UNLIMITED", "n/a"):
        return None
    limit_s = parse_duration(text)
    if limit_s is None:
        raise CommandError(f"SLURM: expected a time limit, got {text[:40]!r}")
    return int(limit_s) // 60
