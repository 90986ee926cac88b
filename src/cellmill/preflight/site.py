"""A SLURM site as SLURM's commands describe it: partitions and nodes, accounts, an estimated start.
Queues nothing.

Every value reaches SLURM's commands as one argument of a list. An answer that cannot be parsed is a
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
from cellmill.runs.slurm import CommandError, ask, call, parse_duration

_DOWN = set(
    "DOWN DRAIN DRAINED DRAINING FAIL FAILING FUTURE MAINT MAINTENANCE UNKNOWN ERROR BLOCKED "
    "NOT_RESPONDING".split()
)
"""Words of a node's state with which no job is placed on it. Powered down is not among them: a job
starts the node.
"""


class Refused(Exception):
    """SLURM would not accept the job; its reason."""


@dataclass(frozen=True)
class Node:
    """One node of one partition."""

    up: bool  # jobs may be placed on it, now or once others have ended
    gpus: dict[str, int]  # number of GPUs by type; "" for GPUs without one
    cpus: int  # that a job may request: without cores reserved for the system
    memory_mb: int
    usable_mb: int  # memory that a job may request; 0 if SLURM does not manage memory
    features: frozenset[str]

    def gpus_of(self, kind: str) -> int:
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

        def accepts(part: Partition) -> bool:
            lists = (
                (part.accounts, self.accounts.keys()),
                (part.qos, self.qos_of("")),
                (part.groups, self.groups),
            )
            return all(not mine or allowed is None or allowed & mine for allowed, mine in lists)

        parts = self.partitions.values()
        return [
            part
            for part in parts
            if part.state == "up" and part.up and not part.reserved and accepts(part)
        ]

    def qos_of(self, account: str) -> set[str]:
        """QOS of an account of this user; of all of them for an unknown one."""
        return (
            self.accounts[account]
            if account in self.accounts
            else set().union(*self.accounts.values())
        )

    def limit(self, partition: Partition, account: str, qos: str) -> tuple[int | None, str]:
        """Minutes that a job may take, None for no limit, and where that is from. Without a named
        QOS it is known only to a user whose account has one.
        """
        named = {qos} if qos else self.accounts.get(account, set())
        applying = {partition.own_qos} | (named if len(named) == 1 else set())
        limits = {f"partition {partition.name} (scontrol)": partition.limit_min}
        limits |= {f"QOS {name} (sacctmgr)": self.qos_min.get(name) for name in applying}
        source = min(limits, key=lambda name: limits[name] or sys.maxsize)
        return limits[source], source


def ask_slurm() -> SlurmFacts:
    """SLURM's answers. Raises UserError in one line if a command is missing or the controller does
    not answer.
    """
    try:
        rules = _records("partition", "PartitionName")
        nodes = _records("node", "NodeName")
        pairs = (line.partition("=") for line in ask(["scontrol", "show", "config"]).splitlines())
        configuration = {key.strip(): value.strip() for key, equals, value in pairs if equals}
        partitions = _partitions(rules, nodes, configuration)
    except CommandError as error:
        missing = str(error).endswith("not on PATH")
        remedy = (
            "run this on a login node of the cluster"
            if missing
            else "try again when SLURM's controller answers"
        )
        raise UserError(f"{error}; {remedy}") from None
    facts = SlurmFacts(partitions, configuration)
    try:
        ask(["sacct", "-n", "-X", "-P", "-S", "now", "-o", "JobID"])
    except CommandError as error:
        facts.no_accounting = str(error)
    accounts: dict[str, set[str]] = defaultdict(set)
    user = getpass.getuser()
    with suppress(CommandError):  # without them a profile names no account
        for account, _, qos in _sacctmgr(
            3, "assoc", f"user={user}", "format=Account,Partition,QOS"
        ):
            accounts[account] |= set(qos.split(",")) - {""}
        defaults = _sacctmgr(1, "user", user, "format=DefaultAccount")
        rows = _sacctmgr(2, "qos", "format=Name,MaxWall")
        facts.qos_min = {
            name: limit
            for name, text in rows
            if (limit := minutes(text or "UNLIMITED")) is not None
        }
        facts.default_account = next((name for (name,) in defaults if name != "(null)"), "")
        facts.accounts = {name: qos for name, qos in accounts.items() if name}
    for number in {os.getgid(), *os.getgroups()}:
        with suppress(KeyError):  # a group without a name
            facts.groups.add(grp.getgrgid(number).gr_name)
    return facts


def _partitions(
    rules: dict[str, dict[str, str]],
    nodes: dict[str, dict[str, str]],
    configuration: dict[str, str],
) -> dict[str, Partition]:
    """Partitions by name, with their nodes, from scontrol's records of both."""
    partitions = {
        name: Partition(
            name,
            default=rule.get("Default") == "YES",
            state=rule.get("State", "up").lower(),
            limit_min=minutes(rule.get("MaxTime", "UNLIMITED")),
            nodes=[],
            max_nodes=limit(rule.get("MaxNodes")),
            accounts=_names(rule.get("AllowAccounts")),
            qos=_names(rule.get("AllowQos")),
            groups=_names(rule.get("AllowGroups")),
            own_qos=",".join(_names(rule.get("QoS")) or ()),
            reserved="YES" in (rule.get("Hidden"), rule.get("RootOnly"), rule.get("ReqResv")),
        )
        for name, rule in rules.items()
    }
    for node in nodes.values():
        state = node.get("State", "")
        memory_mb = limit(node.get("RealMemory")) or 0
        # SLURM before 21.08 writes IDLE* for IDLE+NOT_RESPONDING
        is_up = "*" not in state and not _DOWN & set(re.findall("[A-Z_]+", state))
        gpus = gpus_in(node.get("Gres", ""))
        features = frozenset(node.get("AvailableFeatures", "").split(",")) - {"(null)", ""}
        for name in partitions.keys() & node.get("Partitions", "").split(","):
            rule = rules[name]
            unreserved = limit(node.get("CPUEfctv") or node.get("CPUTot"))
            cpus = min(filter(None, (unreserved, limit(rule.get("MaxCPUsPerNode")))), default=0)
            per_node, per_cpu = _memory_limits(rule)
            # the cluster's hold where the partition sets none
            if per_node is None and per_cpu is None:
                per_node, per_cpu = _memory_limits(configuration)
            usable_mb = 0  # an unset RealMemory is 1
            if memory_mb > 1:
                usable_mb = min(filter(None, (memory_mb, per_node, per_cpu and per_cpu * cpus)))
            partitions[name].nodes.append(Node(is_up, gpus, cpus, memory_mb, usable_mb, features))
    return partitions


def _memory_limits(fields: dict[str, str]) -> tuple[int | None, int | None]:
    """MB of memory that a job may request on a node, and for each of its CPUs."""
    return limit(fields.get("MaxMemPerNode")), limit(fields.get("MaxMemPerCPU"))


def _records(kind: str, key: str) -> dict[str, dict[str, str]]:
    """The fields of each line of `scontrol -o show KIND` by name; of a value (Reason, OS) only its
    first word.
    """
    lines = [
        line for line in ask(["scontrol", "-a", "-o", "show", kind]).splitlines() if line.strip()
    ]
    records = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines]
    if any(key not in fields for fields in records):
        raise CommandError(f"scontrol answered {' '.join(lines)[:80]!r}")
    return {fields[key]: fields for fields in records}


def _sacctmgr(columns: int, *what: str) -> list[list[str]]:
    """Rows of `sacctmgr show`. Raises CommandError for a row of another number of columns."""
    answer = ask(["sacctmgr", "-n", "-P", "show", *what])
    rows = [
        [cell.strip() for cell in line.split("|")] for line in answer.splitlines() if line.strip()
    ]
    if any(len(row) != columns for row in rows):
        raise CommandError(f"sacctmgr answered {answer.strip()[:80]!r}")
    return rows


def limit(text: str | None) -> int | None:
    """The number of a limit; None for UNLIMITED, N/A, (null), 0 or none."""
    match = re.match(r"\d+", text or "")
    return int(match[0]) or None if match else None


def _names(text: str | None) -> frozenset[str] | None:
    """The names of a list; None if it allows all."""
    return None if text in (None, "ALL", "N/A", "(null)") else frozenset(text.split(","))


def estimate(machine: Machine) -> str:
    """Expected start time and node of a training's job on this machine, by SLURM (`sbatch
    --test-only`). Raises Refused with SLURM's reason, CommandError without an answer.
    """
    options = flags(sbatch_options(machine))
    with submitting(machine):
        done = call(
            ["sbatch", "--test-only", "--job-name=cellmill-preflight", *options, "--wrap=true"]
        )
    said = " ".join(
        line.removeprefix("sbatch: ") for line in done.stderr.splitlines() if line.strip()
    )
    if done.returncode == 0:
        match = re.search(r"to start at (\S+).*?(?: on nodes? (\S+))?(?: in partition|$)", said)
        if match is None:
            raise CommandError(f"sbatch --test-only answered {said[:80]!r}")
        return f"{match[1].replace('T', ' ')}{f' on {match[2]}' if match[2] else ''}"
    if TRANSIENT.search(said):
        raise CommandError(f"sbatch --test-only: {said[:200]}")
    raise Refused(said.replace("error: ", "")[:300])


def minutes(text: str) -> int | None:
    """Minutes in SLURM's `days-hours:minutes:seconds`, with leading parts left out; None for no
    limit.
    """
    if text in ("infinite", "UNLIMITED", "n/a"):
        return None
    limit_s = parse_duration(text)
    if limit_s is None:
        raise CommandError(f"SLURM: expected a time limit, got {text[:40]!r}")
    return int(limit_s) // 60
