"""Local copies of shards on nodes (`stream.stage_to`), their check, and the choice of device.

Copies are made while the run trains. For the check each rank hashes its part, once for all runs of
a corpus. Rank 0 decides the device from the GPUs that each node's torch sees. If each rank decided
by itself, some would wait in NCCL and others in gloo, or a job would train on the CPU cores of
nodes whose GPUs it reserves.
"""

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from cellmill.config.run import Stream
from cellmill.data.shards.local_copies import PREFIX, CopyTask, LocalCopies, warn
from cellmill.data.shards.manifest import Manifest, record_verified, stamp_files, verify_changed
from cellmill.data.stream.cell_stream import CellStream
from cellmill.errors import UserError
from cellmill.launch.rendezvous import node_name
from cellmill.parallel.mesh import Mesh, gather_json

_END_S = 60  # for removing the copies
_NODES = "device-of-node-"
_DECISION = "device"
HASHED_AT_ONCE = 32  # files of a rank between two positions of the hang watch


class Staging:
    """The folder of copies of this node, and on its first rank the process that fills it.

    `copies` is None if there are none.
    """

    def __init__(self, options: Stream, mesh: Mesh):
        """Agree on a new folder, which the ranks of a node share. Collective over all ranks."""
        self.copies: LocalCopies | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._limit_gb = options.stage_limit_gb
        if options.stage_to is None:
            return
        node = int(os.environ.get("GROUP_RANK", 0))
        parent = os.path.expandvars(options.stage_to)
        ranks = gather_json([node, secrets.token_hex(4), mesh.dp_rank], mesh.device)
        self._node = node
        self._n_nodes = 1 + max(rank_node for rank_node, _, _ in ranks)
        node_ranks = [(token, dp_rank) for rank_node, token, dp_rank in ranks if rank_node == node]
        self._data_ranks = {dp_rank for _, dp_rank in node_ranks}
        token = node_ranks[0][0]
        self._first_of_node = int(os.environ.get("LOCAL_RANK", 0)) == 0
        if "$" in parent or not os.path.isabs(parent):
            if self._first_of_node:
                warn(
                    f"stream.stage_to is {options.stage_to!r}, here {parent!r}: expected an absolute path of variables "
                    "that the node has; shards are read from the shared folder"
                )
            return
        self.copies = LocalCopies(Path(parent) / f"{PREFIX}{token}-{node}")

    def start(self, streams: Sequence[CellStream | None], step: int, stop: int) -> None:
        """Begin to copy what the ranks of this node read in steps `step` to `stop`."""
        if self.copies is None or not self._first_of_node:
            return
        shards: dict[Path, str] = {}
        for stream in streams:
            if stream is not None:
                shards |= stream.find_needed_shards(self._data_ranks, step, stop)
        paths = list(shards)
        # nodes begin at different shards, so that not all of them read the same file at once
        first = self._node * len(paths) // self._n_nodes
        ordered = {str(path): shards[path] for path in paths[first:] + paths[:first]}
        limit = None if self._limit_gb is None else self._limit_gb * 1e9
        try:
            command = [sys.executable, "-m", "cellmill.data.shards.local_copies"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
            assert self._process.stdin is not None
            task = CopyTask(str(self.copies.folder), ordered, limit)
            self._process.stdin.write(json.dumps(asdict(task)).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            warn(f"stream.stage_to: {error.strerror}; shards are read from the shared folder")

    def close(self) -> None:
        """Remove the copies. Every rank's streams are closed."""
        process = self._process
        if process is None or self.copies is None:
            return
        code = process.poll()
        if code is not None:
            warn(
                f"stream.stage_to: the process that copies shards ended with exit code {code} before the training"
            )
        with suppress(OSError, subprocess.TimeoutExpired):
            process.communicate(timeout=_END_S)
        if process.poll() is None:
            process.kill()
        self.copies.remove()


def verify_shards(
    manifest: Manifest, device: torch.device, reach: Callable[[str], None] = lambda what: None
) -> None:
    """Hash shards that verified.json does not list. Collective.

    All ranks `reach` each group of files, which is then recorded: a large corpus is no hang, and the
    next start goes on. Raise DataError with the name of a damaged shard.
    """
    stamps = stamp_files(manifest)
    names = [*stamps]
    world = dist.get_world_size()
    dist.barrier()  # rank 0 has stamped the files before another rank hashes one
    for first in range(0, len(names), world * HASHED_AT_ONCE):
        end = first + world * HASHED_AT_ONCE
        reach(f"the hashes of shards from {names[first]} on")
        part = slice(first + dist.get_rank(), end, world)
        hashed = torch.tensor(verify_changed(manifest, stamps, part), device=device)
        dist.all_reduce(hashed)
        if hashed.item() and dist.get_rank() == 0:
            record_verified(manifest, {name: stamps[name] for name in names[first:end]})


class NodeGpus(NamedTuple):
    """GPUs, torch and driver of a node."""

    host: str
    gpus: int
    torch: str
    cuda: str | None  # version that torch was built for; None in a build without CUDA
    driver: str | None  # NVIDIA's; None without a driver, or if nobody needs it

    def __str__(self) -> str:
        build = f"for CUDA {self.cuda}" if self.cuda else "built without CUDA"
        driver = f"driver {self.driver}" if self.driver else "no driver"
        gpus = _count_gpus(self.gpus)
        return f"{self.host} shows {gpus} (torch {self.torch} {build}, {driver})"


def _count_gpus(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number} GPUs"


def decide(wanted: str, nodes: list[NodeGpus], local_world: int) -> str:
    """Return cuda or cpu for all nodes.

    Raise UserError if GPUs are wanted or seen, but some process has none.
    """
    if wanted == "cpu" or (wanted == "auto" and not any(node.gpus for node in nodes)):
        return "cpu"
    if all(node.gpus >= local_world for node in nodes):
        return "cuda"
    first, *others = [node for node in nodes if node.gpus < local_world]
    also = ""
    if others:
        hosts = ", ".join(node.host for node in others[:8])
        also = f", and {len(others)} more nodes like it ({hosts})"
    raise UserError(
        f"expected {_count_gpus(local_world)} per node, one per process, but {first}{also}; correct gpus_per_node, "
        "nproc_per_node or the node's torch and driver, or set device: cpu in the profile (set-resources: train) "
        "to train on CPU cores"
    )


def agree(wanted: str, store: dist.Store) -> torch.device:
    """Return this rank's device. Collective over all ranks, before there is a process group."""
    rank = int(os.environ["RANK"])
    local_rank = int(os.environ["LOCAL_RANK"])
    local_world = int(os.environ["LOCAL_WORLD_SIZE"])
    if wanted == "cpu":
        # libraries that look for GPUs later see none either; CUDA has not started yet
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if local_rank == 0:
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        driver = driver_version() if gpus < local_world else None  # takes a second
        seen = NodeGpus(node_name(), gpus, str(torch.__version__), torch.version.cuda, driver)
        store.set(f"{_NODES}{rank // local_world}", json.dumps(seen))
    if rank == 0:
        count = int(os.environ["WORLD_SIZE"]) // local_world
        nodes = [NodeGpus(*json.loads(store.get(f"{_NODES}{node}"))) for node in range(count)]
        try:
            decision = {"device": decide(wanted, nodes, local_world)}
        except UserError as error:
            decision = {"refusal": str(error)}
        store.set(_DECISION, json.dumps(decision))
    decision = json.loads(store.get(_DECISION))
    if "refusal" in decision:
        raise UserError(decision["refusal"])
    return torch.device("cuda", local_rank) if decision["device"] == "cuda" else torch.device("cpu")


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver, None without one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    versions = done.stdout.split()
    return versions[0] if versions and done.returncode == 0 else None
