"""The task of each node of a cluster job: one torchrun agent, its signals and its restarts.

Every launcher of cluster jobs writes the task to task.json and runs it with `run_task`: submitit inside a submitted
job, srun inside an allocation. Under cgroup tracking SLURM signals only this process, so it forwards signals to the
workers: they save and exit, and the agent, which ignores signals, exits with them. When this process dies, so does
everything it started.

`run_here` trains on this machine, or inside the SLURM job this process runs in (salloc, or a batch script), for sites
that allow no process on a login node: the whole workflow is then one batch job.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cellmill.config.machine import Machine
from cellmill.errors import UserError
from cellmill.files import read_json, write_json, write_text
from cellmill.launch.job import NODE_LOG, Job, Restarts, agent_environment, run_local, wait_for
from cellmill.launch.queue import expand
from cellmill.launch.rendezvous import Rendezvous, secret_of_start
from cellmill.launch.signals import STOP_SIGNALS, StopFlag, children, die_with_parent, handled_by, signal_all
from cellmill.runs.jobs import CONNECTION, LATE, JobRecord, Jobs, write_if_room
from cellmill.runs.lock import Claim, Claimed, claim

SEEN_EVERY_S = 15
NOT_THE_OWNER = 3  # exit code


class NodeFailed(Exception):
    """The agent of this node failed; ends the SLURM task, and with it the job."""


@dataclass(frozen=True)
class StepNode:
    """This node's place in the job step; a step may have fewer nodes than its job."""

    rank: int
    hosts: list[str]
    job_id: str

    @classmethod
    def of_this_process(cls) -> StepNode:
        slurm = os.environ
        return cls(int(slurm["SLURM_NODEID"]), expand(slurm["SLURM_STEP_NODELIST"]), slurm.get("SLURM_JOB_ID", ""))


@dataclass(frozen=True)
class NodeTask:
    """The task of each node of a job."""

    job: Job
    gpus_per_node: int
    secret: str
    """Known to the nodes of the job alone; the file is in a folder that nobody else can read."""
    interface: str
    folder: str  # for attempt files and the error, shared by all nodes

    @classmethod
    def of(cls, job: Job, machine: Machine, folder: Path) -> NodeTask:
        """The task of `job`, with its files in `folder`."""
        return cls(job, machine.gpus, secrets.token_hex(32), machine.interface, str(folder.resolve()))

    @classmethod
    def read(cls, path: Path) -> NodeTask:
        """The task that `write` wrote."""
        tree = read_json(path)
        return cls(Job(**tree.pop("job")), **tree)

    @property
    def error(self) -> Path:
        """File for the line of a process that knows why it failed."""
        return Path(self.folder) / "error.txt"

    def write(self) -> Path:
        """Write the task as JSON; return the file for `run_task`."""
        path = Path(self.folder) / "task.json"
        write_json(path, asdict(self))
        return path

    def run(self, node: StepNode) -> None:
        """Run this node's agent, and restart it as allowed.

        The first node claims the run's folder before anything else. Raises Claimed if another job has it, before any
        process of another node could join, and NodeFailed if the agent failed or the node lacks the interface.
        """
        stop, attempt = StopFlag("saving"), None
        with ExitStack() as at_end:
            if node.rank == 0:
                own = claim(Path(self.folder).parents[1], node.job_id)
                at_end.callback(own.release)
                for line in (self.error, *map(self.error.with_name, (CONNECTION, LATE))):  # of an earlier attempt
                    line.unlink(missing_ok=True)
                attempt = Attempt(self, node, own)
            if lacks := lacking_interface(self.interface, [name for _, name in socket.if_nameindex()]):
                reason = f"{socket.gethostname()} has {lacks}; change interface in the profile"
                write_text(self.error, reason)
                raise NodeFailed(reason)
            kills_before, restarts = oom_kills(), Restarts(self.job_on(node))
            code = self.run_agent(node, 0, stop, attempt)
            while code and not stop.received and oom_kills() == kills_before and restarts.again(code):
                code = self.run_agent(node, restarts.done, stop, attempt)
            if attempt is not None:
                attempt.note(ended_at=time.time(), exit_code=code)
            if code and oom_kills() > kills_before and not self.error.exists():  # which a process may have left
                write_text(
                    self.error,
                    f"{socket.gethostname()}: a process was killed because the job used up its memory on this node; "
                    "raise set-resources: train: mem_mb in the profile, or lower train.token_budget",
                )
        if code:
            raise NodeFailed(f"torchrun ended with exit code {code}")

    def run_agent(self, node: StepNode, restart: int, stop: StopFlag, attempt: Attempt | None) -> int:
        """Run this node's agent, forwarding signals to its workers; return its exit code. An agent that fails on
        another node ends this one too."""
        command = self.job_on(node).command(signals="SIGQUIT")
        agent = subprocess.Popen(command, env=self.environment(node, restart), preexec_fn=_ignore_signals)
        worked = False
        lost = Path(self.folder) / f"lost-{requeues()}-{restart}"
        while True:
            try:
                code = agent.wait(timeout=1)
                if code and not stop.received:
                    with suppress(OSError):  # a full disk; the other nodes notice in their collectives
                        lost.touch()
                return code
            except subprocess.TimeoutExpired:
                workers = children(agent.pid)
                if lost.exists() and not stop.received:
                    # NCCL may not notice that processes of another node have died, and wait for them
                    signal_all([*workers, agent.pid], signal.SIGKILL)
                    continue
                worked = worked or bool(workers)
                if restart and stop.received and not worked:
                    agent.kill()  # it waits for a node that will not come back, and has nothing to save
                if stop.received:
                    signal_all(workers, signal.SIGTERM)  # each second: a worker that is still starting would miss it
                try:
                    if attempt is not None:
                        attempt.seen()
                except Claimed:
                    signal_all([*children(agent.pid), agent.pid], signal.SIGKILL)
                    raise

    def job_on(self, node: StepNode) -> Job:
        """The job over the nodes of the step."""
        return replace(self.job, nodes=len(node.hosts), error_file=str(self.error))

    def environment(self, node: StepNode, restart: int) -> dict[str, str]:
        """Environment of this node's agent."""
        start = secret_of_start(self.secret, f"{requeues()}-{restart}")
        hosts, join_s = node.hosts, 0.0 if restart else self.job.join_s  # SLURM ends a job that has lost a node
        place = Rendezvous(start, node.rank, len(hosts), hosts[0], tuple(hosts), join_s)
        interface = {"GLOO_SOCKET_IFNAME": self.interface, "NCCL_SOCKET_IFNAME": self.interface}
        variables = agent_environment(self.job.nproc_per_node, 0, str(self.error))
        variables[NODE_LOG] = str(self.error.with_name(f"node-{node.rank}.log"))
        return variables | place.environment() | (interface if self.interface else {})


class Attempt:
    """attempt-NNN.json: when and where the job ran, for its cost if there is no accounting; and its sign of life."""

    def __init__(self, task: NodeTask, node: StepNode, own: Claim) -> None:
        self.own, nodes = own, len(node.hosts)
        self.path = Path(task.folder) / f"attempt-{requeues():03}.json"
        self.value: dict[str, Any] = {
            "job_id": node.job_id,
            "started_at": time.time(),
            "seen_at": None,
            "ended_at": None,
            "hosts": node.hosts,
            "processes": nodes * task.job.nproc_per_node,
            "gpus": nodes * task.gpus_per_node,
            "exit_code": None,
        }
        self.note()

    def seen(self) -> None:
        """Say that the job lives. Raises Claimed if another job has taken the run over."""
        self.own.renew()
        if time.time() - self.value["seen_at"] > SEEN_EVERY_S:
            self.note()

    def note(self, **changes: float) -> None:
        self.value |= {"seen_at": time.time()} | changes
        write_if_room(self.path, self.value)


def lacking_interface(wanted: str, here: Sequence[str]) -> str:
    """The interface that a node lacks and the ones it has; empty if one fits. As NCCL reads it, `wanted` is a list of
    prefixes, or exact after `=`, or with `^` names to leave out."""
    prefixes = tuple(wanted.lstrip("=").split(","))
    fits = not wanted or wanted.startswith("^") or any(name.startswith(prefixes) for name in here)
    return "" if fits else f"no {wanted}: it has {', '.join(here)}"


def requeues() -> int:
    """Number of times that SLURM has requeued this job."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def oom_kills() -> int:
    """Number of processes of this job step that the kernel killed for memory (cgroup v1 or v2); 0 if unknown."""
    files = {"memory": "memory/{}/memory.oom_control", "": "{}/memory.events"}  # of v1 and v2, by controllers
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
    """Run the job that `job` returns for a folder, in the allocation of this process or by `run_local`.

    Returns the exit code and the folder, which on this machine is `scratch` if given. Signals are forwarded to the
    workers, who save; so is the end of this process, however it ends. `keep_open` and `check` are those of `run_local`.
    Raises UserError outside an allocation.
    """
    if machine.launcher == "local":
        folder = scratch or Jobs(train).new()[0]
        return run_local(job(folder), keep_open, check), folder
    job_id = os.environ.get("SLURM_JOB_ID")
    if job_id is None:
        raise UserError("launcher allocation: not inside a SLURM job; start it with salloc or sbatch")
    folder, name = Jobs(train).new()
    task = NodeTask.of(job(folder), machine, folder).write()
    here = machine.model_copy(update={"slurm_partition": os.environ.get("SLURM_JOB_PARTITION", "")})
    record = JobRecord.of(here, folder, job_id, name).write_state("RUNNING")
    srun = [
        "srun",
        f"--nodes={machine.nodes}",
        f"--ntasks={machine.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={machine.cpus}",
        "--kill-on-bad-exit=1",
        "--overlap",  # cellmill itself may run in a step that holds the nodes
        "--unbuffered",
        *([f"--gpus-per-node={machine.gpus_per_node}"] if machine.gpus_per_node else []),
        *([f"--gres={machine.gres}"] if machine.gres else []),
        *machine.srun_flags,
    ]
    step = subprocess.Popen(
        [*srun, sys.executable, "-m", "cellmill.launch.node", str(task)],
        start_new_session=True,  # Ctrl-C must reach this process alone
        pass_fds=(keep_open,),
        preexec_fn=lambda: die_with_parent(signal.SIGTERM),
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
    """Run the task in a task.json on this node. If it failed or another job has the run, this process ends in one line,
    and srun ends the job's others."""
    try:
        NodeTask.read(Path(path)).run(StepNode.of_this_process())
    except (Claimed, NodeFailed) as error:
        print(error, flush=True)
        os._exit(NOT_THE_OWNER if isinstance(error, Claimed) else 1)  # submitit would print a traceback


if __name__ == "__main__":
    run_task(sys.argv[1])
