"""The torchrun agent of a node, with a rendezvous that is closed to other users:
`launch/rendezvous.py`.

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

import psutil

from cellmill.files import write_text
from cellmill.imports import importing
from cellmill.launch.job import ERROR_FILE, NODE_LOG
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
LATE_S = 10.0  # after which nodes that have not joined are named
TIMEOUT_S = 600  # until all agents have started, as torchrun's static rendezvous


class ClosedRendezvous(StaticTCPRendezvous):
    """A rendezvous of a fixed set of nodes at a store on the first one."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self.place = Rendezvous.from_environment()
        super().__init__(
            LOOPBACK, 0, self.place.node, self.place.nodes, parameters.run_id, TIMEOUT_S
        )

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        place = self.place
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        # each process of the job takes several descriptors on the first node; the usual soft limit
        # is 1,024
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        # gloo listens at the address of the node's name, which some installers make 127.0.1.1, out
        # of reach of others
        if (
            place.host != LOOPBACK
            and place.nodes > 1
            and (interface := interface_between_nodes(place.host))
        ):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        port = _start_relay(place)
        store = TCPStore(LOOPBACK, port, is_master=False, timeout=self.timeout)
        store.set(f"{NODES}/{place.node}", node_name())
        if place.node == 0 and place.join_s and os.environ[ERROR_FILE]:
            wait_for_agents(place, store)
        address = RendezvousStoreInfo(LOOPBACK, port)
        return RendezvousInfo(PrefixStore(self.run_id, store), place.node, place.nodes, address)


def _start_relay(place: Rendezvous) -> int:
    """Port of this node's relay. Ends the agent, and the run with it, with one line if it cannot
    listen.
    """
    try:
        return Relay(place).start()
    except OSError as error:
        line = f"{node_name()}: the processes of this job cannot be connected: {error}"
        if os.environ[ERROR_FILE]:
            write_text(Path(os.environ[ERROR_FILE]), line)
        sys.exit(line)


def wait_for_agents(node: Rendezvous, store: TCPStore) -> None:
    """Wait until the agents of all nodes have joined; end this one with a line that names those
    that have not.

    Meanwhile the line is in a file: the job may reach its time limit first.
    """
    began = time.monotonic()
    error = Path(os.environ[ERROR_FILE])
    said = ""
    while late := [
        host for number, host in enumerate(node.hosts) if not store.check([f"{NODES}/{number}"])
    ]:
        waited_s = time.monotonic() - began
        who = ", ".join(late[:8]) + (", …" if len(late) > 8 else "")
        line = (
            f"{len(late)} of {node.nodes} nodes have not joined: {who}; their logs may say why; to leave them out, set "
            "sbatch_options: exclude=NODE in the profile"
        )
        if waited_s >= node.join_s:
            write_text(error, line)
            sys.exit(line)
        if waited_s >= LATE_S and line != said:
            with suppress(OSError):  # a full disk
                write_text(error.with_name(LATE), line)
            said = line
        time.sleep(0.2)
    error.with_name(LATE).unlink(missing_ok=True)


def interface_between_nodes(first: str) -> str | None:
    """Interface of the route to the first node, or of its own route out; None where the name
    serves, or no route.
    """
    with suppress(OSError):
        named = socket.gethostbyname(socket.gethostname())
        if named == LOOPBACK or not ipaddress.ip_address(named).is_loopback:
            return None  # all nodes are on one machine, or the name is an interface's
    # of a documentation network: nothing is sent, only the route is looked up
    for target in (first, "192.0.2.1"):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            address = probe.getsockname()[0]
            if ipaddress.ip_address(address).is_loopback:
                continue
            for name, entries in psutil.net_if_addrs().items():
                if address in [entry.address for entry in entries]:
                    return name
    return None


def run() -> None:
    """Run torchrun. Its messages and tracebacks go to the node's log in a cluster job, otherwise
    nowhere.
    """
    given = os.environ[ERROR_FILE]
    host = socket.gethostname()
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
        ended = (
            f"signal {failure.signal_name()}"
            if failure.exitcode < 0
            else f"exit code {failure.exitcode}"
        )
        sys.exit(
            1 if given and Path(given).exists() else f"rank {rank} on {host} ended with {ended}"
        )
    except Exception as error:
        logging.getLogger("torch").exception("torchrun failed")
        sys.exit(
            f"torchrun on {host}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            + (f"; its traceback: {log}" if NODE_LOG in os.environ else "")
        )


if __name__ == "__main__":
    run()
