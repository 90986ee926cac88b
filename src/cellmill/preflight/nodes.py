"""Checks of the nodes by the job of a preflight (`node_job.py`) and the reports that it left.

They cover the end of the job, the shared folder, write speed, versions, GPUs, clocks and network.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from platform import python_version
from typing import Any

from cellmill import __version__
from cellmill.config.machine import Machine
from cellmill.launch.queue import expand
from cellmill.launch.submit import End
from cellmill.planner.devices import DEVICES, find_other_memory_gb, recognise_device
from cellmill.preflight.check import TRAIN, Check, doubt, judge, no, ok

CLOCK_S = 2.0  # skew that is reported: Snakemake compares times of files
SLOW_DISK_MB_S = 50
SLOW_LINK_GB_S = 5  # between nodes with GPUs; a network of 100 Gbit/s is faster
_FABRIC = ("ib", "hsn")  # interfaces of InfiniBand and Slingshot

Reports = list[dict[str, Any]]
"""Contents of node-NNN.json, by node."""


def judge_end(end: End, hosts: list[str], complete: bool) -> Check:
    """Judge the end of the job, and say how far it came if it failed.

    `hosts` are the nodes that left a report. `complete` is True if the job left all its results.
    """
    job = f"job {end.job_id}" if end.job_id else "its processes"
    where = f" on {end.nodes}" if end.nodes else ""
    log = f" (log: {end.log})" if end.log else ""
    if complete:
        queued = f" after {end.queued_s:.0f} s in the queue" if end.job_id else ""
        return ok("job", f"{job} ran{where}{queued}")
    if end.lost is not None:
        tasks, reason = end.lost
        lost = _find_hosts(tasks, expand(end.nodes))
        return _blame_mount(lost, f"{','.join(lost)} could not start: {reason}{log}")
    silent = [name for name in expand(end.nodes) if name not in hosts]
    if silent and hosts:
        return _blame_mount(silent, f"{','.join(silent)} left nothing here{log}")
    # without SLURM, a profile has no module, container or network that could be wrong
    if end.error:
        remedy = f"{TRAIN} interface, modules or container may be wrong" if end.job_id else ""
        return no("job", f"{end.error}{log}", remedy)
    ended = f"{job} ended with {end.state}{where} before"
    if hosts:
        remedy = f"{TRAIN} interface: one that connects the nodes" if end.job_id else ""
        return no("job", f"{ended} its processes had connected{log}", remedy)
    remedy = "run it in the environment that cellmill is installed in"
    if end.job_id:
        remedy = f"work in a folder that the nodes mount; {TRAIN} modules, container or mem_mb may be wrong"
    return no("job", f"{ended} any process reported{_quote_last_line(end.log)}{log}", remedy)


def _blame_mount(hosts: list[str], text: str) -> Check:
    """Advise on nodes that probably do not mount the folder."""
    exclude = f"sbatch_options: exclude={','.join(hosts)}"
    remedy = f"work in a folder that every node mounts, or {TRAIN} {exclude}"
    return no("shared folder", text, remedy, nodes=tuple(hosts))


def _quote_last_line(log: Path | None) -> str:
    """Quote the last line of a log after a colon; empty without one."""
    last = ""
    if log is not None and log.exists():
        for line in log.read_text(encoding="utf-8", errors="replace").split("\n"):
            if line.strip():
                last = f": {line.strip()[:160]}"
    return last


def _find_hosts(tasks: str, nodes: list[str]) -> list[str]:
    """Find the hosts of tasks that did not start.

    `tasks` are numbers, such as 0-2,5, or the name of a node.
    """
    if not re.fullmatch(r"[\d,-]+", tasks):
        return [tasks]
    host_by_task = dict(enumerate(nodes))  # one task on each node, in the nodes' order
    numbers = map(int, expand(f"[{tasks}]"))
    return [host_by_task.get(number, f"task {number}") for number in numbers]


def judge_nodes(machine: Machine, device: str, nodes: Reports, token: str) -> Iterator[Check]:
    """Judge the nodes by their reports.

    `device` is the device of the plan, `token` the one that this machine wrote to the shared folder.
    """
    blind = [node["host"] for node in nodes if node["token"] != token]
    if blind:
        names = ", ".join(blind)
        text = f"{names} did not see a file that this machine had written and fsynced"
        yield _blame_mount(blind, text)
    else:  # this machine has read the reports, which shows the other direction
        yield ok("shared folder", f"{_join_hosts(nodes)} and this machine read each other's files")
    yield judge_disk(nodes)
    here = {"python": python_version(), "cellmill": __version__}
    for what in ("python", "cellmill", "torch", "cuda", "nccl", "driver"):
        yield from judge_version(what, nodes, here.get(what))
    yield judge_gpus(machine, device, nodes)
    if machine.launcher != "local":
        yield from judge_clocks(nodes)


def judge_disk(nodes: Reports) -> Check:
    """Judge the write speed of checkpoints, with all nodes writing at once."""
    failed = next((node for node in nodes if node["write_error"]), None)
    if failed:
        problem = f"{failed['host']} cannot write {failed['written_bytes'] >> 20} MiB here: {failed['write_error']}"
        return no("write speed", problem, "make room, or work in another folder")
    slowest = max(nodes, key=lambda node: float(node["write_s"]))
    speed = slowest["written_bytes"] / slowest["write_s"] / 1e6
    text = f"{speed:,.0f} MB/s with fsync on {slowest['host']}"
    if len(nodes) > 1:
        text += ", the slowest"
    if speed < SLOW_DISK_MB_S:
        return doubt("write speed", f"{text}: checkpoints will be slow", "work in a faster folder")
    return ok("write speed", text)


def judge_version(what: str, nodes: Reports, here: str | None) -> Iterator[Check]:
    """Judge the version of `what`, which must be equal on all nodes, and equal to `here` unless None.

    Yield nothing if no node has any.
    """
    label = {"cuda": "CUDA", "nccl": "NCCL"}.get(what, what)
    hosts_by_version: dict[str | None, list[str]] = defaultdict(list)
    for node in nodes:
        hosts_by_version[node[what]].append(node["host"])
    if len(hosts_by_version) > 1:
        texts = []
        for version, hosts in hosts_by_version.items():
            texts.append(f"{version or 'none'} on {', '.join(hosts)}")
        odd = min(hosts_by_version.values(), key=len)
        is_minority = 2 * len(odd) < len(nodes)
        remedy = f"{TRAIN} modules or container, or sbatch_options: exclude={','.join(odd)}"
        yield no(label, "; ".join(texts), remedy, nodes=(*odd,) if is_minority else ())
        return
    version = nodes[0][what]
    if version is None:
        return
    text = f"{version} on {_join_hosts(nodes)}"
    is_same = True
    if here is not None:
        text += f", {here} here"
        # a container may have another patch release of Python: they exchange only text and numbers
        digits = 2 if what == "python" else None
        is_same = version.split(".")[:digits] == here.split(".")[:digits]
    yield judge(is_same, label, text, f"{TRAIN} modules or container; or this environment")


def judge_gpus(machine: Machine, device: str, nodes: Reports) -> Check:
    """Judge the GPUs: if any are requested or visible, each process needs one."""
    if machine.device == "cpu":
        return ok("GPUs", "device: cpu: processes compute on CPU cores")
    if not machine.gpus and not any(node["gpus"] for node in nodes):
        return ok("GPUs", "none requested and none visible: processes compute on CPU cores")
    wanted = machine.nproc_per_node
    for node in nodes:
        visible = len(node["gpus"])
        host = node["host"]
        if visible < wanted and node["cuda"] is None:
            remedy = f"install a build with CUDA, or {TRAIN} modules or container with one, or device: cpu"
            return no("GPUs", f"torch {node['torch']} on {host} is built without CUDA", remedy)
        if visible < wanted:
            fewer = f"nproc_per_node: {visible}, " if visible else ""
            remedy = f"{TRAIN} gpus_per_node: {wanted}, {fewer}or device: cpu"
            shows = f"{host} shows {visible} to {wanted} processes"
            return no("GPUs", shows, remedy, nodes=(host,))
    products = sorted(set().union(*(node["gpus"] for node in nodes)))
    fewest = min(len(node["gpus"]) for node in nodes)
    text = f"{fewest} x {' and '.join(products)} on {_join_hosts(nodes)}"
    if len(products) > 1:
        remedy = f"{TRAIN} constraint or gpus_per_node: one type"
        return doubt("GPUs", f"{text}: the slowest sets the pace", remedy)
    recognised = recognise_device(products[0])
    kind = device.partition("-")[0]
    if recognised.partition("-")[0] != kind:
        remedy = "set-resources: plan: device"
        return doubt("GPUs", f"{text}, but the plan assumes {device}", remedy)
    # the product's name has a size of memory or a form, and the plan assumes another
    if recognised != kind and DEVICES[recognised] != DEVICES[device]:
        assumed = f"{device} with {DEVICES[device].memory_gb:g} GB"
        remedy = f"set-resources: plan: device: {recognised}"
        return doubt("GPUs", f"{text}, but the plan assumes {assumed}", remedy)
    memory_gb = find_other_memory_gb(products[0], device)
    if memory_gb is not None:
        assumed = f"{DEVICES[device].memory_gb:g} GB unless plan.memory_gb is set"
        remedy = f"plan.memory_gb: {memory_gb} in the configuration"
        return doubt("GPUs", f"{text}, but the plan assumes {assumed}", remedy)
    return ok("GPUs", text)


def judge_clocks(nodes: Reports) -> Iterator[Check]:
    """Judge the clocks.

    A node's clock minus this machine's lies between `low` and `high`: the node read a time of ours
    before it wrote its own, and we saw its report afterwards.
    """
    widest = 0.0
    for node in nodes:
        if node["seen"] is None or node["head_time"] is None:
            return
        low = node["time"] - node["seen"]
        high = node["time"] - node["head_time"]
        skew, direction = (low, "ahead of") if low > 0 else (-high, "behind")
        if skew > CLOCK_S:
            problem = f"{node['host']} is at least {skew:.1f} s {direction} this machine"
            remedy = f"have it set, or {TRAIN} sbatch_options: exclude={node['host']}"
            yield doubt("clock", f"{problem}, and Snakemake compares times of files", remedy)
            return
        widest = max(widest, -low, high)
    yield ok("clock", f"{_join_hosts(nodes)} within {widest:.1f} s of this machine")


def judge_allreduce(interface: str, nodes: Reports, measured: dict[str, Any]) -> Iterator[Check]:
    """Judge the bus bandwidth inside nodes and between them, and the network that carried it."""
    backend = measured["backend"]
    between = measured["between"]
    payload = f"{measured['bytes'] >> 20} MiB by {backend}"
    inside = [
        (entry["bus_gb_per_s"], entry["host"])
        for entry in measured["inside"]
        if entry["bus_gb_per_s"] is not None
    ]
    if not inside and between is None:
        yield ok("all-reduce", f"nothing to measure with one process; {backend} works")
    if inside:
        speed, host = min(inside)
        node = f"{host}, the slowest" if len(inside) > 1 else host
        yield ok("all-reduce in a node", f"{speed:.3g} GB/s bus bandwidth on {node}, {payload}")
    if between is None:
        return
    used = sorted({name for name in measured["interfaces"].values() if name})
    available = set().union(*(node["interfaces"] for node in nodes))
    fabric = sorted(name for name in available if name.startswith(_FABRIC))
    interfaces = f" over {', '.join(used)}" if used else ""
    what = "all-reduce between nodes"
    text = f"{between:.3g} GB/s bus bandwidth{interfaces}, {payload}"
    # RDMA devices have names such as mlx5_0: only the node's Ethernet is slow
    is_ethernet = any(name.startswith(("eth", "en", "bond")) for name in used)
    if fabric and not interface and is_ethernet:
        remedy = f"{TRAIN} interface: {fabric[0]}"
        yield doubt(what, f"{text}, though there is {', '.join(fabric)}", remedy)
    elif backend == "nccl" and between < SLOW_LINK_GB_S:
        yield doubt(what, f"{text}: slow for GPUs", f"{TRAIN} interface: one of the fast network")
    else:
        yield ok(what, text)


def _join_hosts(nodes: Reports) -> str:
    """Join the names of up to four nodes; of more, only count them."""
    hosts = list(dict.fromkeys(node["host"] for node in nodes))
    return ", ".join(hosts) if len(hosts) <= 4 else f"{len(hosts)} nodes"
