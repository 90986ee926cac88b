"""The store of a job is reached by its own processes alone."""

import asyncio
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters

from cellmill.launch import agent, rendezvous
from cellmill.launch.rendezvous import LOOPBACK, Relay, Rendezvous, user_of_connection

NOBODY = 65534
STILL_OPEN = b"it waits for more"


def answer(port: int, said: bytes, skip: int = 0) -> bytes:
    """Bytes that a listener on the loopback answers after its first `skip` bytes; none if it hangs
    up.
    """
    with socket.create_connection((LOOPBACK, port), timeout=3) as connection:
        assert len(connection.recv(skip) if skip else b"") == skip
        try:
            connection.sendall(said)
            return connection.recv(1000)
        except ConnectionError:
            return b""
        except TimeoutError:
            return STILL_OPEN


def is_let_in(port: int, node: Rendezvous) -> bool:
    """True if the entrance accepts a node's proof of its secret, and proves that it knows it too."""
    with socket.create_connection((LOOPBACK, port), timeout=3) as connection:
        theirs = connection.recv(32)
        ours = secrets.token_bytes(32)
        connection.sendall(ours + node.proof("node", str(port), theirs, ours))
        try:
            proof = connection.recv(1000)
        except ConnectionError:
            return False
    return proof == node.proof("entrance", str(port), theirs, ours)


def as_user(user: int, ask: Callable[[], bytes]) -> bytes:
    """The answer that a process of `user` gets."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setuid(user)
            os.write(writing, ask())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with open(reading, "rb") as pipe:
        return pipe.read()


@dataclass
class Nodes:
    """The store on a first node, and the way to it from there and from a second node."""

    rendezvous: Rendezvous
    first: Relay
    second: Relay

    def client(self, relay: Relay) -> TCPStore:
        return TCPStore(LOOPBACK, relay.port, is_master=False, timeout=timedelta(seconds=60))


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    rendezvous = Rendezvous(secrets.token_hex(32), 0, 2, LOOPBACK)
    with socket.create_server((LOOPBACK, rendezvous.ports[0])):  # the entrance takes the next
        first = Relay(rendezvous)
        first.start()
        second = Relay(replace(rendezvous, node=1))
        second.start()
        nodes = Nodes(rendezvous, first, second)
        nodes.client(first).set("key", "ours")
        yield nodes


def test_processes_of_both_nodes_share_one_store(nodes: Nodes) -> None:
    ours = nodes.client(nodes.first)
    theirs = nodes.client(nodes.second)
    large = secrets.token_bytes(3_000_000).hex()
    theirs.set("large", large)
    assert ours.get("large").decode() == large
    with ThreadPoolExecutor(16) as pool:
        added = pool.map(
            lambda i: nodes.client((nodes.first, nodes.second)[i % 2]).add("n", 1), range(50)
        )
    assert sorted(added) == list(range(1, 51))


def listening_ports() -> set[int]:
    """TCP ports on which this process listens."""
    return {
        each.laddr.port
        for each in psutil.Process().net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    }


def test_a_first_node_opens_only_its_relay_and_entrance() -> None:
    place = Rendezvous(secrets.token_hex(32), 0, 2, LOOPBACK)
    before = listening_ports()
    relay = Relay(place).start()
    assert listening_ports() - before == {relay, place.ports[0]}


@pytest.mark.needs_root
def test_another_user_of_the_node_is_turned_away(nodes: Nodes) -> None:
    for port in (nodes.first.port, nodes.second.port):
        ask = partial(answer, port, b"\0")
        assert as_user(0, ask) == STILL_OPEN
        assert as_user(NOBODY, ask) == b""
    assert as_user(NOBODY, lambda: answer(nodes.rendezvous.ports[1], b"\0" * 64, skip=32)) == b""
    assert nodes.client(nodes.first).get("key") == b"ours"


def test_the_entrance_opens_only_to_the_secret(nodes: Nodes) -> None:
    port = nodes.rendezvous.ports[1]
    assert is_let_in(port, nodes.rendezvous)
    assert not is_let_in(port, replace(nodes.rendezvous, secret="guessed"))
    for said in (secrets.token_bytes(64), secrets.token_bytes(10_000)):
        assert answer(port, said, skip=32) == b"", "a nonce, and nothing of the store"
    assert nodes.client(nodes.second).get("key") == b"ours"


def test_a_node_does_not_take_another_listener_for_the_entrance() -> None:
    """Who cannot prove that he knows the secret gets no data of the job."""
    place = Rendezvous(secrets.token_hex(32), 1, 2, LOOPBACK)
    with (
        socket.create_server((LOOPBACK, place.ports[0])) as impostor,
        ThreadPoolExecutor(1) as pool,
    ):

        def pretend() -> bytes:
            caller, _ = impostor.accept()
            with caller:
                caller.sendall(secrets.token_bytes(32))
                asked = caller.recv(64)
                caller.sendall(secrets.token_bytes(32))
                return asked + caller.recv(1000)

        heard = pool.submit(pretend)
        assert asyncio.run(Relay(place)._knock(place.ports[0])) is None
        assert len(heard.result()) == 64


def test_the_kernel_names_the_user_of_a_connection() -> None:
    with (
        socket.create_server((LOOPBACK, 0)) as listener,
        socket.create_connection(listener.getsockname()) as made,
    ):
        ours = made.getsockname()
        theirs = listener.getsockname()
        assert user_of_connection(ours, theirs) == os.getuid()
        assert user_of_connection(theirs, (LOOPBACK, ours[1] + 1)) is None
        # the same port of another address of the loopback is another connection, which ends soon
        with socket.socket() as other:
            other.bind(("127.0.0.2", ours[1]))
            other.connect(theirs)
            assert user_of_connection(other.getsockname(), theirs) == os.getuid()
            other.shutdown(socket.SHUT_WR)
            assert user_of_connection(other.getsockname(), theirs) is None


def test_the_handshake_cannot_be_passed_on(nodes: Nodes) -> None:
    """Who has no secret, but stands between a node and the entrance, gets no connection."""
    with socket.create_server((LOOPBACK, 0)) as between, ThreadPoolExecutor(1) as pool:

        def pass_on() -> None:
            caller, _ = between.accept()
            with (
                caller,
                socket.create_connection((LOOPBACK, nodes.rendezvous.ports[1])) as entrance,
            ):
                caller.sendall(entrance.recv(32))
                entrance.sendall(caller.recv(64))
                caller.sendall(entrance.recv(32))

        passed = pool.submit(pass_on)
        with pytest.raises(asyncio.IncompleteReadError):
            asyncio.run(nodes.second._knock(between.getsockname()[1]))
        passed.result()


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("no-such-node.invalid", "node2 cannot resolve no-such-node.invalid, the first node ("),
        (LOOPBACK, f"node2 cannot reach {LOOPBACK}, the first node (Connect call failed"),
    ],
)
def test_an_unreachable_first_node_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], host: str, said: str
) -> None:
    monkeypatch.setattr(rendezvous, "RESOLVE_S", 0.0)
    monkeypatch.setattr(rendezvous, "REACH_S", 0.0)
    monkeypatch.setattr(rendezvous, "_RETRY_S", 0.01)
    monkeypatch.setenv("SLURMD_NODENAME", "node2")
    relay = Relay(Rendezvous("secret", 1, 2, host))
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(relay._to_first_node(), 0.5))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(said)


def test_an_entrance_without_a_free_port_is_the_run_s_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(agent.ERROR_FILE, str(tmp_path / "error.txt"))
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    monkeypatch.setattr(agent.resource, "setrlimit", lambda *_: None)  # of this process
    start = Rendezvous(secrets.token_hex(32), 0, 2, LOOPBACK)
    for name, value in start.environment().items():
        monkeypatch.setenv(name, value)
    parameters = RendezvousParameters("static", "", run_id="one", min_nodes=2, max_nodes=2)
    with ExitStack() as taken:
        for port in start.ports:
            taken.enter_context(socket.create_server((LOOPBACK, port)))
        with pytest.raises(SystemExit) as end:
            agent.ClosedRendezvous(parameters).next_rendezvous()
    line = f"node1: the processes of this job cannot be connected: no port of {start.ports} is free on this node"
    assert str(end.value) == line
    assert (tmp_path / "error.txt").read_text() == line


def test_nodes_that_never_join_end_the_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nodes: Nodes
) -> None:
    monkeypatch.setenv(agent.ERROR_FILE, str(tmp_path / "error.txt"))
    monkeypatch.setattr(agent, "LATE_S", 0.0)
    store = nodes.client(nodes.first)
    names = tuple(f"n{number}" for number in range(1, 13))
    for number in (0, 2):
        store.set(f"{rendezvous.NODES}/{number}", "")
    with pytest.raises(SystemExit) as end:
        agent.wait_for_agents(replace(nodes.rendezvous, nodes=12, hosts=names, join_s=0.1), store)
    line = (
        "10 of 12 nodes have not joined: n2, n4, n5, n6, n7, n8, n9, n10, …; their logs may say why; "
        "to leave them out, set sbatch_options: exclude=NODE in the profile"
    )
    assert (
        str(end.value),
        (tmp_path / "error.txt").read_text(),
        (tmp_path / "late.txt").read_text(),
    ) == (line,) * 3
    store.set(f"{rendezvous.NODES}/1", "")
    agent.wait_for_agents(replace(nodes.rendezvous, nodes=3, hosts=names[:3], join_s=0.1), store)
    assert not (tmp_path / "late.txt").exists()


def test_an_interface_is_named_if_the_node_name_is_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent.socket, "gethostbyname", lambda name: "192.168.7.1")
    assert agent.interface_between_nodes("10.0.0.1") is None  # the name serves
    monkeypatch.setattr(agent.socket, "gethostbyname", lambda name: "127.0.1.1")
    up = [name for name, of in psutil.net_if_stats().items() if of.isup]
    found = [
        (name, each)
        for name, entries in psutil.net_if_addrs().items()
        for each in entries
        if name in up
    ]
    found = [
        (name, each.address)
        for name, each in found
        if each.family == socket.AF_INET and name != "lo"
    ]
    for name, address in found[:1]:  # none without a network
        assert agent.interface_between_nodes(address) == name
