"""The key-value store of a job: a server for torch's `TCPStore` clients without a port.

torch's server listens on a port of the node and takes whoever connects; no kernel lets an ordinary
user close a TCP port to the other users of a machine. Here `launch/rendezvous.py` accepts each
connection, checks who made it, and only then hands it to `Store.serve`.

The wire protocol is that of `torch/csrc/distributed/c10d/TCPStore*.cpp` in torch 2.11 to 2.15,
which adds operations at the end and changes none. A request is one byte, the operation, and its
arguments in the byte order of the machine: a text or a value as its length, uint64, and its bytes;
a number as int64. A client never has two requests under way, but may cancel a wait.
`tests/unit/test_store.py` runs each operation against torch's server as well.
"""

import asyncio
import struct
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter

_MAGIC = 0x3C85F7CE  # the first request of a client
_MAX_KEYS = 128 * 1024  # most keys in one request, as in torch
_MAX_KEY = 8 * 1024  # bytes
_MAX_VALUE = 8 * 1024 * 1024  # bytes
# answers of check
_READY = b"\0"
_NOT_READY = b"\1"
# answers of wait, barrier and cancel
_STOP_WAITING = b"\0"
_WAIT_CANCELED = b"\1"
OPERATIONS = (
    "validate set compare_set get add check wait num_keys delete_key append multi_get multi_set "
    "cancel_wait ping queue_push queue_pop queue_len list_keys barrier"
).split()
"""Operations by their number in a request."""


class BadRequest(Exception):
    """A client sent something that is no request; its connection is closed."""


class Client:
    """One connection of a client, and the keys that it waits for."""

    def __init__(self, reader: Reader, writer: Writer) -> None:
        self._reader = reader
        self._writer = writer
        self.missing: set[bytes] = set()  # keys of the wait under way

    async def read(self, layout: str) -> int:
        """One number; `layout` is that of `struct`."""
        raw = await self._reader.readexactly(struct.calcsize(layout))
        return int(struct.unpack(layout, raw)[0])

    async def read_key(self) -> bytes:
        return await self._read_bytes(_MAX_KEY)

    async def read_value(self) -> bytes:
        return await self._read_bytes(_MAX_VALUE)

    async def read_keys(self) -> list[bytes]:
        return [await self.read_key() for _ in range(await self.read_key_count())]

    async def read_key_count(self) -> int:
        count = await self.read("=Q")
        if count > _MAX_KEYS:
            raise BadRequest
        return count

    async def _read_bytes(self, max_bytes: int) -> bytes:
        length = await self.read("=Q")
        if length > max_bytes:
            raise BadRequest
        return await self._reader.readexactly(length)

    def answer(self, raw: bytes) -> None:
        self._writer.write(raw)

    def answer_number(self, number: int) -> None:
        self._writer.write(struct.pack("=q", number))

    def answer_value(self, value: bytes) -> None:
        self._writer.write(struct.pack("=Q", len(value)) + value)

    async def drain(self) -> None:
        await self._writer.drain()


class Store:
    """Keys and values of one job. All methods run in one event loop."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._queues: defaultdict[bytes, deque[bytes]] = defaultdict(deque)
        # clients by a key that they wait for
        self._waiting: defaultdict[bytes, list[Client]] = defaultdict(list)
        self._handlers: list[Callable[[Client], Awaitable[None]]] = [
            getattr(self, f"_{operation}") for operation in OPERATIONS
        ]

    async def serve(self, reader: Reader, writer: Writer) -> None:
        """Answer the requests of one client until it hangs up or sends what is no request."""
        client = Client(reader, writer)
        try:
            with suppress(OSError, asyncio.IncompleteReadError, BadRequest):
                if await client.read("=B") != OPERATIONS.index("validate"):
                    raise BadRequest
                await self._validate(client)
                while True:
                    operation = await client.read("=B")
                    if operation >= len(self._handlers):
                        raise BadRequest
                    await self._handlers[operation](client)
                    await client.drain()
        finally:
            self._stop_waiting(client)

    async def _validate(self, client: Client) -> None:
        if await client.read("=I") != _MAGIC:
            raise BadRequest

    async def _ping(self, client: Client) -> None:
        client.answer(struct.pack("=I", await client.read("=I")))

    async def _set(self, client: Client) -> None:
        key = await client.read_key()
        self._store(key, await client.read_value())

    async def _compare_set(self, client: Client) -> None:
        """Set the value if it is the expected one; answer the value afterwards.

        A missing key counts as empty, and answers what was expected.
        """
        key = await client.read_key()
        expected = await client.read_value()
        desired = await client.read_value()
        if self._values.get(key, b"") == expected:
            self._store(key, desired)
        client.answer_value(self._values.get(key, expected))

    async def _get(self, client: Client) -> None:
        client.answer_value(self._values.get(await client.read_key(), b""))

    async def _add(self, client: Client) -> None:
        key = await client.read_key()
        total = self._as_number(key) + await client.read("=q")
        self._store(key, str(total).encode())
        client.answer_number(total)

    async def _check(self, client: Client) -> None:
        present = map(self._has, await client.read_keys())
        client.answer(_READY if all(present) else _NOT_READY)

    async def _wait(self, client: Client) -> None:
        """Answer as soon as all keys are there; meanwhile the client may cancel."""
        client.missing = {key for key in await client.read_keys() if not self._has(key)}
        for key in client.missing:
            self._waiting[key].append(client)
        if not client.missing:
            client.answer(_STOP_WAITING)

    async def _num_keys(self, client: Client) -> None:
        client.answer_number(len(self._values))

    async def _delete_key(self, client: Client) -> None:
        deleted = self._values.pop(await client.read_key(), None)
        client.answer_number(0 if deleted is None else 1)

    async def _append(self, client: Client) -> None:
        key = await client.read_key()
        self._store(key, self._values.get(key, b"") + await client.read_value())

    async def _multi_get(self, client: Client) -> None:
        for key in await client.read_keys():
            client.answer_value(self._values.get(key, b""))

    async def _multi_set(self, client: Client) -> None:
        for _ in range(await client.read_key_count()):
            await self._set(client)

    async def _cancel_wait(self, client: Client) -> None:
        self._stop_waiting(client)
        client.answer(_WAIT_CANCELED)

    async def _queue_push(self, client: Client) -> None:
        key = await client.read_key()
        self._queues[key].append(await client.read_value())
        if self._waiting.get(key):  # one value serves one client
            self._found(self._waiting[key].pop(0), key)

    async def _queue_pop(self, client: Client) -> None:
        """Answer the length of the queue, and its first value if it has one."""
        queue = self._queues[await client.read_key()]
        client.answer_number(len(queue))
        if queue:
            client.answer_value(queue.popleft())

    async def _queue_len(self, client: Client) -> None:
        client.answer_number(len(self._queues[await client.read_key()]))

    async def _list_keys(self, client: Client) -> None:
        client.answer_number(len(self._values))
        for key in self._values:
            client.answer_value(key)

    async def _barrier(self, client: Client) -> None:
        """Answer as soon as `world_size` clients have come.

        The value of the key is how many there were so far.
        """
        key = await client.read_key()
        world_size = await client.read("=q")
        arrived = self._as_number(key) + 1
        self._values[key] = str(arrived).encode()
        client.missing = {key}
        self._waiting[key].append(client)
        if arrived >= world_size:
            self._announce(key)

    def _has(self, key: bytes) -> bool:
        return key in self._values or bool(self._queues.get(key))

    def _as_number(self, key: bytes) -> int:
        try:
            return int(self._values.get(key, b"0"))
        except ValueError:
            raise BadRequest from None

    def _store(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        self._announce(key)

    def _announce(self, key: bytes) -> None:
        for client in self._waiting.pop(key, []):
            self._found(client, key)

    def _found(self, client: Client, key: bytes) -> None:
        """A key that `client` waits for is there."""
        client.missing.discard(key)
        if not client.missing:
            client.answer(_STOP_WAITING)

    def _stop_waiting(self, client: Client) -> None:
        for key in client.missing:
            if client in self._waiting[key]:
                self._waiting[key].remove(client)
        client.missing = set()
