"""A job on this machine: one torchrun agent per node, so that a layout of several nodes can be tried on one machine.

Agents run in a session of their own: Ctrl-C reaches this process alone, which forwards signals to the *workers*. They
save and exit, and the agents with them. When this process dies, however it dies, the kernel ends the agents, and they
their workers, so that no training continues unseen.
"""

import secrets
import signal
import subprocess
import time
from collections.abc import Callable

from cellmill.launch.job import Job, Restarts, agent_environment
from cellmill.launch.processes import children, die_with_parent, signal_all
from cellmill.launch.rendezvous import LOOPBACK, Rendezvous
from cellmill.launch.signals import Interrupted, handled_by


def run_local(job: Job, keep_open: int, check: Callable[[], None] = lambda: None) -> int:
    """Run `job` with the restarts it allows; return the first non-zero exit code of an agent, or 0.

    Raises Interrupted if signals ended it before its state was saved.

    Parameters
    ----------
    keep_open
        File descriptor that the agents inherit: a lock it holds stays held until the last of them has ended.
    check
        Called each second; what it raises ends the processes.
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

    def each_second() -> None:
        """Reach workers that had not started when the signal came."""
        check()
        if signals == 1:
            for agent in agents:
                signal_all(children(agent.pid), signal.SIGTERM)

    try:
        with handled_by(forward):
            while True:
                agents.clear()
                secret = secrets.token_hex(32)
                for node in range(job.nodes):
                    agents.append(_start(job, Rendezvous(secret, node, job.nodes, LOOPBACK), keep_open))
                code = _wait(agents, each_second)
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


def _start(job: Job, place: Rendezvous, keep_open: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        job.command(),
        env=agent_environment(job.nodes * job.nproc_per_node, job.nodes * job.cores, job.error_file)
        | place.environment(),
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
