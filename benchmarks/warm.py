"""`cellmill` commands without the start of Python: a process that has imported all stages forks one
for each command.

Imports of torch and others would be a third of a table of many small models. What a command
computes is the same. `train` starts its processes as always. The CPU time of every command is in
`results/cpu.tsv` of its folder.
"""

import importlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cellmill import cli
from cellmill.imports import importing

CPU = Path("results") / "cpu.tsv"
CLIENT = """#!{python} -IS
import json, os, socket, sys

with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [b"!"], [0, 1, 2])
    server.sendall(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode())
    server.shutdown(socket.SHUT_WR)
    sys.exit(int(server.recv(8) or 1))
"""
STAGES = ("data", "plan", "export", "cells", "evaluate", "report")


@contextmanager
def warm_commands() -> Iterator[dict[str, str]]:
    """The environment in which `cellmill` is forked from a process that has imported the stages, on
    one thread each.
    """
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        address = f"{folder}/socket"
        client = Path(folder) / "cellmill"
        client.write_text(CLIENT.format(python=sys.executable, address=address))
        client.chmod(0o755)
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PATH": f"{folder}:{os.environ['PATH']}",
        }
        server = subprocess.Popen([sys.executable, __file__, address], env=environment)
        try:
            while not os.path.exists(address) and server.poll() is None:
                time.sleep(0.05)
            yield environment
        finally:
            server.terminate()
            server.wait()


def serve(address: str) -> None:
    """Answer clients at a socket, in a process of its own: a command that was forked ends as Python
    does.
    """
    listener = socket.socket(socket.AF_UNIX)
    with importing():
        for name in STAGES:
            importlib.import_module(f"cellmill.stages.{name}")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that answer
    listener.bind(address)
    listener.listen()
    while True:
        link, _ = listener.accept()
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _answer(listener, link)
            os._exit(0)
        link.close()


def _answer(listener: socket.socket, link: socket.socket) -> None:
    """Run the command that a client sends; note its CPU time, and send its exit code back."""
    _, files, _, _ = socket.recv_fds(link, 1, 3)
    words, folder, environment = json.loads(b"".join(iter(lambda: link.recv(1 << 16), b"")))
    child = os.fork()
    if not child:
        for target, file in enumerate(files):
            os.dup2(file, target)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        listener.close()
        link.close()
        sys.exit(cli.main(words))
    _, status = os.waitpid(child, 0)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    out = words[words.index("--out") + 1] if "--out" in words else ""
    with open(Path(folder) / CPU, "a") as file:
        file.write(f"{words[0]}\t{out}\t{used.ru_utime + used.ru_stime:.2f}\n")
    link.sendall(str(os.waitstatus_to_exitcode(status)).encode())


if __name__ == "__main__":
    serve(sys.argv[1])
