"""One torchrun agent as a command: what every launcher starts, on this machine or as the task of a cluster job."""

from __future__ import annotations

import sys
from dataclasses import dataclass

# without the last two an agent dies of the signal clusters announce a time limit with, and orphans its workers
SIGNALS_TO_HANDLE = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"


@dataclass(frozen=True)
class Job:
    """`nproc_per_node` processes of a Python module on each of `nodes` machines."""

    module: str
    arguments: list[str]
    nodes: int
    nproc_per_node: int
    max_restarts: int = 0
    """How often all are started again after one was lost; see `restart`."""
    error_file: str = ""
    """Where a process that knows why it failed says so."""
    state_file: str = ""
    """JSON whose `step` is where the newest start went on."""

    def command(self, node_rank: int, address: str, port: int, signals_to_handle: str = SIGNALS_TO_HANDLE) -> list[str]:
        """The agent of one node; node 0 is at `address`."""
        return [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nnodes={self.nodes}",
            f"--nproc-per-node={self.nproc_per_node}",
            f"--node-rank={node_rank}",
            f"--master-addr={address}",
            f"--master-port={port}",
            "--max-restarts=0",  # see `restart`
            f"--signals-to-handle={signals_to_handle}",
            "--module",
            self.module,
            *self.arguments,
        ]
