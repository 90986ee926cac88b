"""What only the nodes of a machine know: one short job through the launcher of a training, and what it left.

Every node reads what this process wrote and leaves a file that this process reads: the folder is shared, both ways.
The worker (`preflight_worker`) is what torchrun starts on them.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from platform import python_version
from typing import Any

from cellmill import __version__
from cellmill.config import check_options
from cellmill.config.machine import Machine
from cellmill.errors import UserError
from cellmill.files import read_json, write_json
from cellmill.launch.job import Job
from cellmill.preflight import slurm_site
from cellmill.preflight.check import TRAIN, Check, doubt, no, ok
from cellmill.preflight.partition import gpu_request
from cellmill.preflight.run_once import End, StillQueued, run_once
from cellmill.preflight.slurm_site import SiteError
from cellmill.runs.job_states import GONE

HEAD = "head.json"
"""Rewritten by the head every second: its token and time."""
ALLREDUCE = "allreduce.json"
JOB_MIN = 10  # time limit of the job; it takes well under a minute once its nodes have met
SAVE_WITHIN_S = 30
SETTLE_S = 30  # how long a shared folder may take to show what a node wrote
CLOCK_S = 2.0  # skew that is told: Snakemake compares times of files
SLOW_DISK_MB_S = 50
SLOW_LINK_GB_S = 5  # between nodes of GPUs; below that a network of 100 Gbit/s is not what is used
_FABRIC = ("ib", "hsn")  # interfaces of InfiniBand and Slingshot


def node_file(node: int) -> str:
    """What a node writes about itself."""
    return f"node-{node:03}.json"


class NodeCheck:
    """The job of a preflight. `facts` is for the record: how it ran and what each node said."""

    def __init__(self, machine: Machine, device: str, folder: Path, wait_s: float) -> None:
        self.machine, self.device, self.folder, self.wait_s = machine, device, folder, wait_s
        self.facts: dict[str, Any] = {}

    def run(self) -> Iterator[Check]:
        """Runs it, then judges. Raises KeyboardInterrupt when a signal ended it."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self.folder.chmod(0o700)
        with Head() as head:
            try:
                end = self._run_once(head)
            except StillQueued as error:
                remedy = f"--wait-min waits longer; {TRAIN} slurm_partition, qos or nodes may be served sooner"
                yield no("job", str(error), remedy)
                return
            except UserError as error:
                yield no("job", str(error))
                return
            except OSError as error:
                yield no("shared folder", f"{error.filename or self.folder}: {error.strerror}", "work in another")
                return
            nodes = head.settle(end)
        allreduce = read_json(end.path / ALLREDUCE) if (end.path / ALLREDUCE).exists() else None
        self.facts = {
            "job": {"id": end.job_id, "state": end.state, "nodes": end.nodes, "queued_s": end.queued_s},
            "nodes": nodes,
            "allreduce": allreduce,
        }
        yield from judge_end(end, [node["host"] for node in nodes], whole=allreduce is not None)
        if nodes:
            yield from self._judge(nodes, head)
        if allreduce is not None:
            yield from judge_allreduce(self.machine.interface, nodes, allreduce)

    def _run_once(self, head: Head) -> End:
        machine = self.machine
        short = {"runtime": min(JOB_MIN, machine.runtime), "save_within_s": min(SAVE_WITHIN_S, machine.save_within_s)}
        brief: Machine = check_options(Machine, machine.model_dump() | short, "the job")

        def job(path: Path) -> Job:
            head.begin(path)
            arguments = [str(path.resolve())]
            module = "cellmill.preflight.worker"
            return Job(module, arguments, machine.node_counts[-1], machine.nproc_per_node)

        with locked(self.folder) as lock:
            return run_once(job, brief, self.folder, lock, self.wait_s)

    def _judge(self, nodes: list[dict[str, Any]], head: Head) -> Iterator[Check]:
        yield judge_folder(nodes, head.token)
        yield judge_disk(nodes)
        here = {"python": python_version(), "cellmill": __version__}
        for what in ("python", "cellmill", "torch", "cuda", "nccl", "driver"):
            yield from judge_version(what, nodes, here.get(what))
        yield judge_gpus(self.machine, self.device, nodes)
        if self.machine.launcher != "local":
            yield from judge_clocks(nodes, head.seen)
        yield from judge_interface(self.machine.interface, nodes)


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """One preflight of a profile at a time. Raises UserError while another is at it."""
    with open(folder / "lock", "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise UserError(f"{folder}: another preflight of this profile is at it ({file.read().strip()})") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}")
        file.flush()
        yield file.fileno()


class Head:
    """The head's side of the shared folder: writes its time every second, and notes when each node's file shows."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(8)
        self.seen: dict[str, float] = {}
        """Time at which each node's file was first seen."""
        self._path = Path()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Head:
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def begin(self, path: Path) -> None:
        """Writes the first time, before anything is started."""
        self._path = path
        self._write()
        self._thread.start()

    def settle(self, end: End) -> list[dict[str, Any]]:
        """What the nodes wrote, once all of it shows or no more is to be expected."""
        give_up = time.monotonic() + SETTLE_S
        while end.state in ("COMPLETED", GONE) and not (end.path / ALLREDUCE).exists() and time.monotonic() < give_up:
            time.sleep(0.5)
            os.listdir(end.path)  # makes a network file system look again
        self._look()
        return [read_json(path) for path in sorted(end.path.glob("node-*.json"))]

    def _beat(self) -> None:
        while not self._over.wait(1.0):
            try:
                self._write()
                self._look()
            except OSError:  # a full disk, perhaps: the nodes say so of theirs
                continue

    def _write(self) -> None:
        write_json(self._path / HEAD, {"token": self.token, "time": time.time()})

    def _look(self) -> None:
        for file in self._path.glob("node-*.json"):
            self.seen.setdefault(file.name, time.time())


def judge_end(end: End, hosts: list[str], whole: bool) -> Iterator[Check]:
    """Whether the job did what it was for; if not, where it came to."""
    which = f"job {end.job_id}" if end.job_id else "its processes"
    where = f" on {end.nodes}" if end.nodes else ""
    log = f" (log: {end.log})" if end.log else ""
    if whole:
        waited = f" after {end.queued_s:.0f} s in the queue" if end.job_id else ""
        yield ok("job", f"{which} ran{where}{waited}")
        return
    silent = _silent(end, hosts)
    if end.lost is not None or (silent and hosts):
        names = ",".join(_lost(end, end.lost[0]) if end.lost is not None else silent)
        said = f"{names} could not start: {end.lost[1]}" if end.lost is not None else f"{names} left nothing here"
        yield no(
            "shared folder",
            f"{said}{log}",
            f"work in a folder that every node mounts, or {TRAIN} sbatch_options: exclude={names}",
        )
    elif end.error:
        yield no("job", f"{end.error}{log}", f"{TRAIN} interface, modules or container may be wrong")
    elif not hosts:
        said = _last_line(end.log)
        yield no(
            "job",
            f"{which} ended with {end.state}{where} before any process wrote a word{f': {said}' if said else ''}{log}",
            f"work in a folder that the nodes mount; {TRAIN} modules, container or mem_mb may be wrong",
        )
    else:
        yield no(
            "job",
            f"{which} ended with {end.state}{where} before its processes had met{log}",
            f"{TRAIN} interface: one that connects the nodes",
        )


def _silent(end: End, hosts: list[str]) -> list[str]:
    """Nodes of the job that left no file."""
    try:
        return [name for name in slurm_site.hostnames(end.nodes) if name not in hosts] if end.nodes else []
    except SiteError:
        return []


def _lost(end: End, tasks: str) -> list[str]:
    """Nodes of the tasks `1`, `0-3` …: there is one on each node, in their order."""
    try:
        names = slurm_site.hostnames(end.nodes)
    except SiteError:
        names = []
    found = []
    for part in tasks.split(","):
        first, _, last = part.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            return [tasks]
        found += [names[i] if i < len(names) else f"task {i}" for i in range(int(first), int(last or first) + 1)]
    return found


def _last_line(log: Path | None) -> str:
    if log is None or not log.exists():
        return ""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:160] if lines else ""


def judge_folder(nodes: list[dict[str, Any]], token: str) -> Check:
    """Whether each node read what this process wrote. That this process read theirs is why they are here."""
    blind = [node["host"] for node in nodes if node["token"] != token]
    if not blind:
        return ok("shared folder", f"{_names(nodes)} read what this machine wrote, and it what they wrote")
    return no(
        "shared folder",
        f"{', '.join(blind)} did not see what this machine had written and fsynced",
        f"work in a folder that every node mounts, or {TRAIN} sbatch_options: exclude={','.join(blind)}",
    )


def judge_disk(nodes: list[dict[str, Any]]) -> Check:
    """How fast checkpoints are written, when all nodes write at once."""
    if failed := next((node for node in nodes if node["write_error"]), None):
        size = failed["written_bytes"] >> 20
        return no(
            "write speed",
            f"{failed['host']} cannot write {size} MB here: {failed['write_error']}",
            "make room, or work in another folder",
        )
    slowest = max(nodes, key=lambda node: float(node["write_s"]))
    speed = slowest["written_bytes"] / slowest["write_s"] / 1e6
    figure = f"{speed:,.0f} MB/s with fsync on {slowest['host']}{', the slowest' if len(nodes) > 1 else ''}"
    if speed < SLOW_DISK_MB_S:
        return doubt("write speed", f"{figure}: checkpoints take long", "work in a faster folder")
    return ok("write speed", figure)


def judge_version(what: str, nodes: list[dict[str, Any]], here: str | None) -> Iterator[Check]:
    """Whether all nodes have the same; nothing where none has any. `here` is this machine's, when it must agree."""
    label = {"cuda": "CUDA", "nccl": "NCCL"}.get(what, what)
    found: dict[str | None, list[str]] = defaultdict(list)
    for node in nodes:
        found[node[what]].append(node["host"])
    if len(found) > 1:
        texts = [f"{version or 'none'} on {', '.join(hosts)}" for version, hosts in found.items()]
        odd = min(found.values(), key=len)
        yield no(label, "; ".join(texts), f"{TRAIN} modules or container, or sbatch_options: exclude={','.join(odd)}")
        return
    only = nodes[0][what]
    if only is None:
        return
    text = f"{only} on {_names(nodes)}"
    if here is None:
        yield ok(label, text)
        return
    # a container may have another patch release of Python: what is handed over is strings and numbers
    same = only.split(".")[:2] == here.split(".")[:2] if what == "python" else only == here
    text += f", {here} here"
    yield ok(label, text) if same else no(label, text, f"{TRAIN} modules or container; or this environment")


def judge_gpus(machine: Machine, device: str, nodes: list[dict[str, Any]]) -> Check:
    """Whether each process has a GPU, where GPUs were asked for or are there."""
    if not gpu_request(machine)[1] and not any(node["gpus"] for node in nodes):
        return ok("GPUs", "none asked for and none there: processes compute on CPU cores")
    for node in nodes:
        if len(node["gpus"]) >= machine.nproc_per_node:
            continue
        if node["cuda"] is None:
            return no(
                "GPUs",
                f"torch {node['torch']} on {node['host']} is built without CUDA",
                f"install a build with it, or {TRAIN} modules or container with one",
            )
        return no(
            "GPUs",
            f"{node['host']} shows {len(node['gpus'])} to {machine.nproc_per_node} processes",
            f"{TRAIN} gpus_per_node: {machine.nproc_per_node}, or nproc_per_node: {len(node['gpus']) or 1}",
        )
    products = sorted({name for node in nodes for name in node["gpus"]})
    figure = f"{min(len(node['gpus']) for node in nodes)} x {' and '.join(products)} on {_names(nodes)}"
    if len(products) > 1:
        return doubt("GPUs", f"{figure}: the slowest sets the pace", f"{TRAIN} constraint or gpus_per_node: one type")
    if device not in products[0].lower():
        return doubt("GPUs", f"{figure}, and the plan is made for {device}", "set-resources: plan: device")
    return ok("GPUs", figure)


def judge_clocks(nodes: list[dict[str, Any]], seen: dict[str, float]) -> Iterator[Check]:
    """How far clocks are apart.

    A node's clock minus this machine's is between `low` and `high`: the node read a time of ours before it wrote its
    own, and we saw its file afterwards.
    """
    widest = 0.0
    for number, node in enumerate(nodes):
        at = seen.get(node_file(number))
        if at is None or node["head_time"] is None:
            return
        low, high = node["time"] - at, node["time"] - node["head_time"]
        skew, way = (low, "ahead of") if low > 0 else (-high, "behind")
        if skew > CLOCK_S:
            yield doubt(
                "clock",
                f"{node['host']} is at least {skew:.1f} s {way} this machine, and Snakemake compares times of files",
                f"have it set, or {TRAIN} sbatch_options: exclude={node['host']}",
            )
            return
        widest = max(widest, -low, high)
    yield ok("clock", f"{_names(nodes)} within {widest:.1f} s of this machine")


def judge_interface(asked: str, nodes: list[dict[str, Any]]) -> Iterator[Check]:
    """Whether each node has the interface; NCCL and Gloo take a prefix of its name, or several with commas."""
    wanted = tuple(asked.lstrip("=").split(","))
    for node in nodes:
        if asked and not asked.startswith("^") and not any(name.startswith(wanted) for name in node["interfaces"]):
            have = ", ".join(node["interfaces"])
            yield no("interface", f"{node['host']} has no {asked}: there are {have}", f"{TRAIN} interface")
            return


def judge_allreduce(asked: str, nodes: list[dict[str, Any]], found: dict[str, Any]) -> Iterator[Check]:
    """Bus bandwidth inside nodes and between them, and what carried it."""
    how = f"{found['bytes'] >> 20} MB by {found['backend']}"
    inside = [entry for entry in found["inside"] if entry["bus_gb_per_s"] is not None]
    if not inside and found["between"] is None:
        yield ok("all-reduce", f"nothing to measure for one process; {found['backend']} works")
    if inside:
        slowest = min(inside, key=lambda entry: float(entry["bus_gb_per_s"]))
        on = f"{slowest['host']}{', the slowest' if len(inside) > 1 else ''}"
        yield ok("all-reduce in a node", f"{slowest['bus_gb_per_s']:.3g} GB/s bus bandwidth on {on}, {how}")
    if found["between"] is None:
        return
    used = sorted({name for name in found["interfaces"].values() if name})
    spare = sorted({name for node in nodes for name in node["interfaces"] if name.startswith(_FABRIC)})
    over = f" over {', '.join(used)}" if used else ""
    what, figure = "all-reduce between nodes", f"{found['between']:.3g} GB/s bus bandwidth{over}, {how}"
    # RDMA devices are called mlx5_0 and the like: an address of the node's network is what is slow
    if spare and not asked and any(name.startswith(("eth", "en", "bond")) for name in used):
        yield doubt(what, f"{figure}, though there is {', '.join(spare)}", f"{TRAIN} interface: {spare[0]}")
    elif found["backend"] == "nccl" and found["between"] < SLOW_LINK_GB_S:
        yield doubt(what, f"{figure}: slow for GPUs", f"{TRAIN} interface: that of the fast network")
    else:
        yield ok(what, figure)


def _names(nodes: list[dict[str, Any]]) -> str:
    hosts = list(dict.fromkeys(node["host"] for node in nodes))
    return ", ".join(hosts) if len(hosts) <= 4 else f"{len(hosts)} nodes"
