"""The task of each node of a cluster job: one torchrun agent, its signals and its restarts.

Every launcher of cluster jobs writes the task to task.json and runs it with `run_task`: submitit
inside a submitted job, srun inside an allocation. Under cgroup tracking SLURM signals only this
process, so it forwards signals to the workers: they save and exit, and the agent, which ignores
signals, exits with them. When this process dies, so does everything it started.

`run_here` trains on this machine, or inside the SLURM job this process runs in (salloc, or a batch
script), for sites that allow no process on a login node: the whole workflow is then one batch job.
"""

import hmac
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cellmill.config.machine import Machine, flags
from cellmill.errors import UserError
from cellmill.files import read_json, write_json, write_text
from cellmill.launch.job import (
    NODE_LOG,
    Job,
    Restarts,
    agent_environment,
    run_local,
    start_process,
    wait_for,
)
from cellmill.launch.network import network_variables
from cellmill.launch.queue import expand
from cellmill.launch.rendezvous import Rendezvous
from cellmill.launch.signals import (
    STOP_SIGNALS,
    StopFlag,
    children,
    die_with_parent,
    handled_by,
    signal_all,
)
from cellmill.runs.jobs import CONNECTION, HANG, LATE, JobRecord, Jobs, write_if_room
from cellmill.runs.lock import Claim, Claimed, claim

SEEN_EVERY_S = 15
NOT_THE_OWNER = 3  # exit code
UNSET = (
    "SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE "
    "SLURM_NTASKS_PER_GPU SLURM_GPUS_PER_TASK SLURM_CPU_BIND SLURM_GPU_BIND"
)
"""Variables of a job that srun would combine with its own options.

SLURM 22.05 to 23.11 has two for the cores, and refuses a step in which they differ.
"""


class NodeFailed(Exception):
    """The agent of this node failed; ends the SLURM task, and with it the job."""


def write_task(job: Job, machine: Machine, folder: Path) -> Path:
    """Write the task of each node of `job` to the job's folder; return the file, for `run_task`."""
    path = folder.resolve() / "task.json"
    # only the nodes of the job know the secret: nobody else can enter the folder. The cluster is
    # for a launcher that finds the job without a record
    task = {
        "job": asdict(job),
        "gpus_per_node": machine.gpus,
        "memory_key": machine.memory_key,
        "interface": machine.interface,
        "cluster": machine.slurm_cluster,
        "secret": secrets.token_hex(32),
    }
    write_json(path, task)
    return path


class NodeTask:
    """The task of this node of a job step; a step may have fewer nodes than its job.

    `path` is a task.json, in the folder for attempt files and the error, which all nodes share.
    """

    def __init__(self, path: Path) -> None:
        task = read_json(path)
        slurm = os.environ
        self.rank = int(slurm["SLURM_NODEID"])
        self.hosts = expand(slurm["SLURM_STEP_NODELIST"])
        self.job_id = slurm.get("SLURM_JOB_ID", "")
        self.folder = path.parent
        self.error = path.with_name("error.txt")
        self.secret = task["secret"]
        self.interface = task["interface"]
        # jobs that an earlier version submitted have none
        self.memory_key = task.get("memory_key", "mem_mb")
        self.available = [name for _, name in socket.if_nameindex()]
        # the last host is another one also for the first
        peer = self.hosts[0 if self.rank else -1]
        self.network = network_variables(self.interface, self.available, peer)
        self.job = replace(Job(**task["job"]), nodes=len(self.hosts), error_file=str(self.error))
        self.claim: Claim | None = None  # only on the first node
        self.attempt: dict[str, Any] = {
            "job_id": self.job_id,
            "ended_at": None,
            "hosts": self.hosts,
            "processes": self.job.nodes * self.job.nproc_per_node,
            "gpus": self.job.nodes * task["gpus_per_node"],
            "exit_code": None,
        }

    def run(self) -> None:
        """Run this node's agent, and restart it as allowed.

        The first node claims the run's folder before anything else. Raise Claimed if another job
        has it, before any process of another node could join, and NodeFailed if the agent failed or
        the node lacks the interface.
        """
        stop = StopFlag("saving")
        with ExitStack() as at_end:
            if self.rank == 0:
                self.claim = claim(self.folder.parents[1], self.job_id)
                at_end.callback(self.claim.release)
                # lines of an earlier attempt
                for name in (self.error.name, CONNECTION, LATE, HANG):
                    self.error.with_name(name).unlink(missing_ok=True)
                self._note(started_at=time.time())
            if self.interface and not self.network:
                lacks = f"no {self.interface}: it has {', '.join(self.available)}"
                reason = f"{socket.gethostname()} has {lacks}; change interface in the profile"
                write_text(self.error, reason)
                raise NodeFailed(reason)
            kills_before = oom_kills()
            restarts = Restarts(self.job)
            code = self.run_agent(0, stop)
            while code and not stop.received and oom_kills() == kills_before:
                if not restarts.again(code):
                    break
                code = self.run_agent(restarts.done, stop)
            if self.claim is not None:
                self._note(ended_at=time.time(), exit_code=code)
            # a process may have left its own line
            if code and oom_kills() > kills_before and not self.error.exists():
                write_text(
                    self.error,
                    f"{socket.gethostname()}: a process was killed because the job used up its memory on this node; "
                    f"raise set-resources: train: {self.memory_key} in the profile, or lower train.token_budget",
                )
        if code:
            raise NodeFailed(f"torchrun ended with exit code {code}")

    def run_agent(self, restart: int, stop: StopFlag) -> int:
        """Run this node's agent, forwarding signals to its workers; return its exit code.

        An agent that fails on another node ends this one too.
        """
        command = self.job.command(signals="SIGQUIT")
        agent = subprocess.Popen(command, env=self.environment(restart), preexec_fn=_ignore_signals)
        worked = False
        lost = self.folder / f"lost-{requeues()}-{restart}"
        while True:
            try:
                code = agent.wait(timeout=1)
                if code and not stop.received:
                    # a full disk; the other nodes notice in their collectives
                    with suppress(OSError):
                        lost.touch()
                return code
            except subprocess.TimeoutExpired:
                workers = children(agent.pid)
                # unlike Path.exists, this is false while the file system is in trouble
                if os.path.exists(lost) and not stop.received:
                    # NCCL may not notice that processes of another node have died, and wait for
                    # them
                    signal_all([*workers, agent.pid], signal.SIGKILL)
                    continue
                worked = worked or bool(workers)
                if restart and stop.received and not worked:
                    # it waits for a node that will not come back, and has nothing to save
                    agent.kill()
                if stop.received:
                    # each second: a worker that is still starting would miss it
                    signal_all(workers, signal.SIGTERM)
                if self.claim is not None:
                    try:
                        self.claim.renew()
                    except Claimed:
                        signal_all([*children(agent.pid), agent.pid], signal.SIGKILL)
                        raise
                    if time.time() - self.attempt["seen_at"] > SEEN_EVERY_S:
                        self._note()

    def environment(self, restart: int) -> dict[str, str]:
        """Environment of this node's agent."""
        start = f"{requeues()}-{restart}"
        rendezvous = Rendezvous(
            secret=hmac.digest(self.secret.encode(), start.encode(), "sha256").hex(),
            node=self.rank,
            nodes=len(self.hosts),
            host=self.hosts[0],
            hosts=tuple(self.hosts),
            join_s=0.0 if restart else self.job.join_s,  # SLURM ends a job that has lost a node
        )
        variables = agent_environment(self.job.nproc_per_node, 0, str(self.error))
        variables |= rendezvous.environment()
        variables[NODE_LOG] = str(self.error.with_name(f"node-{self.rank}.log"))
        return variables | self.network

    def _note(self, **changes: float) -> None:
        """Write attempt-NNN.json: when and where the job ran, for its cost without accounting."""
        self.attempt |= {"seen_at": time.time()} | changes
        write_if_room(self.folder / f"attempt-{requeues():03}.json", self.attempt)


def requeues() -> int:
    """Number of times that SLURM has requeued this job."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def oom_kills() -> int:
    """Number of processes of this job step that the kernel killed for memory (cgroup v1 or v2).

    0 if unknown.
    """
    # files of cgroup v1 and v2, by controllers
    files = {"memory": "memory/{}/memory.oom_control", "": "{}/memory.events"}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        file = Path("/sys/fs/cgroup", files.get(controllers, "").format(path.lstrip("/")))
        if file.is_file():
            kills = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
            return int(kills[1]) if kills else 0
    return 0


def _ignore_signals() -> None:
    # workers handle signals themselves; an agent that did would kill them while they save
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)


def run_here(
    job: Callable[[Path], Job],
    machine: Machine,
    train: Path,
    keep_open: int,
    check: Callable[[], None] = lambda: None,
    scratch: Path | None = None,
) -> tuple[int, Path]:
    """Run the job that `job` returns for a folder, in this process's allocation or by `run_local`.

    Returns the exit code and the folder, which on this machine is `scratch` if given. Signals are
    forwarded to the workers, who save; so is the end of this process, however it ends. `keep_open`
    and `check` are as in `run_local`. Raise UserError outside an allocation.
    """
    if machine.launcher == "local":
        folder = scratch or Jobs(train).new()[0]
        return run_local(job(folder), keep_open, check), folder
    job_id = os.environ.get("SLURM_JOB_ID")
    if job_id is None:
        raise UserError(
            "launcher allocation: not inside a SLURM job; start it with salloc or sbatch"
        )
    folder, name = Jobs(train).new()
    task = write_task(job(folder), machine, folder)
    partition = os.environ.get("SLURM_JOB_PARTITION", "")
    allocation = machine.model_copy(update={"slurm_partition": partition})
    record = JobRecord.of(allocation, folder, job_id, name).write_state("RUNNING")
    gpus = {"gpus-per-node": machine.gpus_per_node, "gres": machine.gres}
    srun = [
        *("env", *(f"--unset={name}" for name in UNSET.split()), "srun"),
        f"--nodes={machine.nodes}",
        f"--ntasks={machine.nodes}",
        "--ntasks-per-node=1",
        "--unbuffered",
        f"--cpus-per-task={machine.cpus}",
        "--kill-on-bad-exit=1",
        "--overlap",  # cellmill itself may run in a step that holds the nodes
        *flags({name: value for name, value in gpus.items() if value}),
        *machine.srun_flags,
    ]
    step = start_process(
        [*srun, sys.executable, "-m", "cellmill.launch.node", str(task)], keep_open
    )
    try:
        with handled_by(lambda number, frame: step.send_signal(signal.SIGUSR2)):
            code = wait_for([step], check)
    except UserError:
        step.terminate()
        raise
    record.write_state("COMPLETED" if code == 0 else "FAILED", ended=True)
    return code, folder


def run_task(path: str) -> None:
    """Run the task in a task.json on this node.

    If it failed or another job has the run, this process ends in one line, and srun ends the job's
    others.
    """
    try:
        NodeTask(Path(path)).run()
    except (Claimed, NodeFailed) as error:
        print(error, flush=True)
        # submitit would print a traceback
        os._exit(NOT_THE_OWNER if isinstance(error, Claimed) else 1)


if __name__ == "__main__":
    run_task(sys.argv[1])
