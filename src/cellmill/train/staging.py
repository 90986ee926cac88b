"""Start of a training on its nodes: local copies of shards (`stream.stage_to`), their check, and
the choice of device.

Copies are made while the run trains. For the check each rank hashes its part, once for all runs of
a corpus. Rank 0 decides the device from the GPUs that each node's torch sees. If each rank decided
alone, some would wait in NCCL and others in gloo, or a job would train on the CPU cores of nodes
whose GPUs it reserves.
"""

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from cellmill.config.run import Stream
from cellmill.data.shards.local_copies import PREFIX, CopyTask, LocalCopies, warn
from cellmill.data.shards.manifest import Manifest, record, verify_changed
from cellmill.data.stream.cell_stream import CellStream
from cellmill.errors import UserError
from cellmill.launch.rendezvous import node_name
from cellmill.parallel.mesh import Mesh, gather_json

_END_S = 60  # for removing the copies
_NODES = "device-of-node-"
_DECISION = "device"


class Staging:
    """The folder of copies of this node, and on its first rank the process that fills it; `copies`
    None: none.
    """

    def __init__(self, options: Stream, mesh: Mesh):
        """Agree on a new folder. Collective: every rank, of which those of a node share one."""
        self.copies: LocalCopies | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._limit_gb = options.stage_limit_gb
        if options.stage_to is None:
            return
        node = int(os.environ.get("GROUP_RANK", 0))
        parent = os.path.expandvars(options.stage_to)
        ranks = gather_json([node, secrets.token_hex(4), mesh.dp_rank], mesh.device)
        self._node = node
        self._n_nodes = 1 + max(other for other, _, _ in ranks)
        self._data_ranks = {rank for other, _, rank in ranks if other == node}
        token = next(token for other, token, _ in ranks if other == node)
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
        """Begin to copy what the ranks of this node read of `streams` in the training's steps
        `step` to `stop`.
        """
        if self.copies is None or not self._first_of_node:
            return
        shards: dict[Path, str] = {}
        for stream in streams:
            shards |= {} if stream is None else stream.shards_read(self._data_ranks, step, stop)
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


def verify_shards(manifest: Manifest, device: torch.device) -> None:
    """Hash shards that verified.json does not know. Collective. Raises DataError naming a damaged
    shard.
    """
    part = slice(dist.get_rank(), None, dist.get_world_size())
    hashed = torch.tensor(verify_changed(manifest, part), device=device)
    dist.all_reduce(hashed)
    if hashed.item() and dist.get_rank() == 0:
        record(manifest)


class NodeGpus(NamedTuple):
    """What a node's torch sees."""

    host: str
    gpus: int
    torch: str
    cuda: str | None  # version that torch was built for; None in a build without CUDA
    driver: str | None  # NVIDIA's; None without one, or if nobody needs it

    def __str__(self) -> str:
        build = (
            f"torch {self.torch} {f'for CUDA {self.cuda}' if self.cuda else 'built without CUDA'}"
        )
        driver = f"driver {self.driver}" if self.driver else "no driver"
        return f"{self.host} shows {_gpus(self.gpus)} ({build}, {driver})"


def _gpus(number: int) -> str:
    return f"{number} GPU{'' if number == 1 else 's'}"


def decide(wanted: str, nodes: list[NodeGpus], local_world: int) -> str:
    """Return cuda or cpu for all nodes. Raises UserError if GPUs are wanted or seen, but not one
    per process.
    """
    if wanted == "cpu" or (wanted == "auto" and not any(node.gpus for node in nodes)):
        return "cpu"
    if all(node.gpus >= local_world for node in nodes):
        return "cuda"
    first, *more = [node for node in nodes if node.gpus < local_world]
    also = (
        f", and {len(more)} more nodes like it ({', '.join(node.host for node in more[:8])})"
        if more
        else ""
    )
    raise UserError(
        f"expected {_gpus(local_world)} per node, one per process, but {first}{also}; correct gpus_per_node, "
        "nproc_per_node or the node's torch and driver, or set device: cpu in the profile (set-resources: train) "
        "to train on CPU cores"
    )


def agree(wanted: str, store: dist.Store) -> torch.device:
    """Return this rank's device. Collective: every rank, before there is a process group."""
    rank, local_rank, local_world = (
        int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    if wanted == "cpu":
        # of what looks for GPUs later, too; CUDA has not started yet
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
            decision = [decide(wanted, nodes, local_world), None]
        except UserError as error:
            decision = [None, str(error)]
        store.set(_DECISION, json.dumps(decision))
    device, refusal = json.loads(store.get(_DECISION))
    if refusal is not None:
        raise UserError(refusal)
    return torch.device("cuda", local_rank) if device == "cuda" else torch.device("cpu")


def driver_version() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return next(iter(done.stdout.split()), None) if done.returncode == 0 else None
