"""A SLURM site as scontrol shows it, from a short table."""

CONFIG = (
    "Configuration data as of 2031-02-03T04:05:06\nMinJobAge               = 300 sec\n"
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
    """What `scontrol show` answers, by `partition`, `node` and `config`.

    A line of the table is a node in a partition: node, its state, cores (or those that jobs may use / all of them), MB,
    GRES, features; partition (with * the default), its state, its time limit. `fields` replace some of a partition's.
    """
    partitions, nodes = dict[str, str](), dict[str, list[str]]()
    for line in table.split():
        node, state, cores, memory, gres, features, partition, partition_state, limit = line.split("|")
        name, usable, total = partition.rstrip("*"), *cores.partition("/")[::2]
        default = "YES" if partition.endswith("*") else "NO"
        partitions[name] = PARTITION.format(name, default, limit, partition_state, fields.get(name, ""))
        cpus = f"CPUEfctv={usable} CPUTot={total}" if total else f"CPUTot={cores}"
        nodes.setdefault(node, [cpus, features, gres, memory, state, []])[-1].append(name)
    lines = [NODE.format(name, *values, ",".join(of)) for name, (*values, of) in nodes.items()]
    return {"partition": "".join(partitions.values()), "node": "".join(lines), "config": config}
