"""Commands of SLURM for machines without it, and a site as scontrol shows it, from a short table."""

from collections import defaultdict
from pathlib import Path

CONFIG = (
    "Configuration data as of 2031-02-03T04:05:06\nClusterName             = north\nMinJobAge               = 300 sec\n"
    "SelectType              = select/cons_tres\nMaxMemPerNode           = UNLIMITED\n\nSlurmctld(primary) is UP\n"
)
PARTITION = (
    "PartitionName={} AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default={} QoS=N/A DefaultTime=00:10:00 Hidden=NO "
    "MaxNodes=UNLIMITED MaxTime={} RootOnly=NO ReqResv=NO MaxCPUsPerNode=UNLIMITED State={} JobDefaults=(null) "
    "DefMemPerCPU=500 MaxMemPerNode=UNLIMITED TRES=cpu=32,mem=32000M {}\n"
)
NODE = (
    "NodeName={} Arch=x86_64 CPUAlloc=0 {} AvailableFeatures={} ActiveFeatures=(null) Gres={} OS=Linux 6.1.0 #1 SMP "
    "RealMemory={} State={} Partitions={} Reason=a b=c [root]\n"
)


def scontrol(table: str, config: str = CONFIG, **fields: str) -> dict[str, str]:
    """What `scontrol show` answers, by what it is to show.

    A line of the table is a node in a partition: node, its state, cores (or those that jobs may use
    / all of them), MB, GRES, features; partition (with * the default), its state, its time limit.
    `fields` replace some of a partition's.
    """
    partitions = dict[str, str]()
    nodes = dict[str, str]()
    names = defaultdict[str, list[str]](list)
    for line in table.split():
        node, state, cores, memory, gres, features, partition, partition_state, limit = line.split(
            "|"
        )
        name, usable, total = partition.rstrip("*"), *cores.partition("/")[::2]
        default = "YES" if partition.endswith("*") else "NO"
        partitions[name] = PARTITION.format(
            name, default, limit, partition_state, fields.get(name, "")
        )
        cpus = f"CPUEfctv={usable} CPUTot={total}" if total else f"CPUTot={cores}"
        names[node].append(name)
        nodes[node] = NODE.format(node, cpus, features, gres, memory, state, ",".join(names[node]))
    shown = {"show partition": "".join(partitions.values()), "show node": "".join(nodes.values())}
    return shown | {"show config": config}


def command(
    path: Path, answers: str | dict[str, str], code: int = 0, to_stderr: bool = False
) -> None:
    """A command that prints its answer, or the first one whose key is in its arguments, and ends
    with `code`.
    """
    to = ">&2" if code or to_stderr else ""
    cases = [
        f"*{key!r}*) /bin/cat {to} <<'END'\n{text.strip()}\nEND\n;;\n"
        if text
        else f"*{key!r}*) ;;\n"
        for key, text in ({"": answers} if isinstance(answers, str) else answers).items()
    ]
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\ncase "$*" in\n{"".join(cases)}esac\nexit {code}\n')
    path.chmod(0o755)
