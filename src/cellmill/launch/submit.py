"""Submission of SLURM jobs by submitit, with one task per node, and jobs that are run once.

Every value in the script was checked by `Machine` or is quoted here. The only thing pickled for the
nodes is the path of the node's task, a JSON file in a folder only this user can enter.

sbatch may accept a job and its answer be lost. So each job is submitted exactly once: a submission
without an answer is looked up by the job's name before it is tried again, and a job without a
record is adopted.

`run_once` runs one job to its end, in its own folder; the caller judges the result. Under slurm the
job is cancelled if it waits too long and on Ctrl-C, and so is one left over from a killed process.
"""

import io
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path

from submitit import SlurmExecutor, SlurmJob
from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.helpers import clean_env

from cellmill.config.machine import OURS, Machine, options_in
from cellmill.errors import UserError
from cellmill.launch.follow import PATIENCE_S, JobFollower, cancel_job, say
from cellmill.launch.job import Job
from cellmill.launch.node import UNSET, run_here, run_task, write_task
from cellmill.launch.queue import QUOTA, Queue, QueuedJob, living_jobs
from cellmill.launch.signals import Interrupted, Requests, blocked, requests
from cellmill.runs.jobs import JobRecord, Jobs, error_line
from cellmill.runs.slurm import NO_PROCESS, CommandError

NEEDED = ("sbatch", "srun", "squeue", "scancel")
TRANSIENT = re.compile(
    "unable to contact slurm controller|socket timed out|temporarily unable|connection refused|connection reset|"
    "communication (connection )?failure|zero bytes were transmitted|try again|timed? ?out|"
    "slurm_receive_msg|unexpected message received|could not make sense of sbatch output",
    re.IGNORECASE,
)
# variables that are not named like their option
_VARIABLES = {"time": "TIMELIMIT", "mem": "MEM_PER_NODE", "array": "ARRAY_INX"}
# keys of the profile that are called like their option
_SAME_NAME = "slurm_partition slurm_account qos constraint gres reservation nodes".split()
_MEMORY = {"mem", "mem-per-cpu", "mem-per-gpu"}
ONCE_PATIENCE_S = 120  # PATIENCE_S of a job that no training depends on
POLL_S = 5.0

FIND_MODULE = [
    "set +eu",  # they would end the shell in these files
    "no_module=",
    'type module > /dev/null 2>&1 || for file in /etc/profile.d/*.sh; do . "$file" > /dev/null; done',
    "type module > /dev/null 2>&1 || no_module=', which has no command module, also after "
    "/etc/profile.d (setup, which runs after modules, may load them itself)'",
]
"""Lines before `module load`: the shell of a job may lack the command that login shells have."""


@contextmanager
def submitting(machine: Machine) -> Iterator[None]:
    """The environment for sbatch, where SLURM_* are only the cluster: srun would read the rest.

    Outside a job, SBATCH_* are the user's wishes and stay, except for options that cellmill or the
    profile sets: sbatch would prefer the variable.
    """
    kept = {"SLURM_CONF", "SLURM_CLUSTERS"} & os.environ.keys()
    if machine.slurm_cluster:  # sbatch would prefer the variable
        kept.discard("SLURM_CLUSTERS")
    if "SLURM_JOB_ID" not in os.environ:
        kept |= {name for name in os.environ if name.startswith("SBATCH_")}
        for name in (*OURS, *sbatch_options(machine), *_MEMORY):
            kept.discard(f"SBATCH_{_VARIABLES.get(name, name.replace('-', '_').upper())}")
    variables = {name: os.environ[name] for name in kept}
    with clean_env():
        os.environ.update(variables)
        yield


def sbatch_options(machine: Machine, excluded: Sequence[str] = ()) -> dict[str, str | bool]:
    """Options of sbatch that request `machine`; True for those without a value.

    `excluded` are names of nodes, in addition to those that the profile excludes.
    """
    options = {key.removeprefix("slurm_"): getattr(machine, key) for key in _SAME_NAME}
    options |= {
        "clusters": machine.slurm_cluster,
        "gpus-per-node": machine.gpus_per_node,
        "cpus-per-task": str(machine.cpus),
        "time": str(machine.runtime),
    }
    more = options_in(machine.sbatch_options)
    if excluded:
        theirs = [str(more["exclude"])] if "exclude" in more else []
        more["exclude"] = ",".join([*theirs, *excluded])
    if not more.keys() & _MEMORY:  # sbatch refuses two
        option = machine.memory_key.replace("_mb", "").replace("_", "-")
        options[option] = f"{machine.memory_mb}M" if machine.memory_mb else "0"
    return {name: value for name, value in options.items() if value} | more


class _Executor(SlurmExecutor):
    """submitit's, which would take the first "job NUMBER" in the output of sbatch and its wrappers."""

    cluster = ""  # as sbatch names it, if there are several

    def _get_job_id_from_submission_command(  # type: ignore[override]
        self, string: bytes | str
    ) -> str:
        text = string.decode(errors="replace") if isinstance(string, bytes) else string
        answers = re.findall(
            r"^Submitted batch job (\d+)(?: on cluster (\S+))?\s*$", text, re.MULTILINE
        )
        if not answers:
            raise FailedSubmissionError(
                f"could not make sense of sbatch output {text.strip()[-200:]!r}"
            )
        job_id, self.cluster = answers[-1]
        return str(job_id)


def _executor(machine: Machine, folder: Path, name: str, excluded: Sequence[str] = ()) -> _Executor:
    image = shlex.quote(str(Path(machine.container).resolve()))
    python = f"apptainer exec --nv {image} python3" if machine.container else None
    # lines of the batch script before srun: a command that fails ends the job with one line in its
    # log
    setup = [f"unset {UNSET}"]
    commands = {"setup": machine.setup}
    if machine.modules:
        load = f"module load {shlex.join(machine.modules.split())}"
        commands = {"modules": load} | commands
        setup += FIND_MODULE
    for key, command in commands.items():
        if command:
            failed = shlex.quote(f"cellmill: `{command}` failed on")
            cause = "$no_module" if key == "modules" else ""
            echo = f'echo {failed} "$SLURMD_NODENAME{cause}; change {key} in the profile"'
            setup += [f"{{ {command}", f"}} || {{ {echo}; exit 1; }}"]
    executor = _Executor(folder=folder.resolve(), max_num_timeout=0, python=python)
    # one task per node is requested only from srun: given to sbatch, it would pin a range of nodes
    # to its minimum. A task that fails must not leave the others waiting for it.
    task = ["--ntasks-per-node=1", f"--cpus-per-task={machine.cpus}", "--kill-on-bad-exit=1"]
    executor.update_parameters(
        job_name=name,
        nodes=machine.node_counts[0],  # submitit counts tasks by it
        signal_delay_s=machine.save_within_s,
        wckey=None,  # some sites refuse an unknown key
        stderr_to_stdout=True,
        setup=setup,
        srun_args=[*task, *machine.srun_flags],
        additional_parameters={"requeue": True, **sbatch_options(machine, excluded)},
    )
    return executor


class _NotSubmitted(Exception):
    """sbatch gave no job: its complaint, and True if SLURM is unreachable and may still accept it."""


@dataclass
class SlurmJobs:
    """Submits and finds the jobs of `jobs`.

    One process at a time: the caller holds the folder's lock.
    """

    jobs: Jobs
    queue: Queue
    machine: Machine
    requests: Requests = field(default_factory=Requests)  # any request ends a wait with Interrupted
    patience_s: float = PATIENCE_S  # longest time without an answer from SLURM
    excluded: list[str] = field(default_factory=list)  # nodes that new jobs exclude

    def alive(self) -> list[QueuedJob]:
        """Jobs of this folder that SLURM has. Waits for an answer; raises UserError if none comes."""
        deadline = time.monotonic() + self.patience_s
        warned = False
        while True:
            try:
                return living_jobs(self.jobs, self.queue)
            except CommandError as error:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"no usable answer from squeue within {self.patience_s:.0f} s ({error})"
                    ) from None
                if not warned:
                    say(f"warning: no usable answer from squeue ({error}); waiting for one")
                    warned = True
            self.pause(min(5.0, self.machine.poll_s))

    def find(self) -> JobRecord | None:
        """The record of the job of this folder that SLURM has; a job without a record gets one."""
        for queued in self.alive():
            record = self.jobs.record(queued.job_id, queued.name)
            if record is not None:
                return record
            folder = self.jobs.folder(queued.name)
            if folder is None:
                raise UserError(
                    f"job {queued.job_id} ({queued.name}) belongs to {self.jobs.path.parent}, but its folder there is "
                    f"missing; `scancel {queued.argument}` ends it"
                )
            # there may be another record: of two jobs with one number, one ends at once
            say(f"job {queued.job_id} was submitted but not recorded: adopted by its name")
            for pickled in folder.glob("*.pkl"):
                if "_" not in pickled.stem:  # submitit did not get to give it the job's name
                    SlurmJob(folder, queued.job_id).paths.move_temporary_file(
                        pickled, "submitted_pickle"
                    )
            record = JobRecord.of(self.machine, folder, queued.job_id, queued.name, queued.cluster)
            return record.write()
        return None

    def submit(self, job: Callable[[Path], Job]) -> JobRecord:
        """Submit the job that `job` returns for its folder, unless SLURM has one of this folder.

        Waits for SLURM. Raise UserError if it refuses. The folder of a submission without an answer
        stays: its job may be accepted late, and then ends at once if another job has claimed the
        run.
        """
        path = str(self.jobs.path.resolve())
        if "%" in path or "\\" in path:
            raise UserError(
                f"{path}: SLURM interprets % and \\ in the path of a log; use a folder without them"
            )
        deadline = time.monotonic() + self.patience_s
        printed = set[bool]()
        pause_s = min(5.0, 3 * self.machine.poll_s)
        while True:
            accepted = self.find()
            if accepted is not None:
                say(f"job {accepted.job_id} of this run is alive; its log: {accepted.log}")
                return accepted
            try:
                return self._submit_once(job)
            except _NotSubmitted as error:
                complaint, is_unreachable = error.args
            quota = QUOTA.search(complaint)
            if is_unreachable:
                line = f"warning: sbatch: {complaint}; trying again"
                if time.monotonic() > deadline:
                    raise UserError(
                        f"sbatch could not reach SLURM within {self.patience_s:.0f} s: {complaint}"
                    )
            elif quota:
                deadline = time.monotonic() + self.patience_s
                line = f"sbatch: {quota[0]}: SLURM accepts no further job of yours until others have ended; waiting"
            elif self.excluded:
                say(
                    f"sbatch: {complaint}; trying again without excluding {', '.join(self.excluded)}"
                )
                self.excluded = []
                continue
            else:
                raise UserError(
                    f"sbatch refused the job: {complaint}; the request is in the profile, set-resources: train"
                )
            if is_unreachable not in printed:
                say(line)
                printed.add(is_unreachable)
            pause_s = min(60.0, 2 * pause_s)
            self.pause(pause_s)

    def _submit_once(self, job: Callable[[Path], Job]) -> JobRecord:
        """Call sbatch and record the job. Raise _NotSubmitted without a job."""
        folder, name = self.jobs.new()
        task = write_task(job(folder), self.machine, folder)
        try:
            # submitted and recorded, or neither; submitit would print errors at each try, `submit`
            # prints them once
            with blocked(), submitting(self.machine), redirect_stderr(io.StringIO()):
                executor = _executor(self.machine, folder, name, self.excluded)
                job_id = str(executor.submit(run_task, str(task)).job_id)
                record = JobRecord.of(self.machine, folder, job_id, name, executor.cluster)
                record.write()
        except BlockingIOError:
            raise _NotSubmitted(NO_PROCESS, True) from None
        except (FailedJobError, FailedSubmissionError) as error:
            lines = [line.strip() for line in str(error).splitlines()]
            errors = [
                line for line in lines if line.startswith("sbatch:") or "error" in line.lower()
            ]
            complaint = " ".join(errors or lines)[:400].replace("sbatch: error: ", "")
            is_unreachable = bool(TRANSIENT.search(complaint))
            if not is_unreachable:
                shutil.rmtree(folder, ignore_errors=True)
            raise _NotSubmitted(complaint, is_unreachable) from None
        say(f"submitted job {record.job_id}; its log: {record.log}")
        return record

    def pause(self, seconds: float) -> None:
        """Wait. Raise Interrupted at a request."""
        self.requests.wait(seconds)
        if self.requests.first:
            raise Interrupted("interrupted while waiting for SLURM; run the same command to resume")


class StillQueued(UserError):
    """The job did not start in time, and was cancelled."""


@dataclass(frozen=True)
class End:
    """How a job of `run_once` ended."""

    path: Path  # its folder
    # SLURM's; COMPLETED or FAILED without SLURM, LAUNCH_FAILED if srun could not launch a task
    state: str
    job_id: str = ""
    nodes: str = ""  # in SLURM's form, such as node[1-2]
    queued_s: float = 0.0
    log: Path | None = None
    lost: tuple[str, str] | None = None
    """Tasks that srun could not launch (`1`, `0-3`, or the name of a node), and its reason."""

    @property
    def error(self) -> str | None:
        """The line a process left about what went wrong."""
        return error_line(self.path)


def run_once(
    job: Callable[[Path], Job],
    machine: Machine,
    folder: Path,
    keep_open: int,
    wait_s: float,
) -> End:
    """Run the job that `job` returns for a folder under `folder`/jobs, by the machine's launcher.

    Raise UserError if SLURM refuses the job or gives no answer, StillQueued if it waits for more
    than `wait_s`, KeyboardInterrupt if a signal ended it. The caller holds a lock, whose descriptor
    is `keep_open`.
    """
    try:
        if machine.launcher != "slurm":
            code, path = run_here(job, machine, folder, keep_open)
            return End(path, "COMPLETED" if code == 0 else "FAILED")
        with requests() as received:
            queue = Queue(min(machine.poll_s, POLL_S), machine.slurm_cluster)
            slurm = SlurmJobs(Jobs(folder), queue, machine, received, ONCE_PATIENCE_S)
            for left in slurm.alive():
                say(f"cancelling job {left.job_id}, left by an earlier process")
                cancel_job(left)
            record = slurm.submit(job)
            follower = JobFollower.of(record, queue, echo=False, patience_s=ONCE_PATIENCE_S)
            queued_s = 0.0
            submitted = time.monotonic()
            waiting_since: float | None = submitted
            for state in follower.states(received.wait):
                now = time.monotonic()
                if received.first:
                    say(f"cancelling job {record.job_id}")
                    follower.cancel()
                    raise KeyboardInterrupt
                if state.name in ("RUNNING", "COMPLETING"):
                    queued_s = queued_s or now - submitted
                    waiting_since = None
                elif state.name:
                    waiting_since = waiting_since or now  # a preempted job waits again
                    if now - waiting_since > wait_s:
                        follower.cancel()
                        waited = f"after {wait_s / 60:g} min in the queue"
                        raise StillQueued(
                            f"job {record.job_id} was still {state.text} {waited} and was cancelled"
                        )
    except Interrupted:
        raise KeyboardInterrupt from None
    lost = follower.tail.not_launched if follower.state.name == "LAUNCH_FAILED" else None
    tasks = None if lost is None else (lost[1] or lost[2], lost[3].strip())
    return End(
        record.path, follower.state.name, record.job_id, follower.nodes, queued_s, record.log, tasks
    )
