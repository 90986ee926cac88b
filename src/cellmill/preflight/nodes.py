"""Checks that need the nodes: one short job by a training's launcher, and verdicts on its reports.

torchrun starts `preflight/node_probe.py` on the nodes. Every node reads a file that this machine
wrote and leaves a report (`node_probe.facts`) that this machine reads, so the folder is shared both
ways. Verdicts cover how the job ended, shared folder, versions, GPUs, clocks and network.
"""

import re
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from platform import python_version
from typing import Any

from cellmill import __version__
from cellmill.config.machine import Machine
from cellmill.errors import UserError
from cellmill.files import read_json, write_json
from cellmill.launch.follow import settle
from cellmill.launch.job import Job
from cellmill.launch.queue import expand
from cellmill.launch.submit import End, StillQueued, run_once
from cellmill.planner.devices import DEVICES, list_sized_devices, recognise_device
from cellmill.preflight.check import TRAIN, Check, doubt, judge, no, ok
from cellmill.runs.lock import locked
from cellmill.runs.slurm import NOT_LISTED

CLOCK_S = 2.0  # skew that is reported: Snakemake compares times of files
SLOW_DISK_MB_S = 50
SLOW_LINK_GB_S = 5  # between nodes with GPUs; a network of 100 Gbit/s is faster
_FABRIC = ("ib", "hsn")  # interfaces of InfiniBand and Slingshot
HEAD = "head.json"  # rewritten by this machine every second: its token and time
ALLREDUCE = "allreduce.json"
JOB_MIN = 10  # time limit of the job; it takes well under a minute once its nodes have connected
SAVE_WITHIN_S = 30
SETTLE_S = 30  # most seconds until a shared folder shows a file that a node wrote


Reports = list[dict[str, Any]]
"""Contents of node-NNN.json, by node."""


def judge_end(end: End, hosts: list[str], complete: bool) -> Check:
    """Verdict on the job, and how far it came if it failed. `hosts` are the nodes that reported."""
    job = f"job {end.job_id}" if end.job_id else "its processes"
    where = f" on {end.nodes}" if end.nodes else ""
    log = f" (log: {end.log})" if end.log else ""
    if complete:
        queued = f" after {end.queued_s:.0f} s in the queue" if end.job_id else ""
        return ok("job", f"{job} ran{where}{queued}")
    silent = [name for name in expand(end.nodes) if name not in hosts]
    problem = "left nothing here"
    if end.lost is not None:
        tasks, reason = end.lost
        problem = f"could not start: {reason}"
        silent = _find_hosts(tasks, expand(end.nodes))
    if end.lost is not None or (silent and hosts):
        names = ",".join(silent)
        remedy = (
            f"work in a folder that every node mounts, or {TRAIN} sbatch_options: exclude={names}"
        )
        return no("shared folder", f"{names} {problem}{log}", remedy, nodes=(*silent,))
    # without SLURM, a profile has no module, container or network that could be wrong
    if end.error:
        remedy = f"{TRAIN} interface, modules or container may be wrong" if end.job_id else ""
        return no("job", f"{end.error}{log}", remedy)
    ended = f"{job} ended with {end.state}{where} before"
    if hosts:
        remedy = f"{TRAIN} interface: one that connects the nodes" if end.job_id else ""
        return no("job", f"{ended} its processes had connected{log}", remedy)
    last = ""
    if end.log and end.log.exists():
        for line in end.log.read_text(encoding="utf-8", errors="replace").split("\n"):
            if line.strip():
                last = f": {line.strip()[:160]}"
    remedy = "run it in the environment that cellmill is installed in"
    if end.job_id:
        remedy = f"work in a folder that the nodes mount; {TRAIN} modules, container or mem_mb may be wrong"
    return no("job", f"{ended} any process reported{last}{log}", remedy)


def _find_hosts(tasks: str, nodes: list[str]) -> list[str]:
    """Hosts of tasks that did not start. `tasks` are numbers, such as 0-2,5, or the name of a node."""
    if not re.fullmatch(r"[\d,-]+", tasks):
        return [tasks]
    by_number = dict(enumerate(nodes))  # one task on each node, in the nodes' order
    numbers = map(int, expand(f"[{tasks}]"))
    return [by_number.get(number, f"task {number}") for number in numbers]


def judge_nodes(machine: Machine, device: str, nodes: Reports, token: str) -> Iterator[Check]:
    """Verdicts on the nodes' reports. `token` is the one that this machine wrote, `device` that of the
    plan.
    """
    blind = [node["host"] for node in nodes if node["token"] != token]
    if blind:
        yield no(
            "shared folder",
            f"{', '.join(blind)} did not see a file that this machine had written and fsynced",
            f"work in a folder that every node mounts, or {TRAIN} sbatch_options: exclude={','.join(blind)}",
            nodes=(*blind,),
        )
    else:  # this machine has read the reports, which shows the other direction
        yield ok("shared folder", f"{_names(nodes)} and this machine read each other's files")
    yield judge_disk(nodes)
    here = {"python": python_version(), "cellmill": __version__}
    for what in ("python", "cellmill", "torch", "cuda", "nccl", "driver"):
        yield from judge_version(what, nodes, here.get(what))
    yield judge_gpus(machine, device, nodes)
    if machine.launcher != "local":
        yield from judge_clocks(nodes)


def judge_disk(nodes: Reports) -> Check:
    """Verdict on the write speed of checkpoints, with all nodes writing at once."""
    failed = next((node for node in nodes if node["write_error"]), None)
    if failed:
        problem = f"{failed['host']} cannot write {failed['written_bytes'] >> 20} MB here: {failed['write_error']}"
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
    """Verdict on a version, which must be the same on all nodes, and equal to `here` if given.

    No verdict if no node has any.
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
    text = f"{version} on {_names(nodes)}"
    is_same = True
    if here is not None:
        text += f", {here} here"
        # a container may have another patch release of Python: they exchange only text and numbers
        digits = 2 if what == "python" else None
        is_same = version.split(".")[:digits] == here.split(".")[:digits]
    yield judge(is_same, label, text, f"{TRAIN} modules or container; or this environment")


def judge_gpus(machine: Machine, device: str, nodes: Reports) -> Check:
    """Verdict on GPUs: if any are requested or visible, each process needs one."""
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
    text = f"{fewest} x {' and '.join(products)} on {_names(nodes)}"
    if len(products) > 1:
        remedy = f"{TRAIN} constraint or gpus_per_node: one type"
        return doubt("GPUs", f"{text}: the slowest sets the pace", remedy)
    product = recognise_device(products[0])
    kind = device.partition("-")[0]
    if kind not in products[0].lower():
        remedy = "set-resources: plan: device"
        return doubt("GPUs", f"{text}, but the plan assumes {device}", remedy)
    if (
        product in list_sized_devices(kind)
        and DEVICES[product].memory_gb != DEVICES[device].memory_gb
    ):
        assumed = f"{device} with {DEVICES[device].memory_gb:g} GB"
        remedy = f"set-resources: plan: device: {product}"
        return doubt("GPUs", f"{text}, but the plan assumes {assumed}", remedy)
    return ok("GPUs", text)


def judge_clocks(nodes: Reports) -> Iterator[Check]:
    """Verdict on the clocks.

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
    yield ok("clock", f"{_names(nodes)} within {widest:.1f} s of this machine")


def judge_allreduce(interface: str, nodes: Reports, measured: dict[str, Any]) -> Iterator[Check]:
    """Verdict on the bus bandwidth inside nodes and between them, and the network that carried it."""
    backend = measured["backend"]
    between = measured["between"]
    how = f"{measured['bytes'] >> 20} MB by {backend}"
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
        yield ok("all-reduce in a node", f"{speed:.3g} GB/s bus bandwidth on {node}, {how}")
    if between is None:
        return
    used = sorted({name for name in measured["interfaces"].values() if name})
    available = set().union(*(node["interfaces"] for node in nodes))
    fabric = sorted(name for name in available if name.startswith(_FABRIC))
    over = f" over {', '.join(used)}" if used else ""
    what = "all-reduce between nodes"
    text = f"{between:.3g} GB/s bus bandwidth{over}, {how}"
    # RDMA devices have names such as mlx5_0: only the node's Ethernet is slow
    is_ethernet = any(name.startswith(("eth", "en", "bond")) for name in used)
    if fabric and not interface and is_ethernet:
        remedy = f"{TRAIN} interface: {fabric[0]}"
        yield doubt(what, f"{text}, though there is {', '.join(fabric)}", remedy)
    elif backend == "nccl" and between < SLOW_LINK_GB_S:
        yield doubt(what, f"{text}: slow for GPUs", f"{TRAIN} interface: one of the fast network")
    else:
        yield ok(what, text)


def _names(nodes: Reports) -> str:
    hosts = list(dict.fromkeys(node["host"] for node in nodes))
    return ", ".join(hosts) if len(hosts) <= 4 else f"{len(hosts)} nodes"


def check_job(
    machine: Machine,
    device: str,
    folder: Path,
    wait_s: float,
    record: dict[str, Any],
) -> Iterator[Check]:
    """Run the job of a preflight, then judge. Add the job's end and the nodes' reports to `record`.

    Raise KeyboardInterrupt if a signal ended it.
    """
    token = secrets.token_hex(8)
    seen = dict[str, float]()
    over = threading.Event()
    threads = list[threading.Thread]()

    def write_time(path: Path) -> None:
        write_json(path / HEAD, {"token": token, "time": time.time()})

    def look(path: Path) -> None:
        for file in path.glob("node-*.json"):
            seen.setdefault(file.name, time.time())

    def beat(path: Path) -> None:
        while not over.wait(1.0):
            with suppress(OSError):  # a full disk, perhaps: the nodes report it as well
                write_time(path)
                look(path)

    def job(path: Path) -> Job:
        write_time(path)  # before anything is started there
        threads.append(threading.Thread(target=beat, args=(path,), daemon=True))
        threads[-1].start()
        arguments = [str(path.resolve())]
        error = str(path.resolve() / "error.txt")
        module = "cellmill.preflight.node_probe"
        nodes = machine.node_counts[-1]
        return Job(module, arguments, nodes, machine.nproc_per_node, error_file=error)

    limits = {
        "runtime": min(JOB_MIN, machine.runtime),
        "save_within_s": min(SAVE_WITHIN_S, machine.save_within_s),
    }
    short = machine.model_copy(update=limits)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        with locked(
            folder, "another preflight of this profile is running ({holder})", wait_s=0
        ) as lock:
            end = run_once(job, short, folder, lock, wait_s)
        if end.state in ("COMPLETED", NOT_LISTED):
            settle((end.path / ALLREDUCE).exists, end.path, SETTLE_S, time.sleep)
        look(end.path)
    except UserError as error:
        remedy = ""
        if isinstance(error, StillQueued):
            remedy = f"--wait-min waits longer; {TRAIN} slurm_partition, qos or nodes may be served sooner"
        yield no("job", str(error), remedy)
        return
    except OSError as error:
        yield no(
            "shared folder", f"{error.filename or folder}: {error.strerror}", "work in another"
        )
        return
    finally:
        over.set()
        for thread in threads:
            thread.join()
    nodes = [
        read_json(path) | {"seen": seen.get(path.name)}
        for path in sorted(end.path.glob("node-*.json"))
    ]
    path = end.path / ALLREDUCE
    allreduce = read_json(path) if path.exists() else None
    job_record = {
        "id": end.job_id,
        "state": end.state,
        "nodes": end.nodes,
        "queued_s": end.queued_s,
    }
    record |= {"job": job_record, "nodes": nodes, "allreduce": allreduce}
    yield judge_end(end, [node["host"] for node in nodes], complete=allreduce is not None)
    if nodes:
        yield from judge_nodes(machine, device, nodes, token)
    if allreduce is not None:
        yield from judge_allreduce(machine.interface, nodes, allreduce)
