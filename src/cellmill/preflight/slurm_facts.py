"""Everything that SLURM reports about a site, queried once for a new profile."""

import grp
import os
import sys
from dataclasses import dataclass, field, replace

from cellmill.errors import UserError
from cellmill.preflight import slurm_site
from cellmill.preflight.slurm_site import Node, Partition, Rules
from cellmill.runs.slurm_command import CommandError


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
        partitions, rules = slurm_site.partitions(), slurm_site.partition_rules()
        cpus, configuration = slurm_site.usable_cpus(), slurm_site.configuration()
    except CommandError as error:
        missing = str(error).endswith("not on PATH")
        remedy = "run this on a login node of the cluster" if missing else "try again when SLURM's controller answers"
        raise UserError(f"{error}; {remedy}") from None
    if not partitions:
        raise UserError("sinfo lists no partition; expected at least one")
    try:
        slurm_site.accounting()
        no_accounting = ""
    except CommandError as error:
        no_accounting = str(error)
    try:
        accounts, default = slurm_site.associations(), slurm_site.default_account()
        qos_min = slurm_site.qos_limits()
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
    per_node, per_cpu = (slurm_site.limit(configuration.get(f"MaxMemPer{what}")) for what in ("Node", "CPU"))
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
