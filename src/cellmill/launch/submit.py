"""One submission: a batch script of one task per node, written by submitit and handed to sbatch.

Every value in the script was checked by `Machine` or is quoted here. What is pickled for the nodes is the path of the
node's task, a JSON file in a folder only this user can enter.
"""

import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.helpers import clean_env
from submitit.slurm.slurm import SlurmExecutor

from cellmill.config.machine import OURS, Machine, options_in
from cellmill.errors import UserError
from cellmill.launch.job import Job
from cellmill.launch.node import NodeTask, run_task
from cellmill.runs.slurm_command import NO_PROCESS

TRANSIENT = re.compile(
    "unable to contact slurm controller|socket timed out|temporarily unable|connection refused|connection reset|"
    "communication (connection )?failure|zero bytes were transmitted|try again|timed? ?out|"
    "slurm_receive_msg|unexpected message received|could not make sense of sbatch output",
    re.IGNORECASE,
)
QUOTA = re.compile(r"(?:Assoc|QOS)\w*SubmitJobs?\w*Limit")
_VARIABLES = {"time": "TIMELIMIT", "mem": "MEM_PER_NODE", "array": "ARRAY_INX"}  # not named as the option is


class Unreachable(Exception):
    """sbatch got no answer; the job may have been accepted or not."""


class QuotaFull(Exception):
    """SLURM takes no further job of this user until others have ended."""


def submit(job: Job, machine: Machine, folder: Path, name: str) -> str:
    """Submit `job` with its files in `folder`; return its job id.

    Raises Unreachable if SLURM gave no answer, QuotaFull if it takes no job at present, UserError if it refuses.
    """
    path = str(folder.resolve())
    if "%" in path or "\\" in path:
        raise UserError(f"{path}: SLURM interprets % and \\ in the path of a log; use a folder without them")
    task = NodeTask.of(job, machine, folder).write()
    try:
        with submitting(machine):
            return str(_executor(machine, folder, name).submit(run_task, str(task)).job_id)
    except BlockingIOError:
        raise Unreachable(f"sbatch: {NO_PROCESS}") from None
    except (FailedJobError, FailedSubmissionError) as error:
        complaint = _complaint(error)
        if TRANSIENT.search(complaint):
            raise Unreachable(complaint) from None
        if quota := QUOTA.search(complaint):
            raise QuotaFull(quota[0]) from None
        raise UserError(
            f"sbatch refused the job: {complaint}; the request is in the profile, set-resources: train"
        ) from None


@contextmanager
def submitting(machine: Machine) -> Iterator[None]:
    """The environment for sbatch: of SLURM_* only the cluster, since srun in the job would read the others.

    Outside a job, SBATCH_* are the user's wishes and stay, except for options that cellmill or the profile sets: sbatch
    would prefer the variable.
    """
    kept = {name: value for name, value in os.environ.items() if name in ("SLURM_CONF", "SLURM_CLUSTERS")}
    if "SLURM_JOB_ID" not in os.environ:
        ours = {*OURS, *sbatch_options(machine), "mem-per-cpu", "mem-per-gpu"}
        set_here = {f"SBATCH_{_VARIABLES.get(name, name.replace('-', '_').upper())}" for name in ours}
        wishes = {name: value for name, value in os.environ.items() if name.startswith("SBATCH_")}
        kept |= {name: value for name, value in wishes.items() if name not in set_here}
    with clean_env():
        os.environ.update(kept)
        yield


def sbatch_options(machine: Machine) -> dict[str, str | bool]:
    """Options of sbatch that request `machine`; True for those without a value."""
    options = {
        "partition": machine.slurm_partition,
        "account": machine.slurm_account,
        "qos": machine.qos,
        "constraint": machine.constraint,
        "gres": machine.gres,
        "gpus-per-node": machine.gpus_per_node,
        "reservation": machine.reservation,
        "nodes": machine.nodes,
        "cpus-per-task": str(machine.cpus),
        "mem": f"{machine.mem_mb}M" if machine.mem_mb else "0",
        "time": str(machine.runtime),
    }
    return {name: value for name, value in options.items() if value} | options_in(machine.sbatch_options)


class _Executor(SlurmExecutor):
    """submitit's, which takes the first "job NUMBER" in sbatch's output for its answer; wrappers print lines too."""

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        text = string.decode(errors="replace") if isinstance(string, bytes) else string
        answers = re.findall(r"^Submitted batch job (\d+)(?: on cluster \S+)?\s*$", text, re.MULTILINE)
        if not answers:
            raise FailedSubmissionError(f"could not make sense of sbatch output {text.strip()[-200:]!r}")
        return str(answers[-1])


def _executor(machine: Machine, folder: Path, name: str) -> SlurmExecutor:
    image = shlex.quote(str(Path(machine.container).resolve()))
    python = f"apptainer exec --nv {image} python3" if machine.container else None
    executor = _Executor(folder=folder.resolve(), max_num_timeout=0, python=python)
    executor.update_parameters(
        job_name=name,
        nodes=machine.node_counts[0],  # submitit counts tasks by it
        signal_delay_s=machine.save_within_s,
        wckey=None,  # some sites refuse an unknown key
        stderr_to_stdout=True,
        setup=_setup(machine),
        # one task per node is requested only here: given to sbatch, it would pin a range of nodes to its minimum.
        # A task that fails must not leave the others waiting for it.
        srun_args=[
            "--ntasks-per-node=1",
            f"--cpus-per-task={machine.cpus}",
            "--kill-on-bad-exit=1",
            *machine.srun_flags,
        ],
        additional_parameters={"requeue": True, **sbatch_options(machine)},
    )
    return executor


def _setup(machine: Machine) -> list[str]:
    """Lines of the batch script before srun. A command that fails ends the job with one line in its log."""
    load = f"module load {shlex.join(machine.modules.split())}" if machine.modules else ""
    lines = []
    for key, command in (("modules", load), ("setup", machine.setup)):
        if command:
            failed = shlex.quote(f"cellmill: `{command}` failed on")
            lines += [
                f"{{ {command}",
                f'}} || {{ echo {failed} "$SLURMD_NODENAME; change {key} in the profile"; exit 1; }}',
            ]
    return lines


def _complaint(error: Exception) -> str:
    """sbatch's message in one line."""
    lines = [line.strip() for line in str(error).splitlines()]
    errors = [line for line in lines if line.startswith("sbatch:") or "error" in line.lower()]
    return " ".join(errors or lines)[:400].replace("sbatch: error: ", "")
