"""The store answers torch's clients as torch's own server does."""

import multiprocessing
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import DistError, TCPStore

from cellmill.launch.rendezvous import LOOPBACK, Relay, Rendezvous
from cellmill.launch.store import OPERATIONS

KEYS = [f"key{number}" for number in range(6)]
CLIENT_ONLY = {
    "clone",
    "has_extended_api",
    "host",
    "libuvBackend",
    "port",
    "set_timeout",
    "timeout",
}


def serve(pipe: Any) -> None:
    """Serve in a process of its own, as an agent does: some methods of a client keep other threads
    from running.
    """
    pipe.send(Relay(Rendezvous("secret", 0, 1, LOOPBACK)).start())
    pipe.recv()


@pytest.fixture
def servers() -> Iterator[tuple[int, int]]:
    """Ports of torch's server and of this one."""
    torchs = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=serve, args=(theirs,))
    process.start()
    yield torchs.port, ours.recv()
    ours.send("end")
    process.join()


def connect(port: int, timeout_s: float = 20) -> TCPStore:
    return TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def draw_request(draw: random.Random) -> tuple[Any, ...]:
    """A method of a client and its arguments; none that waits for a key that is not there."""
    key, other = draw.sample(KEYS, 2)
    text = draw.choice(["", "1", "-7", "text", "x" * draw.choice([1, 1_440, 70_000])])
    return draw.choice(
        [
            ("set", key, text),
            ("compare_set", key, draw.choice(["", "1", text]), "new"),
            ("check", [key, other]),
            ("num_keys",),
            ("delete_key", key),
            ("append", key, text),
            ("multi_set", [key, other], [text, "second"]),
            ("add", f"n{key}", draw.randint(-5, 1 << 40)),
            ("queue_push", f"q{key}", text),
            ("queue_len", f"q{key}"),
            ("list_keys",),
            ("barrier", f"b{key}", 1),
            ("get_if_there", key),
            ("multi_get_if_there", [key, other]),
            ("queue_pop_if_there", f"q{key}"),
        ]
    )


def do(store: TCPStore, request: tuple[Any, ...]) -> Any:
    method, *arguments = request
    if method.endswith("_if_there"):
        keys = arguments[0] if isinstance(arguments[0], list) else [arguments[0]]
        if not store.check(keys):
            return "missing"
        method = method.removesuffix("_if_there")
    result = getattr(store, method)(*arguments)
    store.num_keys()  # set has no answer, and the other client must see its effect
    return sorted(result) if method == "list_keys" else result


@pytest.mark.parametrize("seed", range(4))
def test_random_requests_are_answered_as_by_torch(servers: tuple[int, int], seed: int) -> None:
    draw = random.Random(seed)
    clients = [[connect(port) for _ in range(2)] for port in servers]
    for _ in range(400):
        request = draw_request(draw)
        number = draw.randrange(2)
        expected, answered = (do(each[number], request) for each in clients)
        assert answered == expected, request


def test_every_method_of_a_client_is_an_operation(servers: tuple[int, int]) -> None:
    """A new version of torch may add operations."""
    methods = {name for name in dir(TCPStore) if not name.startswith("_")} - CLIENT_ONLY
    assert methods <= {*OPERATIONS}


def answers_of_waiting(port: int) -> list[Any]:
    """What clients see that wait for keys, values of a queue, and each other."""
    writer = connect(port)

    def wait_for(*keys: str) -> dict[str, bytes]:
        client = connect(port)
        client.wait([*keys])
        return {key: client.get(key) for key in keys}

    with ThreadPoolExecutor(8) as pool:
        waits = [
            pool.submit(wait_for, "a", "b"),
            pool.submit(wait_for, "c"),
            pool.submit(connect(port).queue_pop, "q"),
        ]
        waits += [pool.submit(connect(port).barrier, "two", 2) for _ in range(2)]
        time.sleep(0.2)
        writer.set("a", "1")
        writer.add("b", 1)
        writer.append("c", "1")
        writer.queue_push("q", "value")
        answers: list[Any] = [each.result(timeout=20) for each in waits]
    for give_up in (
        lambda limit: writer.wait(["never"], limit),
        lambda limit: writer.barrier("three", 3, limit),
    ):
        with pytest.raises(DistError):
            give_up(timedelta(milliseconds=50))
    # a cancelled wait leaves the connection usable
    return [*answers, writer.get("a"), writer.get("three"), writer.num_keys()]


def test_waiting_clients_are_served_as_by_torch(servers: tuple[int, int]) -> None:
    expected, answered = map(answers_of_waiting, servers)
    assert answered == expected


def test_each_waiting_client_pops_one_value_of_a_queue(servers: tuple[int, int]) -> None:
    for port in servers:
        with ThreadPoolExecutor(3) as pool:
            popped = [pool.submit(connect(port).queue_pop, "q") for _ in range(3)]
            for number in range(3):
                time.sleep(0.1)
                connect(port).queue_push("q", str(number))
            assert sorted(each.result() for each in popped) == [b"0", b"1", b"2"]


@pytest.mark.parametrize(
    "request_",
    [b"\xff", b"\0\0\0\0\0", b"\0\xce\xf7\x85\x3c\xff", b"\0\xce\xf7\x85\x3c\1" + b"\xff" * 8],
)
def test_a_connection_that_sends_no_request_is_closed(
    servers: tuple[int, int], request_: bytes
) -> None:
    with socket.create_connection((LOOPBACK, servers[1]), timeout=5) as connection:
        connection.sendall(request_)
        assert connection.recv(100) == b""
    assert connect(servers[1]).num_keys() == 0


def test_a_text_cannot_be_incremented(servers: tuple[int, int]) -> None:
    client = connect(servers[1])
    client.set("text", "no number")
    with pytest.raises(DistError):
        client.add("text", 1)
    assert connect(servers[1]).get("text") == b"no number"
