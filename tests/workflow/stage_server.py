"""A process that has imported what stages import, and runs each stage in a fork: on a few hundred
cells most of a stage's time are imports.

It listens on the socket that its argument names, until its stdin ends. `stage_client.py` is the
`cellmill` that asks it.
"""

import json
import os
import select
import signal
import socket
import sys
from pathlib import Path

import cellmill.cli
import cellmill.stages.atlas
import cellmill.stages.cells
import cellmill.stages.evaluate
import cellmill.stages.export
import cellmill.stages.plan
import cellmill.stages.report
import cellmill.stages.train


def serve(path: str) -> int:
    """Run the stages that are asked for. Returns in the fork of a stage, with its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that have answered are nobody's zombies
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("listening", flush=True)
        while sys.stdin not in select.select([sys.stdin, listener], [], [])[0]:
            connection, _ = listener.accept()
            if os.fork() == 0:
                return answer(connection)
            connection.close()
    return 0


def answer(connection: socket.socket) -> int:
    """Run the stage in a fork of this one, which sends its exit code and ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    asked = json.loads(connection.makefile().readline())
    stage = os.fork()
    if stage == 0:
        connection.close()
        return run(streams, **asked)
    code = os.waitstatus_to_exitcode(os.waitpid(stage, 0)[1])
    connection.sendall(f"{code}\n".encode())
    os._exit(0)


def run(
    streams: list[int], words: list[str], folder: str, environment: dict[str, str], umask: int
) -> int:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.umask(umask)
    os.chdir(folder)
    sys.argv = [str(Path(sys.executable).with_name("cellmill")), *words]
    # processes that the stage spawns import this as their main module
    sys.modules["__main__"].__file__ = sys.argv[0]
    return cellmill.cli.main()


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1]))
