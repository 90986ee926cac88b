"""The torchrun agent of one node, as a command line: what every launcher starts."""

import os
import signal
import sys
from dataclasses import dataclass

from cellmill.launch.signals import STOP_SIGNALS

# torchrun handles fewer by default: it would die of the signal that announces a time limit, and orphan its workers
AGENT_SIGNALS = ",".join(number.name for number in (*STOP_SIGNALS, signal.SIGQUIT))


@dataclass(frozen=True)
class Job:
    """`nproc_per_node` processes of a Python module on each of `nodes` nodes."""

    module: str
    arguments: list[str]
    nodes: int
    nproc_per_node: int
    max_restarts: int = 0
    """Restarts of all processes after one was lost; see launch/restart.py."""
    error_file: str = ""
    """File for the line of a process that knows why it failed."""
    state_file: str = ""
    """JSON file whose `step` is the step that the latest start resumed from."""

    def command(self, node_rank: int, address: str, port: int, signals: str = AGENT_SIGNALS) -> list[str]:
        """The agent of one node; node 0 listens at `address`."""
        return [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nnodes={self.nodes}",
            f"--nproc-per-node={self.nproc_per_node}",
            f"--node-rank={node_rank}",
            f"--master-addr={address}",
            f"--master-port={port}",
            "--max-restarts=0",  # see launch/restart.py
            f"--signals-to-handle={signals}",
            "--module",
            self.module,
            *self.arguments,
        ]


def agent_environment(processes: int) -> dict[str, str]:
    """Environment of an agent and its workers on a machine that runs `processes` of them."""
    threads = max(1, len(os.sched_getaffinity(0)) // processes)  # one per core: more would compete
    return {"OMP_NUM_THREADS": str(threads), **os.environ, "PYTHONUNBUFFERED": "1"}
