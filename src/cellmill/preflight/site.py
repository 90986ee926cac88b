"""A SLURM site by the answers of SLURM's commands: partitions, nodes, accounts, an estimated start.

No job is queued. Every value reaches SLURM's commands as one argument of a list. An answer that
cannot be parsed raises CommandError; nothing is concluded from it.
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
"""States of a node on which SLURM places no job. Powered down is not one of them, since a job starts
the node, nor is blocked, which ends with another job.
"""


class Refused(Exception):
    """SLURM does not accept a job; the text is its reason."""


@dataclass(frozen=True)
class Node:
    """One node of one partition."""

    up: bool  # jobs may be placed on it, now or once others have ended
    gpus: dict[str, int]  # number of GPUs by type; "" for GPUs without a type
    cpus: int  # cores that a job may request, without those reserved for the system
    memory_mb: int
    usable_mb: int  # memory that a job may request; 0 if SLURM does not manage memory
    features: frozenset[str]

    def count_gpus(self, kind: str) -> int:
        """Count the GPUs of a type, or all GPUs for ""."""
        return sum(number for name, number in self.gpus.items() if kind in ("", name))


@dataclass(frozen=True)
class Partition:
    """A partition and its limits; a limit of None is no limit."""

    name: str
    default: bool
    state: str  # up, down, drain or inactive
    limit_min: int | None
    nodes: list[Node]
    max_nodes: int | None = None
    accounts: frozenset[str] | None = None  # accounts that may use it
    qos: frozenset[str] | None = None  # QOS that may be used in it
    groups: frozenset[str] | None = None  # groups whose users may use it
    partition_qos: str = ""  # QOS whose limits hold for all jobs of the partition
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
    # QOS that this user may use, by account
    accounts: dict[str, set[str]] = field(default_factory=dict)
    default_account: str = ""
    # minutes that a job may take, by QOS with such a limit
    qos_limits_min: dict[str, int] = field(default_factory=dict)
    groups: set[str] = field(default_factory=set)  # Unix groups of this user

    def list_usable(self) -> list[Partition]:
        """List the partitions that are up, have a node that is up, and accept this user."""
        usable = []
        for partition in self.partitions.values():
            is_open = partition.state == "up" and partition.up and not partition.reserved
            if is_open and self._is_accepted(partition):
                usable.append(partition)
        return usable

    def _is_accepted(self, partition: Partition) -> bool:
        """Return whether the partition accepts an account, a QOS and a group of this user, if known."""
        for allowed, mine in (
            (partition.accounts, self.accounts.keys()),
            (partition.qos, self.list_qos("")),
            (partition.groups, self.groups),
        ):
            if mine and allowed is not None and not allowed & mine:
                return False
        return True

    def list_qos(self, account: str) -> set[str]:
        """List the QOS of an account of this user; of all accounts if the account is unknown."""
        if account in self.accounts:
            return self.accounts[account]
        return set().union(*self.accounts.values())

    def limit(self, partition: Partition, account: str, qos: str) -> tuple[int | None, str]:
        """Find the minutes that a job may take, None for no limit, and the source of the limit.

        If `qos` is empty, the limit of a QOS counts only if the account has a single QOS.
        """
        job_qos = {qos} if qos else self.accounts.get(account, set())
        limits = {f"partition {partition.name} (scontrol)": partition.limit_min}
        for name in {partition.partition_qos} | (job_qos if len(job_qos) == 1 else set()):
            limits[f"QOS {name} (sacctmgr)"] = self.qos_limits_min.get(name)
        source = min(limits, key=lambda name: limits[name] or sys.maxsize)
        return limits[source], source


def ask_slurm(cluster: str = "") -> SlurmFacts:
    """Ask SLURM about the site, or about `cluster` if the site has several.

    Raise UserError in one line if a command is missing or the controller does not answer.
    """
    try:
        partition_records = _read_records("partition", "PartitionName", cluster)
        node_records = _read_records("node", "NodeName", cluster)
        configuration = {}
        for line in ask(["scontrol", *on_cluster(cluster, "show", "config")]).splitlines():
            key, equals, value = line.partition("=")
            if equals:
                configuration[key.strip()] = value.strip()
        partitions = _make_partitions(partition_records, node_records, configuration)
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
    # one database may serve several clusters
    cluster = facts.configuration.get("ClusterName", "")
    query = [f"user={user}", *([f"clusters={cluster}"] if cluster else [])]
    associations = _read_sacctmgr(3, "assoc", *query, "format=Account,Partition,QOS")
    for account, _, qos in associations:
        accounts[account] |= set(qos.split(",")) - {""}
    defaults = _read_sacctmgr(1, "user", user, "format=DefaultAccount")
    for name, text in _read_sacctmgr(2, "qos", "format=Name,MaxWall"):
        limit_min = parse_minutes(text or "UNLIMITED")
        if limit_min is not None:
            facts.qos_limits_min[name] = limit_min
    names = [name for (name,) in defaults if name != "(null)"]
    facts.default_account = names[0] if names else ""
    facts.accounts = {name: qos for name, qos in accounts.items() if name}


def _make_partitions(
    partition_records: Records, node_records: Records, configuration: Fields
) -> dict[str, Partition]:
    """Make the partitions with their nodes, by name, from the records of scontrol."""
    partitions = {
        name: Partition(
            name,
            default=record.get("Default") == "YES",
            state=record.get("State", "up").lower(),
            limit_min=parse_minutes(record.get("MaxTime", "UNLIMITED")),
            nodes=[],
            max_nodes=parse_limit(record.get("MaxNodes")),
            accounts=_split_names(record.get("AllowAccounts")),
            qos=_split_names(record.get("AllowQos")),
            groups=_split_names(record.get("AllowGroups")),
            partition_qos=",".join(_split_names(record.get("QoS")) or ()),
            mb_per_cpu=_memory_limits(record)[1],
            mb_per_gpu=parse_limit(record.get("JobDefaults", "").partition("DefMemPerGPU=")[2]),
            reserved="YES" in (record.get("Hidden"), record.get("RootOnly"), record.get("ReqResv")),
        )
        for name, record in partition_records.items()
    }
    for fields in node_records.values():
        for name in partitions.keys() & fields.get("Partitions", "").split(","):
            node = _make_node(fields, partition_records[name], configuration)
            partitions[name].nodes.append(node)
    return partitions


def _make_node(fields: Fields, partition: Fields, configuration: Fields) -> Node:
    """Make a node of a partition from scontrol's records of both, and SLURM's configuration."""
    state = fields.get("State", "")
    cpu_limits = (
        parse_limit(fields.get("CPUEfctv") or fields.get("CPUTot")),
        parse_limit(partition.get("MaxCPUsPerNode")),
    )
    cpus = min(filter(None, cpu_limits), default=0)
    # MemSpecLimit is what SLURM keeps for the system
    memory_mb = parse_limit(fields.get("RealMemory")) or 0
    memory_mb = max(0, memory_mb - (parse_limit(fields.get("MemSpecLimit")) or 0))
    mb_per_node, mb_per_cpu = _memory_limits(partition)
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
    """Return how many MB of memory a job may request per node, and per CPU; None for no limit."""
    return parse_limit(fields.get("MaxMemPerNode")), parse_limit(fields.get("MaxMemPerCPU"))


def _read_records(kind: str, key: str, cluster: str) -> Records:
    """Read the records of `scontrol -o show KIND`, by their field `key`.

    Only the first word of a value with spaces (Reason, OS) is kept.
    """
    records = {}
    answer = ask(["scontrol", *on_cluster(cluster), "-a", "-o", "show", kind])
    for line in filter(str.strip, answer.splitlines()):
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if key not in fields:
            raise CommandError(f"scontrol answered {' '.join(answer.splitlines())[:80]!r}")
        records[fields[key]] = fields
    return records


def _read_sacctmgr(n_columns: int, *query: str) -> list[list[str]]:
    """Read the rows of `sacctmgr show`. Raise CommandError if one does not have `n_columns` columns."""
    answer = ask(["sacctmgr", "-n", "-P", "show", *query])
    rows = []
    for line in filter(str.strip, answer.splitlines()):
        row = [cell.strip() for cell in line.split("|")]
        if len(row) != n_columns:
            raise CommandError(f"sacctmgr answered {answer.strip()[:80]!r}")
        rows.append(row)
    return rows


def parse_limit(text: str | None) -> int | None:
    """Parse a limit; None for UNLIMITED, N/A, (null), 0 or a missing one."""
    match = re.match(r"\d+", text or "")
    return int(match[0]) or None if match else None


def _split_names(text: str | None) -> frozenset[str] | None:
    """Split a list of names; None if it allows all."""
    return None if text in (None, "ALL", "N/A", "(null)") else frozenset(text.split(","))


def estimate_start(machine: Machine) -> str:
    """Ask `sbatch --test-only` for the expected start and node of a training's job.

    Raise Refused with SLURM's reason if it does not accept the job, CommandError without an answer.
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
    """Parse SLURM's `days-hours:minutes:seconds`, whose first parts may be missing; None for no limit."""
    if text in ("infinite", "UNLIMITED", "n/a"):
        return None
    limit_s = parse_duration(text)
    if limit_s is None:
        raise CommandError(f"SLURM: expected a time limit, got {text[:40]!r}")
    return int(limit_s) // 60
