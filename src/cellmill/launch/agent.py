"""The torchrun agent of a node, with a rendezvous that is closed to other users.

    python -m cellmill.launch.agent [options of torchrun] --module MODULE [arguments]

The only module of this folder that imports torch: it runs only on the nodes.
"""

import ipaddress
import logging
import os
import resource
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from cellmill.files import write_text
from cellmill.imports import importing
from cellmill.launch.job import ERROR_FILE, NODE_LOG
from cellmill.launch.network import routed_interface
from cellmill.launch.rendezvous import LOOPBACK, NODES, Relay, Rendezvous, node_name
from cellmill.runs.jobs import LATE

try:
    with importing():
        from torch.distributed import PrefixStore, TCPStore
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import (
            RendezvousInfo,
            RendezvousParameters,
            RendezvousStoreInfo,
            rendezvous_handler_registry,
        )
        from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
        from torch.distributed.run import main
except Exception as error:  # a library that torch loads may be missing too
    line = (
        f"{socket.gethostname()}: {sys.executable} cannot import torch: {type(error).__name__}: "
        f"{' '.join(str(error).split())}; check modules, setup and container in the profile, and PYTHONPATH"
    )
    if not os.environ[ERROR_FILE]:
        sys.exit(line)
    write_text(Path(os.environ[ERROR_FILE]), line)
    sys.exit(1)

BACKEND = "cellmill"
LATE_S = 10.0  # nodes that have not joined by then are named
TIMEOUT_S = 600  # longest time until all agents have started, as torchrun's static rendezvous


class ClosedRendezvous(StaticTCPRendezvous):
    """A rendezvous of a fixed set of nodes at a store on the first node (launch/rendezvous.py)."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        start = Rendezvous.from_environment()
        self.start = start
        super().__init__(LOOPBACK, 0, start.node, start.nodes, parameters.run_id, TIMEOUT_S)

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        start = self.start
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        # each process of the job takes several descriptors on the first node; the usual soft limit
        # is 1,024
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        # gloo listens at the address of the node's name, which some installers make 127.0.1.1, out
        # of reach of others
        if start.host != LOOPBACK and start.nodes > 1:
            interface = interface_between_nodes(start.host)
            if interface:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        port = _start_relay(start)
        store = TCPStore(LOOPBACK, port, is_master=False, timeout=self.timeout)
        store.set(f"{NODES}/{start.node}", node_name())
        if start.node == 0 and start.join_s and os.environ[ERROR_FILE]:
            wait_for_agents(start, store)
        address = RendezvousStoreInfo(LOOPBACK, port)
        return RendezvousInfo(PrefixStore(self.run_id, store), start.node, start.nodes, address)


def _start_relay(start: Rendezvous) -> int:
    """Port of this node's relay. If it cannot listen, end the agent, and so the run, with one line."""
    try:
        return Relay(start).start()
    except OSError as error:
        line = f"{node_name()}: the processes of this job cannot be connected: {error}"
        if os.environ[ERROR_FILE]:
            write_text(Path(os.environ[ERROR_FILE]), line)
        sys.exit(line)


def wait_for_agents(start: Rendezvous, store: TCPStore) -> None:
    """Wait until the agents of all nodes have joined.

    Else end this agent with a line that names them.

    Meanwhile the line is in a file: the job may reach its time limit first.
    """
    began = time.monotonic()
    error = Path(os.environ[ERROR_FILE])
    reported = ""
    while True:
        late = []
        for number, host in enumerate(start.hosts):
            if not store.check([f"{NODES}/{number}"]):
                late.append(host)
        if not late:
            break
        waited_s = time.monotonic() - began
        names = ", ".join(late[:8]) + (", …" if len(late) > 8 else "")
        line = (
            f"{len(late)} of {start.nodes} nodes have not joined: {names}; their logs may say why; to leave them out, "
            "set sbatch_options: exclude=NODE in the profile"
        )
        if waited_s >= start.join_s:
            write_text(error, line)
            sys.exit(line)
        if waited_s >= LATE_S and line != reported:
            with suppress(OSError):  # a full disk
                write_text(error.with_name(LATE), line)
            reported = line
        time.sleep(0.2)
    error.with_name(LATE).unlink(missing_ok=True)


def interface_between_nodes(first: str) -> str | None:
    """Interface of the route to the first node, or of its own route out.

    None if the name of the host serves, or there is no route.
    """
    with suppress(OSError):
        named = socket.gethostbyname(socket.gethostname())
        if named == LOOPBACK or not ipaddress.ip_address(named).is_loopback:
            return None  # all nodes are on one machine, or the name is an interface's
    return routed_interface(first)


def run() -> None:
    """Run torchrun. Its messages and tracebacks go to the node's log if there is one."""
    error_file = os.environ[ERROR_FILE]
    host = node_name()
    log = os.environ.get(NODE_LOG, os.devnull)
    logging.raiseExceptions = False  # the disk may be full
    for name in ("torch", "torch.distributed"):
        logging.getLogger(name).handlers = [logging.FileHandler(log, delay=True)]
    rendezvous_handler_registry.register(BACKEND, ClosedRendezvous)
    try:
        main()
    except ChildFailedError as error:
        logging.getLogger("torch").error("%s", error)
        rank, failure = error.get_first_failure()
        if error_file and Path(error_file).exists():
            sys.exit(1)
        ended = f"exit code {failure.exitcode}"
        if failure.exitcode < 0:
            ended = f"signal {failure.signal_name()}"
        sys.exit(f"rank {rank} on {host} ended with {ended}")
    except Exception as error:
        logging.getLogger("torch").exception("torchrun failed")
        line = f"torchrun on {host}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if NODE_LOG in os.environ:
            line += f"; its traceback: {log}"
        sys.exit(line)


if __name__ == "__main__":
    run()
