"""A job on this machine: one torchrun agent per node, so that a layout of several nodes can be tried on one machine.

Agents run in a session of their own: Ctrl-C reaches this process alone, which forwards signals to the *workers*. They
save and exit, and the agents with them. When this process dies, however it dies, the kernel ends the agents, and they
their workers, so that no training continues unseen.
"""

import signal
import socket
import subprocess
import time
from collections.abc import Callable

from cellmill.launch.job import Job, Restarts, agent_environment
from cellmill.launch.processes import children, die_with_parent, signal_all
from cellmill.launch.signals import Interrupted, handled_by


def run_local(job: Job, keep_open: int) -> int:
    """Run `job` with the restarts it allows; return the first non-zero exit code of an agent, or 0.

    Raises Interrupted if signals ended it before its state was saved.

    Parameters
    ----------
    keep_open
        File descriptor that the agents inherit: a lock it holds stays held until the last of them has ended.
    """
    agents: list[subprocess.Popen[bytes]] = []
    signals = 0
    restarts = Restarts(job)

    def forward(number: int, frame: object) -> None:
        nonlocal signals
        signals += 1
        for agent in agents:
            workers = children(agent.pid)
            if signals > 1:
                signal_all([*workers, agent.pid], signal.SIGKILL)  # second signal: at once, without saving
            else:
                signal_all(workers or [agent.pid], signal.SIGTERM)

    def forward_again() -> None:
        """Reach workers that had not started when the signal came."""
        if signals == 1:
            for agent in agents:
                signal_all(children(agent.pid), signal.SIGTERM)

    try:
        with handled_by(forward):
            while True:
                agents.clear()
                with reserve_port() as reserved:  # a new one each time: nothing of an earlier start listens there
                    for node in range(job.nodes):
                        agents.append(_start(job, node, reserved.getsockname()[1], keep_open))
                    code = _wait(agents, forward_again)
                if not code or signals or not restarts.again(code):
                    break
        if signals > 1:
            raise Interrupted("killed by the second signal; run the same command to go on from the last checkpoint")
        if signals and code:
            raise Interrupted("ended by a signal before it could save; run the same command to go on")
        return code
    finally:
        for agent in agents:
            agent.kill()


def _start(job: Job, node: int, port: int, keep_open: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        job.command(node, "127.0.0.1", port),
        env=agent_environment(job.nodes * job.nproc_per_node, job.nodes * job.cores),
        pass_fds=(keep_open,),
        start_new_session=True,
        preexec_fn=lambda: die_with_parent(signal.SIGTERM),
    )


def _wait(agents: list[subprocess.Popen[bytes]], each_second: Callable[[], None]) -> int:
    """Wait for all agents; return the exit code of the one that failed first, or 0."""
    code, called = 0, time.monotonic()
    while any(agent.poll() is None for agent in agents):
        if time.monotonic() - called > 1:
            called = time.monotonic()
            each_second()
        code = code or _failed(agents)
        if code:  # the others would wait for it forever
            for agent in agents:
                agent.terminate()
        time.sleep(0.05)
    return code or _failed(agents)


def _failed(agents: list[subprocess.Popen[bytes]]) -> int:
    return next((code for agent in agents if (code := agent.poll())), 0)


def reserve_port() -> socket.socket:
    """A socket bound to a TCP port that is free on all interfaces; while it is open, the port is not given to others.

    On all interfaces, because torch's store listens on all of them. A port that was only checked for being free could
    be taken by the time the agent has imported torch. While nobody listens on it, Linux lets a socket with
    SO_REUSEADDR, such as that of torch's store, bind the same port.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held
