"""Trainings on this machine: one entry of local.json for each start."""

import os
import re
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cellmill.config.machine import Machine
from cellmill.errors import DataError, Stopped
from cellmill.files import read_json
from cellmill.runs.jobs import write_if_room
from cellmill.runs.starts import Start

LOCAL = "local"
"""Partition of a start on this machine."""


@contextmanager
def local_start(train: Path, machine: Machine) -> Iterator[None]:
    """Record in local.json the start and end of a training on this machine. The caller holds the run's lock."""
    file = train / "local.json"
    earlier = read_local(train)
    if earlier and earlier[-1]["ended_at"] is None:
        earlier[-1] |= {"ended_at": _last_sign_of_life(earlier[-1], train), "how": "KILLED"}
    processes = machine.node_counts[-1] * machine.nproc_per_node
    entry: dict[str, Any] = {
        "host": os.uname().nodename,
        "started_at": time.time(),
        "ended_at": None,
        "processes": processes,
        "gpus": min(processes, visible_gpus()),
        "cpus": len(os.sched_getaffinity(0)),
        "cpu_s": None,
        "how": None,
    }
    write_if_room(file, [*earlier, entry])
    cpu_s, how = _children_cpu_s(), "FAILED"
    try:
        yield
        how = "COMPLETED"
    except (Stopped, KeyboardInterrupt):
        how = "STOPPED"
        raise
    finally:
        entry |= {"ended_at": time.time(), "cpu_s": _children_cpu_s() - cpu_s, "how": how}
        write_if_room(file, [*earlier, entry])


def read_local(train: Path) -> list[dict[str, Any]]:
    """Entries of local.json, oldest first. `how`: COMPLETED, STOPPED, FAILED or KILLED; None while it runs."""
    file = train / "local.json"
    try:
        entries = read_json(file)
    except DataError:
        return []
    return [entry for entry in entries if isinstance(entry, dict) and "started_at" in entry]


def local_starts(train: Path) -> list[Start]:
    """Starts of the run in `train` on this machine."""
    return [_start(entry, train) for entry in read_local(train)]


def visible_gpus() -> int:
    """Number of NVIDIA GPUs this process may use, without importing torch or asking the driver."""
    devices = sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in Path("/dev").glob("nvidia*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return devices
    return min(devices, sum(bool(word.strip()) and word.strip() != "-1" for word in visible.split(",")))


def _start(entry: dict[str, Any], train: Path) -> Start:
    ended_at = entry["ended_at"] or _last_sign_of_life(entry, train)
    return Start(
        job_id="",
        partition=LOCAL,
        state=entry["how"] or "RUNNING",
        submitted_at=entry["started_at"],
        started_at=entry["started_at"],
        ended_at=ended_at,
        queue_wait_s=0.0,
        elapsed_s=ended_at - entry["started_at"],
        nodes=1,
        processes=entry["processes"],
        gpus=entry["gpus"],
        cpus=entry["cpus"],
        cpu_s=entry["cpu_s"],
    )


def _last_sign_of_life(entry: dict[str, Any], train: Path) -> float:
    files = (train / "metrics.jsonl", train / "state.json")
    return max([entry["started_at"], *(path.stat().st_mtime for path in files if path.exists())])


def _children_cpu_s() -> float:
    """CPU time of child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
