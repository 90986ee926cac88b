"""The processes of a job: the torchrun agent of each node, restarts, and jobs run here.

A job on this machine has one torchrun agent per node, so that a layout of several nodes can be
tried on one machine. A single process has none: it would take two seconds to import torch. Agents
run in a session of their own: Ctrl-C reaches only this process, which forwards signals to the
*workers*. They save and exit, and the agents with them. When this process dies, the kernel ends the
agents, and they end their workers.
"""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cellmill.errors import DataError
from cellmill.files import private_folder, read_json
from cellmill.launch.rendezvous import LOOPBACK, Rendezvous
from cellmill.launch.signals import (
    STOP_SIGNALS,
    Interrupted,
    children,
    die_with_parent,
    handled_by,
    signal_all,
)
from cellmill.runs.jobs import HANG

# torchrun handles fewer by default: it would die of the signal that announces a time limit, and
# orphan its workers
AGENT_SIGNALS = ",".join(number.name for number in (*STOP_SIGNALS, signal.SIGQUIT))
# variables of a single process, as torchrun sets them
SINGLE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
# the agent's variable: file for the line of a process that knows why it failed
ERROR_FILE = "CELLMILL_ERROR_FILE"
# variable of a cluster job's agent and workers: file for tracebacks and messages of torchrun
NODE_LOG = "CELLMILL_NODE_LOG"

# variables of compiled kernels' folders, which are made on each node: a home may be full or slow.
# Not numba's, whose code is next to its source: each job would compile it again
COMPILER_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@dataclass(frozen=True)
class Job:
    """`nproc_per_node` processes of a Python module on each of `nodes` nodes."""

    module: str
    arguments: list[str]
    nodes: int
    nproc_per_node: int
    max_restarts: int = 0  # restarts of all processes after one was lost; see `Restarts`
    error_file: str = ""  # file for the line of a process that knows why it failed
    state_file: str = ""  # JSON file whose `step` is the step that the latest start resumed from
    # how long the first node of a cluster job waits for the others, as torchrun
    join_s: float = 600.0
    # CPU cores that the processes of a node share; 0 for all that this process may use
    cores: int = 0

    def command(self, signals: str = AGENT_SIGNALS) -> list[str]:
        """The agent of a node, which reads its rank from the environment (`rendezvous.Rendezvous`)."""
        return [
            sys.executable,
            "-m",
            "cellmill.launch.agent",
            f"--nnodes={self.nodes}",
            f"--nproc-per-node={self.nproc_per_node}",
            "--rdzv-backend=cellmill",
            "--max-restarts=0",  # see Restarts
            f"--signals-to-handle={signals}",
            "--module",
            self.module,
            *self.arguments,
        ]


def agent_environment(processes: int, cores: int = 0, error_file: str = "") -> dict[str, str]:
    """Environment of an agent and its workers, `processes` on `cores` of a machine (0: all)."""
    # one thread per core: more would compete
    threads = max(1, (cores or len(os.sched_getaffinity(0))) // processes)
    caches = {}
    local = private_folder()
    if local is not None:
        for name in COMPILER_CACHES:
            caches[name] = str(local / name.removesuffix("_CACHE_DIR").lower())
    return {
        **caches,
        # a waiting thread yields its core: on a busy machine a spinning one takes it from the
        # thread that it waits for
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        # its warnings are about host names, and about connections that are tried again
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        ERROR_FILE: error_file,
    }


class Restarts:
    """Restarts of all processes of a job after one was lost without an error message.

    It was killed, or gone with its agent.

    Agents are started afresh and torchrun's own --max-restarts stays 0: it would also retry what a
    process refused. This level restarts first, in seconds and on the same machines; where it gives
    up, a chain of SLURM jobs continues.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.done = 0
        self._resumed_step = -1  # the step that the last start resumed from

    def again(self, code: int) -> bool:
        """True if the job is to be restarted after an agent ended with exit `code`.

        Prints the decision.

        Not if a process left an error message, since the error would come again, and not if the
        last start resumed from the same step: a loss or a hang that comes twice is no accident.
        """
        job = self.job
        error = Path(job.error_file)
        if not job.error_file or error.exists():
            return False
        hang = error.with_name(HANG)
        before = self._resumed_step
        step = 0
        # before the first checkpoint there may be no file
        with suppress(DataError, KeyError, TypeError):
            step = int(read_json(Path(job.state_file))["step"])
        self._resumed_step = step
        if self.done == job.max_restarts or step == before:
            # it did not hang, or the agent of another node was first
            with suppress(FileNotFoundError):
                hang.replace(error)
                return False
            if step == before:
                print(
                    f"a process was lost again without a new checkpoint after step {step}: not started again",
                    flush=True,
                )
            return False
        self.done += 1
        end = f"signal {-code}" if code < 0 else f"exit code {code}"
        why = f"a process was lost ({end})"
        with suppress(FileNotFoundError):
            why = hang.read_text(encoding="utf-8").strip()
            hang.unlink()
        print(
            f"{why}: starting all again from the last checkpoint, restart {self.done} of {job.max_restarts}",
            flush=True,
        )
        return True


def run_local(job: Job, keep_open: int, check: Callable[[], None] = lambda: None) -> int:
    """Run `job` with the restarts it allows.

    Return the first non-zero exit code of an agent or single process, or 0.

    They inherit the file descriptor `keep_open`: a lock it holds stays held until the last of them
    has ended. `check` is called each second; what it raises ends the processes. Raise Interrupted
    if signals ended it before its state was saved.
    """
    agents: list[subprocess.Popen[bytes]] = []
    signals = 0
    restarts = Restarts(job)
    processes = job.nodes * job.nproc_per_node
    environment = agent_environment(processes, job.nodes * job.cores, job.error_file)
    command = job.command() if processes > 1 else [sys.executable, "-m", job.module, *job.arguments]

    def workers_of(agent: subprocess.Popen[bytes]) -> list[int]:
        return children(agent.pid) if processes > 1 else [agent.pid]

    def forward(number: int, frame: object) -> None:
        nonlocal signals
        signals += 1
        for agent in agents:
            workers = workers_of(agent)
            if signals > 1:
                # second signal: at once, without saving
                signal_all([*workers, agent.pid], signal.SIGKILL)
            else:
                signal_all(workers or [agent.pid], signal.SIGTERM)

    def each_second() -> None:
        check()
        if signals == 1:  # workers that had not started when the signal came
            for agent in agents:
                signal_all(workers_of(agent), signal.SIGTERM)

    try:
        with handled_by(forward):
            while True:
                agents.clear()
                secret = secrets.token_hex(32)
                # one by one: a signal reaches those that have been started
                for node in range(job.nodes):
                    variables = SINGLE
                    if processes > 1:
                        rendezvous = Rendezvous(secret, node, job.nodes, LOOPBACK)
                        variables = rendezvous.environment()
                    agents.append(start_process(command, keep_open, environment | variables))
                code = wait_for(agents, each_second)
                if not code or signals or not restarts.again(code):
                    break
        if signals > 1:
            raise Interrupted(
                "killed by the second signal; run the same command to resume from the last checkpoint"
            )
        if signals and code:
            raise Interrupted(
                "ended by a signal before it could save; run the same command to resume"
            )
        return code
    finally:
        for agent in agents:
            agent.kill()


def start_process(
    command: list[str], keep_open: int, environment: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a process that Ctrl-C does not reach and that ends with this one; it keeps `keep_open`."""
    return subprocess.Popen(
        command,
        env=environment,
        pass_fds=(keep_open,),
        start_new_session=True,
        preexec_fn=lambda: die_with_parent(signal.SIGTERM),
    )


def wait_for(processes: list[subprocess.Popen[bytes]], each_second: Callable[[], None]) -> int:
    """Wait for all processes; return the exit code of the one that failed first, or 0.

    The others are ended with it: they would wait for it forever.
    """
    code = 0
    called = time.monotonic()
    is_running = True
    while is_running:
        codes = [process.poll() for process in processes]
        is_running = None in codes
        if is_running and time.monotonic() - called > 1:
            called = time.monotonic()
            each_second()
        for exit_code in codes:
            code = code or exit_code or 0
        if code and is_running:
            for process in processes:
                process.terminate()
        if is_running:
            time.sleep(0.05)
    return code
