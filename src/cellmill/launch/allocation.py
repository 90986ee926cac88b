"""Training inside the SLURM job this process runs in (salloc, or a batch script): srun starts the task of each node.

For sites that allow no process on a login node: the whole workflow is then one batch job.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from cellmill.config.machine import Machine
from cellmill.errors import UserError
from cellmill.launch.job import Job
from cellmill.launch.node import NodeTask
from cellmill.launch.processes import die_with_parent
from cellmill.launch.signals import handled_by
from cellmill.runs.jobs import JobRecord, Jobs


def run_allocation(
    job: Callable[[Path], Job],
    machine: Machine,
    train: Path,
    keep_open: int,
    check: Callable[[], None] = lambda: None,
) -> tuple[int, Path]:
    """Run the job that `job` returns for its folder. Returns srun's exit code and the file for an error.

    Signals are forwarded to the workers, who save; so is the end of this process, however it ends. Raises UserError
    outside an allocation.

    Parameters
    ----------
    keep_open
        File descriptor that srun inherits: a lock it holds stays held until the training has ended.
    check
        Called each second; what it raises ends the processes.
    """
    job_id = os.environ.get("SLURM_JOB_ID")
    if job_id is None:
        raise UserError("launcher allocation: not inside a SLURM job; start it with salloc or sbatch")
    jobs = Jobs(train)
    folder, name = jobs.new()
    task = NodeTask.of(job(folder), machine, folder).write()
    here = machine.model_copy(update={"slurm_partition": os.environ.get("SLURM_JOB_PARTITION", "")})
    record = JobRecord.of(here, folder, job_id, name).now("RUNNING")
    step = subprocess.Popen(
        _srun(machine, task),
        start_new_session=True,  # Ctrl-C must reach this process alone
        pass_fds=(keep_open,),
        preexec_fn=lambda: die_with_parent(signal.SIGTERM),
    )
    with handled_by(lambda number, frame: step.send_signal(signal.SIGUSR2)):
        code = _wait(step, check)
    record.now("COMPLETED" if code == 0 else "FAILED", ended=True)
    return code, folder / "error.txt"


def _wait(step: subprocess.Popen[bytes], check: Callable[[], None]) -> int:
    """Wait for srun, with a check each second; return its exit code."""
    while True:
        try:
            return step.wait(timeout=1)
        except subprocess.TimeoutExpired:
            try:
                check()
            except UserError:
                step.terminate()
                raise


def _srun(machine: Machine, task: Path) -> list[str]:
    return [
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
        sys.executable,
        "-m",
        "cellmill.launch.node",
        str(task),
    ]
