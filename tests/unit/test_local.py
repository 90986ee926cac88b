"""The port of a job on this machine stays its own from the moment it is chosen."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from cellmill.launch.local import reserve_port


def test_a_reserved_port_is_open_to_the_store_and_to_nobody_else() -> None:
    with reserve_port() as held, socket.socket() as other:
        port = held.getsockname()[1]
        for host in ("127.0.0.1", "127.0.0.2", ""):
            with pytest.raises(OSError, match="Address already in use"):
                other.bind((host, port))
        server = TCPStore("127.0.0.1", port, 1, True, timedelta(seconds=10), multi_tenant=True)
        server.set("who", "the agent")
        client = TCPStore("127.0.0.1", port, 1, False, timedelta(seconds=10))
        assert client.get("who") == b"the agent"
