"""One submission: a batch script of one task per node, written and handed to sbatch by submitit.

Every text in it was checked by `Machine` or is quoted here. What is pickled for the nodes is a `NodeTask`: strings and
numbers, in a folder only this user can enter.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.helpers import clean_env
from submitit.slurm.slurm import SlurmExecutor

from cellmill.config.machine import Machine
from cellmill.errors import UserError
from cellmill.launch.job import Job
from cellmill.launch.node import NodeTask

TRANSIENT = re.compile(
    "unable to contact slurm controller|socket timed out|temporarily unable|connection refused|connection reset|"
    "communication (connection )?failure|zero bytes were transmitted|try again|timed? ?out|"
    "slurm_receive_msg|unexpected message received|could not make sense of sbatch output",
    re.IGNORECASE,
)


class Unreachable(Exception):
    """sbatch got no answer; whether the job was accepted is not known."""


def submit(job: Job, machine: Machine, folder: Path, name: str) -> str:
    """Submits `job` with its files in `folder` and returns SLURM's number of it.

    Raises Unreachable when SLURM may be tried again, UserError when it refuses.
    """
    path = str(folder.resolve())
    if "%" in path or "\\" in path:
        raise UserError(f"{path}: SLURM gives % and \\ in a log's path a meaning of its own; use a folder without them")
    try:
        with outside_any_job():
            return str(batch_executor(machine, folder, name).submit(node_task(job, machine, folder)).job_id)
    except (FailedJobError, FailedSubmissionError) as error:
        said = _complaint(error)
        if TRANSIENT.search(said):
            raise Unreachable(said) from None
        raise UserError(
            f"sbatch refused the job: {said}; what is asked for is in the profile, set-resources: train"
        ) from None


@contextmanager
def outside_any_job() -> Iterator[None]:
    """Hides the job this process may itself be in from what it starts, but not which cluster is meant."""
    cluster = {name: os.environ[name] for name in ("SLURM_CONF", "SLURM_CLUSTERS") if name in os.environ}
    with clean_env():
        os.environ.update(cluster)
        yield


def node_task(job: Job, machine: Machine, folder: Path) -> NodeTask:
    """What each node is to run."""
    return NodeTask(
        module=job.module,
        arguments=job.arguments,
        nproc_per_node=job.nproc_per_node,
        gpus_per_node=machine.gpus,
        # below Linux's ephemeral ports, so that no outgoing connection sits on it
        port=20_000 + secrets.randbelow(12_000),
        interface=machine.interface,
        folder=str(folder.resolve()),
        max_restarts=job.max_restarts,
        state_file=job.state_file,
    )


def batch_executor(machine: Machine, folder: Path, name: str) -> SlurmExecutor:
    """What writes and submits the batch script of a job."""
    python = None
    if machine.container:
        python = f"apptainer exec --nv {shlex.quote(str(Path(machine.container).resolve()))} python3"
    executor = SlurmExecutor(folder=folder.resolve(), max_num_timeout=0, python=python)
    given = {
        "partition": machine.slurm_partition,
        "account": machine.slurm_account,
        "qos": machine.qos,
        "constraint": machine.constraint,
        "gres": machine.gres,
    }
    more: dict[str, Any] = {"nodes": machine.nodes, "requeue": True, **machine.options()}
    if machine.reservation:
        more["reservation"] = machine.reservation
    if machine.gpus_per_node:
        more["gpus-per-node"] = machine.gpus_per_node
    executor.update_parameters(
        **{key: value for key, value in given.items() if value},
        job_name=name,
        nodes=machine.node_counts[0],
        cpus_per_task=machine.cpus,
        mem=f"{machine.mem_mb}M" if machine.mem_mb else "0",
        time=machine.runtime,
        signal_delay_s=machine.save_within_s,
        wckey=None,  # some sites refuse a key they do not know
        stderr_to_stdout=True,
        setup=[f"module load {shlex.join(machine.modules.split())}"] if machine.modules else None,
        # one task per node is said here alone: sbatch, told so, gives a range of nodes its smallest number.
        # A task that fails must not leave the others waiting for it.
        srun_args=["--ntasks-per-node=1", f"--cpus-per-task={machine.cpus}", "--kill-on-bad-exit=1"],
        additional_parameters=more,
    )
    return executor


def _complaint(error: Exception) -> str:
    """What sbatch said, in one line."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line.startswith("sbatch:") or "error" in line.lower()]
    return " ".join(said or lines)[:400].replace("sbatch: error: ", "")
