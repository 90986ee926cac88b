"""Process that a preflight starts for each process of a training.

The first process of each node writes the node's report (`node-000.json`) before it connects to the
others, so that a failed connection still leaves a report. Then all processes all-reduce, as
gradients are: first inside each node, then over all nodes.

Bandwidth is the bus bandwidth of nccl-tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md):
bytes / seconds * 2 (n - 1) / n for n processes. It is the rate of the slowest link, so it can be
compared between numbers of processes and with the rate of the hardware.
"""

import json
import os
import platform
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from cellmill import __version__
from cellmill.errors import DataError
from cellmill.files import read_json, write_json, write_text
from cellmill.launch.rendezvous import node_name
from cellmill.launch.signals import die_with_parent
from cellmill.preflight.node_job import ALLREDUCE, HEAD
from cellmill.train.staging import driver_version

CONNECT_WITHIN_S = 120
WRITTEN_BYTES = 64 << 20  # size of the file by which the disk is timed
CPU_BYTES = 16 << 20  # payload of an all-reduce by gloo
GPU_BYTES = 256 << 20  # payload of an all-reduce by NCCL
WARM_UP = 2  # all-reduces before those that are timed
TIMED = 5  # all-reduces that are timed


def main(folder: Path) -> None:
    """Write the node's report, then measure all-reduces. Collective over all processes of the job."""
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    node = rank // local_world_size
    n_nodes = world_size // local_world_size
    if local_rank == 0:
        write_json(folder / f"node-{node:03}.json", report_node(folder, node))
    store = connect(world_size)
    store.set_timeout(timedelta(seconds=CONNECT_WITHIN_S))
    if local_rank == 0:
        store.set(f"gpus-{node}", str(len(list_gpus())))
    # all processes take one backend, or those with GPUs would wait for a node that lacks them
    has_gpus = all(int(store.get(f"gpus-{index}")) >= local_world_size for index in range(n_nodes))
    backend = "nccl" if has_gpus else "gloo"
    n_bytes = GPU_BYTES if has_gpus else CPU_BYTES
    device = torch.device("cpu")
    if has_gpus:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("preflight", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=CONNECT_WITHIN_S),
        device_id=device if has_gpus else None,
    )
    node_group, _ = dist.new_subgroups(local_world_size)
    check_sum(world_size, device)
    inside = measure_bandwidth(node_group, local_world_size, device, n_bytes)
    bytes_before = count_device_bytes()
    between = None
    if n_nodes > 1:
        between = measure_bandwidth(None, world_size, device, n_bytes)
    if local_rank == 0:
        interface = None
        if between is not None:
            interface = find_busiest(count_bytes_since(bytes_before), n_bytes)
        entry = {"host": node_name(), "inside": inside, "interface": interface}
        store.set(f"node-{node}", json.dumps(entry))
    if rank == 0:
        entries = [json.loads(store.get(f"node-{index}")) for index in range(n_nodes)]
        result = {
            "backend": backend,
            "bytes": n_bytes,
            "nodes": n_nodes,
            "nproc_per_node": local_world_size,
            "inside": [
                {"host": entry["host"], "bus_gb_per_s": entry["inside"]} for entry in entries
            ],
            "between": between,
            "interfaces": {entry["host"]: entry["interface"] for entry in entries},
        }
        write_json(folder / ALLREDUCE, result)
    dist.barrier()  # a process that leaves early would break the others' connections


def connect(world_size: int) -> dist.Store:
    """Connect to the store through which processes find each other; a single process has its own."""
    if world_size == 1:
        return dist.HashStore()
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=CONNECT_WITHIN_S)))
    return store


def check_sum(world_size: int, device: torch.device) -> None:
    """Raise RuntimeError if an all-reduce of ones is wrong. Collective over all processes."""
    ones = torch.ones(1 << 16, device=device)
    dist.all_reduce(ones)
    if not bool((ones == world_size).all()):
        raise RuntimeError(
            f"an all-reduce of ones over {world_size} processes gave {ones.min().item():g}"
        )


def report_node(folder: Path, node: int) -> dict[str, Any]:
    """Report versions, hardware, write speed, and what this node sees of the shared folder."""
    write_s, error = time_write(folder / f"written-{node:03}.bin")
    gpus = list_gpus()
    nccl = None
    if torch.version.cuda and gpus:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    report: dict[str, Any] = {
        "host": node_name(),
        "python": platform.python_version(),
        "cellmill": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": nccl,
        "driver": driver_version(),
        "gpus": gpus,
        "cpus": len(os.sched_getaffinity(0)),
        "interfaces": sorted(count_interface_bytes()),
        "written_bytes": WRITTEN_BYTES,
        "write_s": write_s,
        "write_error": error,
    }
    head = {"token": None, "time": None}
    with suppress(DataError, OSError):  # the folder is not shared
        head = read_json(folder / HEAD)
    return report | {"token": head["token"], "head_time": head["time"], "time": time.time()}


def time_write(path: Path) -> tuple[float | None, str | None]:
    """Measure the seconds to write and fsync a file of WRITTEN_BYTES; return them or the error."""
    block = os.urandom(1 << 20)  # random: compression must not make the disk look fast
    began = time.monotonic()
    try:
        with open(path, "wb") as file:
            for _ in range(WRITTEN_BYTES >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return time.monotonic() - began, None
    except OSError as error:
        return None, error.strerror or str(error)
    finally:
        path.unlink(missing_ok=True)


def list_gpus() -> list[str]:
    """List the product names of the visible GPUs."""
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_name(i) for i in range(visible)]


def count_interface_bytes() -> dict[str, int]:
    """Count the bytes received and sent by each network interface that this process sees."""
    counters = psutil.net_io_counters(pernic=True).items()
    return {name: counter.bytes_sent + counter.bytes_recv for name, counter in counters}


def count_device_bytes() -> dict[str, int]:
    """Count the bytes of interfaces and of InfiniBand devices, since RDMA bypasses the interfaces."""
    n_bytes = count_interface_bytes()
    for counter in Path("/sys/class/infiniband").glob("*/ports/*/counters/port_*_data"):
        if counter.name in ("port_xmit_data", "port_rcv_data"):
            device = counter.parts[-5]
            with suppress(OSError, ValueError):  # a port that is off
                # the counters are words of 4 bytes
                n_bytes[device] = n_bytes.get(device, 0) + 4 * int(counter.read_text())
    return n_bytes


def count_bytes_since(bytes_before: dict[str, int]) -> dict[str, int]:
    """Count the bytes of each device since `bytes_before` were counted."""
    counts = count_device_bytes().items()
    return {name: n_bytes - bytes_before.get(name, 0) for name, n_bytes in counts}


def find_busiest(moved: dict[str, int], n_bytes: int) -> str | None:
    """Find the device that carried most of an all-reduce of `n_bytes` between nodes.

    None if the counters show none. The loopback interface carries the traffic inside a node, so it
    counts only if no other device did.
    """
    for names in (moved.keys() - {"lo"}, moved.keys()):
        busiest = max(sorted(names), key=lambda name: moved[name], default=None)
        if busiest is not None and moved[busiest] >= n_bytes:
            return busiest
    return None


def measure_bandwidth(
    group: dist.ProcessGroup | None, size: int, device: torch.device, n_bytes: int
) -> float | None:
    """Measure the bus bandwidth of an all-reduce of `n_bytes` float32, in GB/s (10^9 bytes).

    None for one process. Collective over the group, which has `size` processes. The time is that of
    the slowest process.
    """
    if size == 1:
        return None
    values = torch.zeros(n_bytes // 4, device=device)
    for repeats in (WARM_UP, TIMED):
        dist.barrier(group=group)
        began = time.perf_counter()
        for _ in range(repeats):
            dist.all_reduce(values, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize()
    mean_s = (time.perf_counter() - began) / TIMED
    slowest_s = torch.tensor([mean_s], dtype=torch.float64, device=device)
    dist.all_reduce(slowest_s, op=dist.ReduceOp.MAX, group=group)
    return find_bus_rate(n_bytes, slowest_s.item(), size)


def find_bus_rate(n_bytes: int, seconds: float, size: int) -> float:
    """Compute the bus bandwidth, in GB/s, of an all-reduce over `size` processes of `n_bytes` each.

    Source: nccl-tests, doc/PERFORMANCE.md.
    """
    return n_bytes / seconds * 2 * (size - 1) / size / 1e9


if __name__ == "__main__":
    die_with_parent()
    shared = Path(sys.argv[1])
    try:
        main(shared)
        dist.destroy_process_group()
    except BaseException as error:
        traceback.print_exc()
        rank = f"rank {os.environ.get('RANK', '?')} on {node_name()}"
        line = f"{rank}: {type(error).__name__}: {' '.join(str(error).split())}"
        with suppress(OSError):  # a full disk, which the node's report names
            if not (shared / "error.txt").exists():  # the first failure is the cause
                write_text(shared / "error.txt", line[:400])
        sys.stderr.flush()
        os._exit(1)  # do not wait for a collective that other ranks are in
