"""The test cluster for tests that run as a normal user: root serves it, tests ask for what needs
root.

    sudo python3 -m tests.cluster.serve USER OTHER     ends with Ctrl-C, and the cluster with it
    export CELLMILL_TEST_CLUSTER=/run/cellmill-test-cluster.sock     for the tests of USER

Tests submit, follow and cancel jobs themselves, as USER. What an administrator or another user of
the cluster does is asked for over a socket that USER alone may use: a JSON object for a call and
one for its answer, a line each.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.cluster.rig import Rig, RigError, inside, missing

VARIABLE = "CELLMILL_TEST_CLUSTER"
SOCKET = Path("/run/cellmill-test-cluster.sock")


class ServedRig(Rig):
    """The cluster of a server, as tests use it. `call` and `squeue` run as this user."""

    def start(self) -> Rig:
        answer = ask("start", self.accounting)
        self.cgroups = answer["cgroups"]
        return self

    def stop(self) -> None:
        ask("stop")

    def kill_node(self, node: str) -> None:
        ask("kill_node", node)

    def start_node(self, node: str, wait: bool = True) -> None:
        ask("start_node", node)

    def stop_slurmd(self, node: str) -> None:
        ask("stop_slurmd", node)

    def continue_slurmd(self, node: str) -> None:
        ask("continue_slurmd", node)

    def hide_folder(self, node: str, folder: Path) -> None:
        ask("hide_folder", node, str(folder))

    def show_folder(self, node: str, folder: Path) -> None:
        ask("show_folder", node, str(folder))

    def stop_controller(self) -> None:
        ask("stop_controller")

    def start_controller(self) -> None:
        ask("start_controller")

    def run_as_other(self, *command: str) -> str:
        """Output of a command that the other user runs on the login node."""
        return str(ask("run_as_other", *command))

    def run_on_node(self, node: str, *command: str) -> str:
        """Output of a command that root runs in the network of a node."""
        return str(ask("run_on_node", node, *command))


def ask(method: str, *arguments: Any) -> Any:
    """Result of a method of the server. Raises RigError with its message."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[VARIABLE])
        stream = connection.makefile("rw", encoding="utf-8")
        stream.write(json.dumps([method, *arguments]) + "\n")
        stream.flush()
        answer = json.loads(stream.readline())
    if "error" in answer:
        raise RigError(answer["error"])
    return answer["result"]


class Server:
    """Methods that tests may call, by name."""

    def __init__(self, user: str, other: str) -> None:
        self._user = user
        self._other = other
        self._rig: Rig | None = None

    def start(self, accounting: bool) -> dict[str, Any]:
        self.stop()
        why = missing(accounting)
        if why is not None:
            raise RigError(why)
        self._rig = Rig(accounting=accounting, users=(self._user, self._other)).start()
        return {"cgroups": self._rig.cgroups}

    def stop(self) -> None:
        if self._rig is not None:
            self._rig.stop()
        self._rig = None

    def kill_node(self, node: str) -> None:
        self._running().kill_node(node)

    def start_node(self, node: str) -> None:
        self._running().start_node(node)

    def stop_slurmd(self, node: str) -> None:
        self._running().stop_slurmd(node)

    def continue_slurmd(self, node: str) -> None:
        self._running().continue_slurmd(node)

    def hide_folder(self, node: str, folder: str) -> None:
        self._running().hide_folder(node, Path(folder))

    def show_folder(self, node: str, folder: str) -> None:
        self._running().show_folder(node, Path(folder))

    def stop_controller(self) -> None:
        self._running().stop_controller()

    def start_controller(self) -> None:
        self._running().start_controller()

    def run_as_other(self, *command: str) -> str:
        return self._output(["runuser", "-u", self._other, "--", *command])

    def run_on_node(self, node: str, *command: str) -> str:
        return self._output([*inside(node), *command])

    def answer(self, request: list[Any]) -> dict[str, Any]:
        method, *arguments = request
        try:
            return {"result": getattr(self, str(method))(*arguments)}
        except (RigError, AssertionError, OSError, subprocess.SubprocessError) as error:
            return {"error": f"{method}: {error}"}

    def _output(self, command: list[str]) -> str:
        environment = os.environ | self._running().environment
        done = subprocess.run(
            command, env=environment, cwd="/", text=True, capture_output=True, timeout=300
        )
        if done.returncode:
            raise RigError(f"{' '.join(command)}: {done.stderr}")
        return done.stdout

    def _running(self) -> Rig:
        if self._rig is None:
            raise RigError("the cluster is not started")
        return self._rig


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.serve", description=__doc__)
    parser.add_argument("user", help="who runs the tests")
    parser.add_argument("other", help="another user of the cluster")
    arguments = parser.parse_args()
    server = Server(arguments.user, arguments.other)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    SOCKET.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(SOCKET))
        shutil.chown(SOCKET, arguments.user)
        SOCKET.chmod(0o600)
        listener.listen()
        try:
            while True:
                connection, _ = listener.accept()
                with connection, connection.makefile("rw", encoding="utf-8") as stream:
                    line = stream.readline()
                    if line:
                        stream.write(json.dumps(server.answer(json.loads(line))) + "\n")
                        stream.flush()
        except KeyboardInterrupt:
            pass
        finally:
            server.stop()
            SOCKET.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
