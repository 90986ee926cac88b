"""The device of a training's processes, decided once for all ranks.

Each node reports the GPUs that its torch sees to the store of the start; rank 0 decides and all ranks read the answer.
Were it decided by each rank, some would wait in NCCL and others in gloo, or a job would train on the CPU cores of nodes
whose GPUs it reserves.
"""

import json
import os
import subprocess
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from cellmill.errors import UserError
from cellmill.launch.rendezvous import node_name

_NODES, _DECISION = "device-of-node-", "device"


@dataclass(frozen=True)
class NodeGpus:
    """What a node's torch sees."""

    host: str
    gpus: int
    torch: str
    cuda: str | None
    """Version that torch was built for; None in a build without CUDA."""
    driver: str | None
    """Of NVIDIA; None without one, or if there is no need to know."""

    @classmethod
    def here(cls, expected: int) -> "NodeGpus":
        """Report of this node; the driver, which takes a second, only if it shows fewer GPUs than expected."""
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        driver = driver_version() if gpus < expected else None
        return cls(node_name(), gpus, str(torch.__version__), torch.version.cuda, driver)

    def __str__(self) -> str:
        build = f"torch {self.torch} {f'for CUDA {self.cuda}' if self.cuda else 'built without CUDA'}"
        return (
            f"{self.host} shows {self.gpus} GPUs ({build}, {f'driver {self.driver}' if self.driver else 'no driver'})"
        )


def decide(wanted: str, nodes: list[NodeGpus], local_world: int) -> str:
    """Return cuda or cpu for the whole training. Raise UserError if GPUs are wanted or seen, but not one per process.

    `wanted` is `Machine.wanted_device`: cuda, cpu or auto.
    """
    if wanted == "cpu" or (wanted == "auto" and not any(node.gpus for node in nodes)):
        return "cpu"
    if all(node.gpus >= local_world for node in nodes):
        return "cuda"
    first, *more = [node for node in nodes if node.gpus < local_world]
    also = f", and {len(more)} more nodes like it ({', '.join(node.host for node in more[:8])})" if more else ""
    raise UserError(
        f"expected {local_world} GPUs per node, one per process, but {first}{also}; correct gpus_per_node, "
        "nproc_per_node or the node's torch and driver, or set device: cpu in the profile (set-resources: train) "
        "to train on CPU cores"
    )


def agree(wanted: str, store: dist.Store) -> torch.device:
    """Return this rank's device. Collective: every rank of torchrun, before there is a process group."""
    rank, local_rank, local_world = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if wanted == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # of what looks for GPUs later, too; CUDA has not started yet
    if local_rank == 0:
        store.set(f"{_NODES}{rank // local_world}", json.dumps(asdict(NodeGpus.here(local_world))))
    if rank == 0:
        count = int(os.environ["WORLD_SIZE"]) // local_world
        nodes = [NodeGpus(**json.loads(store.get(f"{_NODES}{node}"))) for node in range(count)]
        try:
            decision = {"device": decide(wanted, nodes, local_world)}
        except UserError as error:
            decision = {"refused": str(error)}
        store.set(_DECISION, json.dumps(decision))
    decision = json.loads(store.get(_DECISION))
    if "refused" in decision:
        raise UserError(decision["refused"])
    return torch.device("cuda", local_rank) if decision["device"] == "cuda" else torch.device("cpu")


def driver_version() -> str | None:
    """Version of the NVIDIA driver; None without one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else None
