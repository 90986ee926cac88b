"""Trains inside a job that is already there (salloc, or a batch script): one torchrun agent per node, started by srun.

For sites where no process may stay on a login node: the whole workflow is then one batch job. What runs on each node
is the same `NodeTask` a submitted job has.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cellmill.config.machine import Machine
from cellmill.errors import UserError
from cellmill.launch.job import Job
from cellmill.launch.node import write_task
from cellmill.launch.processes import die_with_parent
from cellmill.launch.submit import node_task
from cellmill.runs.jobs import JobRecord, Jobs

STOPPED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def run_allocation(job: Callable[[Path], Job], machine: Machine, train: Path, keep_open: int) -> tuple[int, Path]:
    """Runs the job `job` gives for a folder to its end. Returns srun's exit code and the file an error is left in.

    A signal is handed to the workers, who save; so is the end of this process, however it ends. Raises UserError
    outside an allocation.

    Parameters
    ----------
    keep_open
        File descriptor srun inherits: a lock it holds stays held until the training has ended.
    """
    job_id = os.environ.get("SLURM_JOB_ID")
    if job_id is None:
        raise UserError("launcher allocation: this is not inside a SLURM job; start it with salloc or sbatch")
    jobs = Jobs(train)
    folder, name = jobs.new()
    task = node_task(job(folder), machine, folder)
    write_task(task, folder / "task.json")
    record = JobRecord(
        path=folder,
        job_id=job_id,
        name=name,
        submitted_at=time.time(),
        nodes=machine.nodes,
        nproc_per_node=machine.nproc_per_node,
        gpus_per_node=machine.gpus,
        cpus_per_node=machine.cpus,
        slurm_partition=os.environ.get("SLURM_JOB_PARTITION", ""),
        runtime=machine.runtime,
    ).now("RUNNING")
    # a session of its own: Ctrl-C reaches this process alone
    step = subprocess.Popen(
        _srun(machine, folder / "task.json"),
        start_new_session=True,
        pass_fds=(keep_open,),
        preexec_fn=lambda: die_with_parent(signal.SIGTERM),
    )
    before = {number: signal.signal(number, lambda *_: step.send_signal(signal.SIGUSR2)) for number in STOPPED_BY}
    try:
        code = step.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    record.now("COMPLETED" if code == 0 else "FAILED", ended=True)
    return code, folder / "error.txt"


def _srun(machine: Machine, task: Path) -> list[str]:
    return [
        "srun",
        f"--nodes={machine.nodes}",
        f"--ntasks={machine.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={machine.cpus}",
        "--kill-on-bad-exit=1",
        "--overlap",  # the step cellmill itself may run in holds the nodes
        "--unbuffered",
        *([f"--gpus-per-node={machine.gpus_per_node}"] if machine.gpus_per_node else []),
        *([f"--gres={machine.gres}"] if machine.gres else []),
        sys.executable,
        "-m",
        "cellmill.launch.node",
        str(task.resolve()),
    ]
