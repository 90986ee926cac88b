"""Runs a job on this machine: one torchrun agent for each node, so that a layout of several can be tried on one.

Agents run in a session of their own: Ctrl-C reaches this process alone, which hands a signal on to the *workers*.
They save and end by themselves, and the agents with them. When this process dies, however it dies, the kernel ends
the agents and those their workers, so nothing goes on training unseen.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable

from cellmill.errors import Stopped
from cellmill.launch.job import Job
from cellmill.launch.processes import children, die_with_parent, signal_all
from cellmill.launch.restart import Restarts

HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def run_local(job: Job, keep_open: int) -> int:
    """Runs `job` to its end, with the restarts it allows, and returns the first non-zero exit code of an agent, or 0.

    Raises Stopped when signals ended it without its state being saved.

    Parameters
    ----------
    keep_open
        File descriptor the agents inherit: a lock it holds stays held until the last of them has ended.
    """
    agents: list[subprocess.Popen[bytes]] = []
    signals = 0
    restarts = Restarts(job)

    def hand_on(number: int, frame: object) -> None:
        nonlocal signals
        signals += 1
        for agent in agents:
            workers = children(agent.pid)
            if signals > 1:
                signal_all([*workers, agent.pid], signal.SIGKILL)  # asked twice: at once, without saving
            else:
                signal_all(workers or [agent.pid], signal.SIGTERM)

    def hand_on_again() -> None:
        """To workers that had not begun when the signal came."""
        if signals == 1:
            for agent in agents:
                signal_all(children(agent.pid), signal.SIGTERM)

    before = {number: signal.signal(number, hand_on) for number in HANDED_ON}
    try:
        while True:
            agents.clear()
            with reserve_port() as reserved:  # another each time: nothing of an earlier start listens there
                for node in range(job.nodes):
                    agents.append(_start(job, node, reserved.getsockname()[1], keep_open))
                code = _wait(agents, hand_on_again)
            if not code or signals or not restarts.again(code):
                break
        if signals > 1:
            raise Stopped("ended at once at the second signal; run the same command to go on from the last checkpoint")
        if signals and code:
            raise Stopped("ended by a signal before it could save; run the same command to go on")
        return code
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.kill()
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(job: Job, node: int, port: int, keep_open: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        job.command(node, "127.0.0.1", port),
        env=_environment(job),
        pass_fds=(keep_open,),
        start_new_session=True,
        preexec_fn=lambda: die_with_parent(signal.SIGTERM),
    )


def _wait(agents: list[subprocess.Popen[bytes]], each_second: Callable[[], None]) -> int:
    """The exit code of the agent that failed first, or 0."""
    code, called = 0, time.monotonic()
    while any(agent.poll() is None for agent in agents):
        if time.monotonic() - called > 1:
            called = time.monotonic()
            each_second()
        code = code or _failed(agents)
        if code:  # the others would wait for it for ever
            for agent in agents:
                if agent.poll() is None:
                    agent.terminate()
        time.sleep(0.05)
    return code or _failed(agents)


def _failed(agents: list[subprocess.Popen[bytes]]) -> int:
    return next((code for agent in agents if (code := agent.poll())), 0)


def _environment(job: Job) -> dict[str, str]:
    # as many threads as the machine has cores, over all processes: more would only wait for each other
    threads = max(1, len(os.sched_getaffinity(0)) // (job.nodes * job.nproc_per_node))
    return {"OMP_NUM_THREADS": str(threads), **os.environ, "PYTHONUNBUFFERED": "1"}


def reserve_port() -> socket.socket:
    """A socket bound to a TCP port that is free on all interfaces; its holder keeps the port from being given away.

    Of all, since torch's store listens on all: gloo may listen on another than the loopback. A port that was merely
    found free can be somebody else's by the time the agent has imported torch. As long as nobody listens, Linux lets
    whoever asks for this very port with SO_REUSEADDR, as torch's store does, bind it too.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held
