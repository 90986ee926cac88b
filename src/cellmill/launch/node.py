"""What runs on each node of a cluster job: one torchrun agent, its signals, and what became of it.

Under cgroup tracking SLURM signals this process alone, so it hands signals on to the workers: they save and end by
themselves, and the agent, which ignores signals, with them. When this process dies, so does all it started.
It holds strings and numbers only, so that its pickle (submitit's) says nothing an argument list would not; under
`allocation` the same comes from a JSON file.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import SlurmJobEnvironment

from cellmill.files import read_json, write_json, write_text
from cellmill.launch.job import Job
from cellmill.launch.processes import children, die_with_parent, signal_all
from cellmill.launch.restart import Restarts

HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
SEEN_EVERY_S = 15


class NodeFailed(Exception):
    """The agent of this node ended with an error; ends the SLURM task, and with it the job."""


class TaskStep(SlurmJobEnvironment):
    """The job step this process is a task of: it may have fewer nodes than the job."""

    _env = {  # noqa: RUF012 - submitit's own place for this
        **SlurmJobEnvironment._env,
        "nodes": "SLURM_STEP_NODELIST",
        "num_nodes": "SLURM_STEP_NUM_NODES",
    }


@dataclass(frozen=True)
class NodeTask:
    """The task of each node of a job."""

    module: str
    arguments: list[str]
    nproc_per_node: int
    gpus_per_node: int
    port: int
    interface: str
    folder: str
    """For attempts and the error, shared by all nodes."""
    max_restarts: int = 0
    state_file: str = ""

    def __call__(self) -> str:
        step = TaskStep()
        attempt = None
        if step.node == 0:
            (Path(self.folder) / "error.txt").unlink(missing_ok=True)  # of the attempt before
            attempt = Attempt.start(self, step)
        out_of_memory = oom_kills()
        stop = HandOn()
        restarts = Restarts(self.job(step))
        code = self.run_agent(step, 0, stop, attempt)
        while code and not stop.received and oom_kills() == out_of_memory and restarts.again(code):
            code = self.run_agent(step, restarts.done, stop, attempt)
        if attempt is not None:
            attempt.end(code)
        if code and oom_kills() > out_of_memory:
            self.leave_error(
                f"{step.hostname}: a process was killed because the node's memory for this job was used up; raise "
                "set-resources: train: mem_mb in the profile, or lower train.token_budget"
            )
        if code:
            raise NodeFailed(f"torchrun ended with exit code {code}")
        return "ended"

    def run_agent(self, step: TaskStep, restart: int, stop: HandOn, attempt: Attempt | None) -> int:
        """Starts the agent of this node, hands signals on to its workers, and gives its exit code.

        It ends with that of any other node.
        """
        agent = subprocess.Popen(self.command(step, restart), env=self.environment(), preexec_fn=_deaf)
        worked = False
        lost = Path(self.folder) / f"lost-{os.environ.get('SLURM_RESTART_COUNT') or 0}-{restart}"
        while True:
            try:
                code = agent.wait(timeout=1)
                if code and not stop.received:
                    with suppress(OSError):  # a full disk; the others find out by their collectives
                        lost.touch()
                return code
            except subprocess.TimeoutExpired:
                if lost.exists() and not stop.received:
                    # NCCL may not notice that processes of another node are gone, and wait for them
                    signal_all([*children(agent.pid), agent.pid], signal.SIGKILL)
                    continue
                worked = worked or bool(children(agent.pid))
                if restart and stop.received and not worked:
                    agent.kill()  # it waits for a node that will not come back, and has nothing to save
                stop.hand_on(agent.pid)
                if attempt is not None:
                    attempt.seen()

    def job(self, step: TaskStep) -> Job:
        """What runs on all nodes."""
        error = str(Path(self.folder) / "error.txt")
        return Job(
            self.module, self.arguments, step.num_nodes, self.nproc_per_node, self.max_restarts, error, self.state_file
        )

    def command(self, step: TaskStep, restart: int = 0) -> list[str]:
        """The agent of the node this is; the first node's store listens, at another port after each restart."""
        return self.job(step).command(step.node, step.hostnames[0], self.port + restart, signals_to_handle="SIGQUIT")

    def environment(self) -> dict[str, str]:
        """What the agent and its workers see."""
        threads = max(1, len(os.sched_getaffinity(0)) // self.nproc_per_node)
        found = {"OMP_NUM_THREADS": str(threads), **os.environ, "PYTHONUNBUFFERED": "1"}
        if self.interface:
            found |= {"GLOO_SOCKET_IFNAME": self.interface, "NCCL_SOCKET_IFNAME": self.interface}
        return found

    def leave_error(self, text: str) -> None:
        """The line the launcher ends with, unless a process has left one."""
        file = Path(self.folder) / "error.txt"
        if not file.exists():
            write_text(file, text)


class HandOn:
    """Notes signals, and hands them on to workers once a second until they have ended: one that came while a worker
    was still starting would be lost otherwise."""

    def __init__(self) -> None:
        self.received: str | None = None
        for number in HANDED_ON:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        if self.received is None:
            self.received = signal.Signals(number).name
            os.write(1, f"{self.received}: saving\n".encode())

    def hand_on(self, agent: int) -> None:
        if self.received is not None:
            signal_all(children(agent), signal.SIGTERM)


class Attempt:
    """attempt-NNN.json: when and where the job ran, for its cost where no accounting keeps it."""

    def __init__(self, path: Path, value: dict[str, Any]) -> None:
        self.path, self.value = path, value
        self._write()

    @classmethod
    def start(cls, task: NodeTask, step: TaskStep) -> Attempt:
        now, nodes = time.time(), step.num_nodes
        value = {
            "job_id": step.raw_job_id,
            "started_at": now,
            "seen_at": now,
            "ended_at": None,
            "hosts": list(step.hostnames),
            "processes": nodes * task.nproc_per_node,
            "gpus": nodes * task.gpus_per_node,
            "exit_code": None,
        }
        number = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        return cls(Path(task.folder) / f"attempt-{number:03}.json", value)

    def seen(self) -> None:
        if time.time() - self.value["seen_at"] > SEEN_EVERY_S:
            self.value["seen_at"] = time.time()
            self._write()

    def end(self, code: int) -> None:
        now = time.time()
        self.value |= {"seen_at": now, "ended_at": now, "exit_code": code}
        self._write()

    def _write(self) -> None:
        try:
            write_json(self.path, self.value)
        except OSError as error:  # a full disk: the training itself says so, and may yet end well
            print(f"{self.path}: {error.strerror}", file=sys.stderr, flush=True)


def oom_kills() -> int:
    """How many processes of this job step the kernel has killed for memory (cgroup v1 or v2); 0 where unknown."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":  # v1: the step is the parent of the task
            folder, name = Path("/sys/fs/cgroup/memory") / path.lstrip("/"), "memory.oom_control"
        elif not controllers:
            folder, name = Path("/sys/fs/cgroup") / path.lstrip("/"), "memory.events"
        else:
            continue
        if (folder / name).exists():
            return _count(folder / name)
    return 0


def _count(file: Path) -> int:
    fields = dict(line.split() for line in file.read_text().splitlines() if len(line.split()) == 2)
    return int(fields.get("oom_kill", 0))


def _deaf() -> None:
    # signals are for the workers, who set handlers of their own; an agent that heeds one kills them while they save
    for number in HANDED_ON:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)


def write_task(task: NodeTask, path: Path) -> None:
    """`task` as the JSON file that `python -m cellmill.launch.node` takes."""
    write_json(path, asdict(task))


if __name__ == "__main__":
    given = NodeTask(**read_json(Path(sys.argv[1])))
    try:
        given()
    except NodeFailed as error:
        sys.exit(f"{error}")
