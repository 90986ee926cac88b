"""States of SLURM jobs, by squeue or, for jobs it has forgotten, by sacct; why jobs wait, and why
some failed.

Each launcher queries squeue itself, once in `poll_s` seconds, and holds no lock while it does. No
answer, or one that cannot be parsed, is UNKNOWN and never taken for the end of a job.

Snakemake's SLURM plugin submits the jobs of stages, with the comment `rule_STAGE` or
`rule_STAGE_wildcards_…`, and runs them in the workflow's folder; that is how this module finds
them.
"""

import os
import re
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from cellmill.runs.slurm import (
    ALIVE,
    ENDED,
    NOT_LISTED,
    OTHER_JOB,
    UNKNOWN,
    UNLISTED,
    CommandError,
    JobState,
    ask,
    call,
)

REMEDIES = {
    "PartitionTimeLimit": "{runtime} is more than the partition allows: lower it in the profile",
    "PartitionNodeLimit": "the partition has fewer nodes than {nodes}: lower nodes in the profile",
    "QOSMaxWallDurationPerJobLimit": "{runtime} is more than the QOS allows: lower it in the profile",
    "AssocMaxWallDurationPerJobLimit": "{runtime} is more than the account allows: lower it in the profile",
    "JobHeldUser": "held: `scontrol release {job_id}` releases it",
    "JobHeldAdmin": "held by an administrator, who must release it",
    "job requeued in held state": "held: `scontrol release {job_id}` releases it",
    "launch failed requeued held": "held after a failed start: `scontrol release {job_id}` tries again",
    "JobHoldMaxRequeue": "held after too many requeues: `scontrol release {job_id}` tries again",
    "BadConstraints": "no node satisfies it: change constraint, gpus_per_node or mem_mb in the profile",
    "ReqNodeNotAvail|NodeDown|Reservation": "its nodes are down or reserved",
    "Partition(Down|Inactive)": "its partition is not open: wait, or change slurm_partition in the profile",
    "(QOS|Account)NotAllowed": "the partition refuses it: change slurm_account, qos or slurm_partition in the profile",
    "Licenses": "its licenses are in use",
    "BeginTime": "SLURM starts it again after a pause",
    "DependencyNeverSatisfied": "it will never start: cancel it",
    "InvalidAccount": "slurm_account is not valid: change it in the profile",
    "InvalidQOS": "qos is not valid: change it in the profile",
    "Priority": "jobs of higher priority come first",
    "Resources": "it starts as soon as enough nodes are free",
    r"(QOS|Assoc)Grp\w*Minutes\w*": "the time that was granted is used up: change slurm_account or qos in the profile",
    r"(QOS|Assoc)(Max\w*PerJob|Min)\w*": "a job may not request this: change the request, or qos, in the profile",
    r"(QOS|Assoc)(Max|Grp|Job)\w*|Association\w*Limit|Max\w*PerAccount": "a limit of yours, the account or the QOS is "
    "reached: it starts once other jobs have ended, or with another qos in the profile",
}
"""By SLURM's reason why a job is pending, a regular expression of which the first counts: what it
waits for, or what to do.
"""
# sbatch's word for a quota of submitted jobs that is full
QUOTA = re.compile(r"(?:Assoc|QOS)\w*SubmitJobs?\w*Limit")
QUOTA_REMEDY = "run the same command again once others have ended, or with jobs in the profile below your quota"
WATCH_S = 15.0  # between two looks; a job that pends in two of them is reported
_LISTED = 5


@dataclass(frozen=True)
class QueuedJob:
    """One job as squeue lists it."""

    job_id: str
    state: JobState
    name: str  # for the job of a stage, the stage
    # its time limit and number of nodes, as SLURM writes them; only for the job of a stage
    limit: str = ""
    nodes: str = ""


@dataclass
class Queue:
    """Jobs of this user, by answers that are at most `poll_s` seconds old."""

    poll_s: float
    _queried_at: float = field(default=float("-inf"), init=False)
    _answer: str | CommandError = field(default="", init=False)

    def state(self, job_id: str, name: str) -> JobState:
        """The state of the job of this id and name; OTHER_JOB if the job of this id has another
        name.
        """
        try:
            jobs = {job.job_id: job for job in self._listed(self.poll_s)}
            if job_id not in jobs:  # a new job is in no earlier answer
                jobs = {job.job_id: job for job in self._listed(0)}
        except CommandError as error:
            return JobState(UNKNOWN, str(error))
        job = jobs.get(job_id)
        if job:
            return job.state if job.name == name else JobState(OTHER_JOB)
        try:
            words = ask(["sacct", "-X", "-n", "-P", "-j", job_id, "-o", "State"]).split()
        except (
            CommandError
        ):  # without accounting nothing is lost: the run's own files say how far it came
            words = []
        if not words or words[0] not in ALIVE | ENDED:
            return JobState(NOT_LISTED)
        return JobState(words[0], UNLISTED if words[0] in ALIVE else "")

    def named(self, ours: Callable[[str], bool]) -> list[QueuedJob]:
        """Jobs alive now whose name is one of `ours`. Raises CommandError without a usable answer."""
        jobs = [job for job in self._listed(0) if ours(job.name)]
        odd = next((job for job in jobs if job.state.name == UNKNOWN), None)
        if odd:
            raise CommandError(odd.state.reason)
        return [job for job in jobs if job.state.alive]

    def cancel(self, job_id: str, name: str, signal: str = "") -> str:
        """Cancel the job of this id and name, or send its tasks a signal; return scancel's error
        message, if any. scancel leaves a job of another name alone.
        """
        how = [f"--name={name}", *([f"--signal={signal}"] if signal else [])]
        try:
            return call(["scancel", *how, job_id]).stderr.strip()
        except CommandError as error:
            return str(error)

    def controller_has(self, job_id: str, name: str) -> bool:
        """True if scontrol shows that the job of this id and name is alive. A site may cache the
        answers of squeue.
        """
        try:
            shown = ask(["scontrol", "-o", "show", "job", job_id])
        except CommandError:  # it does not know the job
            return False
        fields = dict(re.findall(r"(\w+)=(\S*)", shown))
        return fields.get("JobName") == name and fields.get("JobState") in ALIVE

    def release(self, job_id: str) -> str:
        """Release a held job; return scontrol's error message, if any."""
        try:
            return call(["scontrol", "release", job_id]).stderr.strip()
        except CommandError as error:
            return str(error)

    def _listed(self, max_age_s: float) -> list[QueuedJob]:
        """Jobs by an answer of at most this age. Raises CommandError without a usable answer."""
        if time.monotonic() - self._queried_at >= max_age_s:
            try:  # by uid, since the environment can change the name; -a: also hidden partitions
                command = [
                    "squeue",
                    "-a",
                    "-h",
                    "-t",
                    "all",
                    "-u",
                    str(os.getuid()),
                    "-o",
                    "%i|%T|%r|%N|%j",
                ]
                self._answer = ask(command)
            except CommandError as error:  # kept as well: spare a controller in trouble
                self._answer = error
            self._queried_at = time.monotonic()
        if isinstance(self._answer, CommandError):
            raise self._answer
        return parse(self._answer)


def parse(answer: str) -> list[QueuedJob]:
    """The jobs in squeue's answer. Raises CommandError if it has lines and none of them is a job.

    With several clusters squeue prints the name of each above its jobs, even without a header.
    Among jobs, lines that are none are passed over: from start-up files of the shell, or the rest
    of a name with a line break.
    """
    jobs = []
    foreign = []
    passed_over = False
    for line in map(str.strip, answer.splitlines()):
        match = re.fullmatch(r"(\d+)\|([A-Z_]+)\|([^|]*)\|([^|]*)\|(.*)", line)
        if match:
            number, word, reason, nodes, name = match.groups()
            state = JobState(word, "" if reason == "None" else reason, nodes)
            if word not in ALIVE | ENDED:
                state = JobState(UNKNOWN, f"squeue gives job {number} an unknown state: {word}")
            jobs.append(QueuedJob(number, state, name))
        elif re.match(r"\d+[_+]", line):
            passed_over = True  # an array task or a component of a heterogeneous job: not ours
        elif line and not line.startswith("CLUSTER: "):
            foreign.append(line)
    if foreign and not jobs and not passed_over:
        raise CommandError(f"squeue answered {foreign[0][:80]!r}")
    return jobs


def explained(state: JobState, **request: str) -> str:
    """The state with its reason and, for a pending job, what it waits for or what to do. `request`
    has `runtime`, `nodes` and `job_id` as they are named to the user (`JobRecord.request`).
    """
    reason = state.reason.split(",")[0].replace("_", " ") if state.name == "PENDING" else ""
    remedy = next(
        (text for pattern, text in REMEDIES.items() if re.fullmatch(pattern, reason)), None
    )
    return f"{state.text}: {remedy.format(**request)}" if remedy else state.text


def expand(nodelist: str) -> list[str]:
    """Return the hosts of a node list, in its order: `gpu-[01-02,7],n1` is gpu-01, gpu-02, gpu-7,
    n1.
    """

    def numbers(ranges: str) -> list[str]:
        bounds = [part.partition("-") for part in ranges.split(",")]
        return [
            f"{n:0{len(low)}}"
            for low, _, high in bounds
            for n in range(int(low), int(high or low) + 1)
        ]

    hosts = []
    for group in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        parts = re.split(r"\[([^\]]*)\]", group)  # text, ranges, text, ranges …
        choices = [[part] if index % 2 == 0 else numbers(part) for index, part in enumerate(parts)]
        hosts += ["".join(words) for words in product(*choices)]
    return hosts


def stage_jobs(folder: Path) -> list[QueuedJob]:
    """Queued jobs of the stages of the workflow in `folder`. Raises CommandError without an answer."""
    jobs = []
    here = folder.resolve()
    answer = ask(["squeue", "-a", "-h", "-u", str(os.getuid()), "-o", "%i|%T|%r|%l|%D|%k|%Z"])
    for line in answer.splitlines():
        cells = line.strip().split("|", 6)
        stage = (
            re.match(r"rule_([A-Za-z0-9]\w*?)(?:_wildcards_|$)", cells[5])
            if len(cells) == 7
            else None
        )
        if stage is not None and Path(cells[6]).resolve() == here:
            reason = "" if cells[2] == "None" else cells[2]
            jobs.append(QueuedJob(cells[0], JobState(cells[1], reason), stage[1], *cells[3:5]))
    return jobs


def stage_lines(jobs: Sequence[QueuedJob]) -> list[str]:
    """A line for each stage and state of its jobs, with the reason why they wait and the remedy
    where there is one.
    """
    groups = defaultdict[tuple[str, JobState], list[QueuedJob]](list)
    for job in jobs:
        groups[job.name, job.state].append(job)
    lines = []
    for (stage, state), same in groups.items():
        first = same[0]
        ids = ", ".join(job.job_id for job in same[:_LISTED])
        named = (
            f"job {ids}"
            if len(same) == 1
            else f"{len(same)} jobs ({ids}{', …' if len(same) > _LISTED else ''})"
        )
        why = explained(
            state, runtime=f"limit {first.limit}", nodes=first.nodes, job_id=first.job_id
        )
        lines.append(f"stage {stage}: {named}: {why}")
    return lines


def reasons_of_failed(logs: str | Sequence[str]) -> list[str]:
    """Why each job failed, by Snakemake's own log or logs of the workflow: the last line of
    cellmill in the job's log, or sbatch's answer to a job that it refused.

    A job of SLURM has two logs, its rule's and SLURM's. Without the rule's it has not begun, and
    SLURM's ends with why.
    """
    reasons = dict[str, None]()  # an attempt that was repeated says the same again
    for log in [logs] if isinstance(logs, str) else logs:
        _, *errors = re.split(
            r"^Error in rule ", Path(log).read_text(encoding="utf-8"), flags=re.MULTILINE
        )
        refusals = set[tuple[str, str]]()
        for error in errors:
            stage = error.partition(":")[0]
            jobid = error.partition("jobid: ")[2].partition("\n")[0]
            if (stage, jobid) in refusals and "    message: None\n" in error:
                # Snakemake before 9.27 repeats its errors at the end, without sbatch's answer
                continue
            refused = re.search(
                r"SLURM sbatch failed\. The error message was '(.*?)'\.$", error, re.M | re.S
            )
            if refused:
                said = " ".join(refused[1].replace("sbatch: error: ", "").split())
                remedy = (
                    f"the request is in the profile, set-resources: {stage} or default-resources"
                )
                remedy = QUOTA_REMEDY if QUOTA.search(said) else remedy
                refusals.add((stage, jobid))
                reasons[f"cellmill: stage {stage}: sbatch refused the job: {said}; {remedy}"] = None
                continue  # its rule's log, if there is one, is of an earlier run
            for names in re.findall(r"^    log: (.+) \(check log file", error, re.MULTILINE):
                paths = [
                    Path(name) for name in ([names] if Path(names).is_file() else names.split(", "))
                ]
                found = [path for path in paths if path.is_file()]
                lines = [
                    (path, line)
                    for path in found
                    for line in path.read_text("utf-8", "replace").splitlines()
                ]
                said_last = [line for _, line in lines if line.startswith("cellmill ")]
                if not said_last and len(found) < len(paths):
                    said_last = [f"{path}: {line}" for path, line in lines if line.strip()]
                reasons |= dict.fromkeys(said_last[-1:])
    return list(reasons)


class StageWatch:
    """Says why stages wait, for as long as this process runs; each stage and reason once, and again
    if it comes back. A daemon thread of the process that waits for them.
    """

    def __init__(self, folder: Path, tell: Callable[[str], None]) -> None:
        self.folder = folder
        self.tell = tell
        self._reported = set[tuple[str, str]]()
        self._before = set[str]()

    def start(self) -> None:
        """Begin to watch, if there is a SLURM."""

        def watch() -> None:
            while True:
                time.sleep(WATCH_S)
                with suppress(CommandError):  # the plugin reports it
                    self.look(stage_jobs(self.folder))

        if shutil.which("squeue") is not None:
            threading.Thread(target=watch, daemon=True).start()

    def look(self, jobs: Sequence[QueuedJob]) -> None:
        """Report why jobs wait that were waiting at the last look too, once for each."""
        waiting = {job: (job.name, job.state.reason) for job in jobs if job.state.name == "PENDING"}
        late = [
            job
            for job, why in waiting.items()
            if job.job_id in self._before and why not in self._reported
        ]
        for line in stage_lines(late):
            self.tell(line)
        self._reported = (self._reported & set(waiting.values())) | {waiting[job] for job in late}
        self._before = {job.job_id for job in waiting}
