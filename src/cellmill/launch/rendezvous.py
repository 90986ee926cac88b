"""The path to the store through which the processes of a job find each other, closed to others.

torch's store has no authentication: whoever reaches its port can list and overwrite all keys, which
ends the run. Here the store (`launch/store.py`) is in the agent of the first node and has no port.
Each node has a relay, to which its processes connect as if it were the store:

    process -> relay of its node      on the loopback; the kernel says which user connects
            -> entrance, first node   on all interfaces; both sides prove that they know the secret of this start
            -> store

None of this needs a privilege: the kernel lists the user of each connection in /proc/net/tcp.

The secret is made for each start and travels in files and environments that other users cannot
read; ports derive from it, so none of it appears in a command line. The traffic itself is not
encrypted.
"""

import asyncio
import hmac
import ipaddress
import json
import os
import re
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from cellmill.launch.store import Reader, Store, Writer

VARIABLE = "CELLMILL_RENDEZVOUS"
LOOPBACK = "127.0.0.1"
NODES = "nodes"  # prefix of the store's keys with the name of each node, by its number
HANDSHAKE_S = 10.0
RESOLVE_S = 30.0  # a name that cannot be resolved by then is reported once
REACH_S = 60.0  # so is a first node that cannot be reached: agents start in any order
UNREACHED = "its task has not begun, or the network between the nodes does not let it through"
# bytes
_NONCE = 32
_PROOF = 32
_RETRY_S = 0.2
Endpoint = tuple[str, int]  # address and port of one end of a connection
Streams = tuple[Reader, Writer]
Handler = Callable[[Reader, Writer], Awaitable[None]]


def node_name() -> str:
    """Name of this node: SLURM's, if there is SLURM."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


@dataclass(frozen=True)
class Rendezvous:
    """Rendezvous information that an agent needs to find the others of its start."""

    secret: str
    node: int
    nodes: int
    host: str  # the first node
    hosts: tuple[str, ...] = ()  # names of all nodes, for messages
    # how long the first node waits for the agents of the others; 0: until torchrun gives up
    join_s: float = 0.0

    @classmethod
    def from_environment(cls) -> "Rendezvous":
        return cls(**json.loads(os.environ[VARIABLE]))

    def environment(self) -> dict[str, str]:
        """Variables for the agent; only processes of the same user can read them."""
        return {VARIABLE: json.dumps(asdict(self))}

    @property
    def ports(self) -> list[int]:
        """Ports of the entrance, in the order of choice: the first that is free on the first node.
        Below Linux's ephemeral ports, so that no outgoing connection occupies them.
        """
        digest = self.proof("ports")
        return [20_000 + int.from_bytes(digest[i : i + 2]) % 12_000 for i in range(0, 16, 2)]

    def proof(self, *parts: str | bytes) -> bytes:
        """SHA-256 HMAC of `parts` under the secret."""
        message = b"\0".join(part.encode() if isinstance(part, str) else part for part in parts)
        return hmac.digest(self.secret.encode(), message, "sha256")


class Relay:
    """This node's way to the store, in a thread of its agent. The first node's relay has the store."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rendezvous = rendezvous
        self.port = 0
        self._store = Store() if rendezvous.node == 0 else None
        self._ports = rendezvous.ports  # the entrance's; the port that was reached last comes first
        self._error: OSError | None = None
        self._has_reported = False
        self._started = threading.Event()

    def start(self) -> int:
        """Port of the relay on the loopback. Raise OSError if the entrance finds no free port."""

        def run() -> None:
            asyncio.run(self._run())

        threading.Thread(target=run, daemon=True, name="rendezvous").start()
        self._started.wait()
        if self._error is not None:
            raise self._error
        return self.port

    async def _run(self) -> None:
        servers = []
        try:
            handler = _closing(self._serve_process)
            relay = await asyncio.start_server(handler, LOOPBACK, 0, backlog=1024)
            servers.append(relay)
            self.port = relay.sockets[0].getsockname()[1]
            if self._store is not None and self.rendezvous.nodes > 1:
                servers.append(await self._entrance())
        except OSError as error:
            self._error = error
            return
        finally:
            self._started.set()
        await asyncio.gather(*(server.serve_forever() for server in servers))

    async def _entrance(self) -> asyncio.Server:
        # None: all interfaces of both protocols, where IPv6 is not switched off
        hosts = [LOOPBACK] if self.rendezvous.host == LOOPBACK else [None, "0.0.0.0"]
        handler = _closing(self._serve_node)
        for port, host in product(self.rendezvous.ports, hosts):
            with suppress(OSError):
                return await asyncio.start_server(handler, host, port, backlog=1024)
        raise OSError(f"no port of {self.rendezvous.ports} is free on this node")

    async def _serve_process(self, reader: Reader, writer: Writer) -> None:
        """Serve a process of this node, if the kernel says that it is this user's."""
        peer = writer.get_extra_info("peername")
        if user_of_connection(peer, (LOOPBACK, self.port)) != os.getuid():
            return
        if self._store is not None:
            await self._store.serve(reader, writer)
        else:
            await _join((reader, writer), await self._to_first_node())

    async def _serve_node(self, reader: Reader, writer: Writer) -> None:
        """Serve another node's relay.

        Both prove that they know the secret, over nonces of both and the port, so that nobody can
        pass the proof on.
        """
        port = str(writer.get_extra_info("sockname")[1])
        nonce = secrets.token_bytes(_NONCE)
        writer.write(nonce)
        async with asyncio.timeout(HANDSHAKE_S):
            answer = await reader.readexactly(_NONCE + _PROOF)
        theirs = answer[:_NONCE]
        proof = answer[_NONCE:]
        if self._store is None or not hmac.compare_digest(
            proof, self.rendezvous.proof("node", port, nonce, theirs)
        ):
            return
        writer.write(self.rendezvous.proof("entrance", port, nonce, theirs))
        await self._store.serve(reader, writer)

    async def _to_first_node(self) -> Streams:
        """A connection through the entrance, as soon as it is there: agents start in any order."""
        began = asyncio.get_running_loop().time()
        while True:
            for port in self._ports:
                try:
                    # wait_for of Python 3.11 may lose a cancellation
                    async with asyncio.timeout(HANDSHAKE_S):
                        connection = await self._knock(port)
                    if connection is not None:
                        self._ports = [port, *(other for other in self._ports if other != port)]
                        return connection
                except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
                    waited_s = asyncio.get_running_loop().time() - began
                    self._report(error, waited_s)
            await asyncio.sleep(_RETRY_S)

    def _report(self, error: Exception, waited_s: float) -> None:
        """Say once that the first node cannot be reached, if that has taken long."""
        is_unknown = isinstance(error, socket.gaierror)
        if self._has_reported or waited_s < (RESOLVE_S if is_unknown else REACH_S):
            return
        self._has_reported = True
        reason = type(error).__name__
        if isinstance(error, OSError) and error.strerror:
            reason = error.strerror
        first = f"{self.rendezvous.host}, the first node ({reason})"
        line = f"{node_name()} cannot reach {first}: {UNREACHED}"
        if is_unknown:
            line = f"{node_name()} cannot resolve {first}: correct the nodes' DNS or /etc/hosts"
        print(line, file=sys.stderr)

    async def _knock(self, port: int) -> Streams | None:
        """A connection through the entrance at `port`; None if something else listens there."""
        reader, writer = await asyncio.open_connection(self.rendezvous.host, port)
        with ExitStack() as on_failure:
            on_failure.callback(writer.close)
            theirs = await reader.readexactly(_NONCE)
            ours = secrets.token_bytes(_NONCE)
            writer.write(ours + self.rendezvous.proof("node", str(port), theirs, ours))
            expected = self.rendezvous.proof("entrance", str(port), theirs, ours)
            if hmac.compare_digest(await reader.readexactly(_PROOF), expected):
                on_failure.pop_all()
                return reader, writer
        return None


def _closing(serve: Handler) -> Handler:
    """Handler that closes the connection after `serve`, and takes a lost connection as its end."""

    async def handle(reader: Reader, writer: Writer) -> None:
        try:
            with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
                await serve(reader, writer)
        finally:
            writer.close()

    return handle


async def _join(near: Streams, far: Streams) -> None:
    """Copy between two connections, both ways, until one of them ends."""
    copies = [
        asyncio.ensure_future(_copy(near[0], far[1])),
        asyncio.ensure_future(_copy(far[0], near[1])),
    ]
    try:
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for copy in copies:
            copy.cancel()
        far[1].close()


async def _copy(reader: Reader, writer: Writer) -> None:
    with suppress(OSError):
        while True:
            data = await reader.read(65_536)
            if not data:
                return
            writer.write(data)
            await writer.drain()


def user_of_connection(local: Endpoint, remote: Endpoint) -> int | None:
    """User of the process at the end `local` of a TCP connection of this machine; None if it is gone.

    Addresses count as well as ports: the same port of another address of the loopback may be
    anybody's.
    """
    for *ends, user in _connections():
        if ends == [tuple(local), tuple(remote)]:
            return user
    return None


def _connections() -> list[tuple[Endpoint, Endpoint, int]]:
    """(local end, remote end, user) of the established TCP connections of this machine."""
    connections = []
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(FileNotFoundError):  # no IPv6
            for line in Path(file).read_text().splitlines()[1:]:
                local, remote, state, user = (line.split()[column] for column in (1, 2, 3, 7))
                if state == "01":
                    connections.append((_endpoint(local), _endpoint(remote), int(user)))
    return connections


def _endpoint(text: str) -> Endpoint:
    """Address and port. The kernel writes words of the address as numbers of this machine."""
    address, _, port = text.partition(":")
    words = [struct.pack("=I", int(word, 16)) for word in re.findall(".{8}", address)]
    ip = ipaddress.ip_address(b"".join(words))
    return str(getattr(ip, "ipv4_mapped", None) or ip), int(port, 16)
