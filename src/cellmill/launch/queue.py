"""States of SLURM jobs, by squeue or, for jobs it has forgotten, by sacct; waiting and failed jobs of a workflow.

Each launcher queries squeue itself, and holds no lock while it does. No answer, or one that cannot be parsed, is
UNKNOWN and never taken for the end of a job.

Snakemake's SLURM plugin submits the jobs of stages, with the comment `rule_STAGE` or `rule_STAGE_wildcards_…`, and runs
them in the workflow's folder; that is how this module finds them, to report why they wait and why some failed.
"""

import os
import re
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from cellmill.runs.jobs import ALIVE, ENDED, FOREIGN, GONE, UNKNOWN, UNLISTED, CommandError, JobState, ask, call

_HINTS = {
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
    "ReqNodeNotAvail": "its nodes are down or reserved",
    "DependencyNeverSatisfied": "it will never start: cancel it",
    "InvalidAccount": "slurm_account is not valid: change it in the profile",
    "InvalidQOS": "qos is not valid: change it in the profile",
}

_LINE = re.compile(r"(\d+)\|([A-Z_]+)\|([^|]*)\|([^|]*)\|(.*)")


@dataclass(frozen=True)
class QueuedJob:
    """One job as squeue lists it."""

    job_id: str
    state: JobState
    name: str


@dataclass
class Queue:
    """Jobs of this user, by answers that are at most `poll_s` seconds old."""

    poll_s: float
    _asked_at: float = field(default=float("-inf"), init=False)
    _answer: str | CommandError = field(default="", init=False)

    def state(self, job_id: str, name: str) -> JobState:
        """The state of the job of this id and name; FOREIGN if the job of this id has another name."""
        try:
            job = self._find(job_id, self.poll_s) or self._find(job_id, 0)  # a new job is in no earlier answer
        except CommandError as error:
            return JobState(UNKNOWN, str(error))
        if job is None:
            return self._from_accounting(job_id)
        return job.state if job.name == name else JobState(FOREIGN)

    def named(self, ours: Callable[[str], bool]) -> list[QueuedJob]:
        """Jobs alive now whose name is one of `ours`. Raises CommandError without a usable answer."""
        jobs = [job for job in self._listed(0) if ours(job.name)]
        for job in jobs:
            if job.state.name == UNKNOWN:
                raise CommandError(job.state.reason)
        return [job for job in jobs if job.state.alive]

    def cancel(self, job_id: str, name: str, signal: str = "") -> str:
        """Cancel the job of this id and name, or send its tasks a signal.

        Returns scancel's error message, or an empty text. scancel leaves a job of another name alone.
        """
        try:
            how = [f"--name={name}", *([f"--signal={signal}"] if signal else [])]
            return call(["scancel", *how, job_id]).stderr.strip()
        except CommandError as error:
            return str(error)

    def _find(self, job_id: str, max_age_s: float) -> QueuedJob | None:
        return next((job for job in self._listed(max_age_s) if job.job_id == job_id), None)

    def _listed(self, max_age_s: float) -> list[QueuedJob]:
        """Jobs by an answer of at most this age. Raises CommandError without a usable answer."""
        if time.monotonic() - self._asked_at >= max_age_s:
            try:  # by uid, since the environment can change the name; -a: also hidden partitions
                command = ["squeue", "-a", "-h", "-t", "all", "-u", str(os.getuid()), "-o", "%i|%T|%r|%N|%j"]
                self._answer = ask(command)
            except CommandError as error:  # kept as well: spare a controller in trouble
                self._answer = error
            self._asked_at = time.monotonic()
        if isinstance(self._answer, CommandError):
            raise self._answer
        return parse(self._answer)

    def _from_accounting(self, job_id: str) -> JobState:
        try:
            words = ask(["sacct", "-X", "-n", "-P", "-j", job_id, "-o", "State"]).split()
        except CommandError:  # without accounting nothing is lost: the run's own files say how far it came
            words = []
        if not words or words[0] not in ALIVE | ENDED:
            return JobState(GONE)
        return JobState(words[0], UNLISTED if words[0] in ALIVE else "")


def parse(answer: str) -> list[QueuedJob]:
    """The jobs in squeue's answer. Raises CommandError if a line is not a job."""
    jobs = []
    for text in answer.splitlines():
        match = _LINE.fullmatch(text.strip())
        if match is not None:
            number, word, reason, nodes, name = match.groups()
            state = JobState(word, "" if reason == "None" else reason, nodes)
            if word not in ALIVE | ENDED:
                state = JobState(UNKNOWN, f"squeue gives job {number} an unknown state: {word}")
            jobs.append(QueuedJob(number, state, name))
        elif not re.match(r"\d+[_+]", text.strip()):  # array task or component of a heterogeneous job: not ours
            raise CommandError(f"squeue answered {text.strip()[:80]!r}")
    return jobs


def pending_hint(reason: str, **request: str) -> str:
    """Advice for a job that is pending for this reason; empty if it only has to wait.

    Parameters
    ----------
    request
        `runtime`, `nodes` and `job_id`, as they are named to the user.
    """
    return _HINTS.get(reason.split(",")[0].replace("_", " "), "").format(**request)


def expand(nodelist: str) -> list[str]:
    """Return the hosts of a node list, in its order: `gpu-[01-02,7],n1` is gpu-01, gpu-02, gpu-7, n1."""
    hosts = []
    for group in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        parts = re.split(r"\[([^\]]*)\]", group)  # text, ranges, text, ranges …
        choices = [[part] if index % 2 == 0 else list(_numbers(part)) for index, part in enumerate(parts)]
        hosts += ["".join(words) for words in product(*choices)]
    return hosts


def _numbers(ranges: str) -> Iterator[str]:
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        yield from (f"{number:0{len(first)}}" for number in range(int(first), int(last or first) + 1))


WATCH_S = 15.0
"""Between two looks; a job that pends in two of them is reported."""
_LISTED = 5


@dataclass(frozen=True)
class StageJob:
    """A stage's job in the queue."""

    job_id: str
    stage: str
    state: JobState
    limit: str
    """Its time limit, as SLURM writes it."""
    nodes: str


def stage_jobs(folder: Path) -> list[StageJob]:
    """Jobs of the stages of the workflow in `folder`. Raises CommandError without an answer."""
    jobs, here = [], folder.resolve()
    answer = ask(["squeue", "-a", "-h", "-u", str(os.getuid()), "-o", "%i|%T|%r|%l|%D|%k|%Z"])
    for line in answer.splitlines():
        cells = line.strip().split("|", 6)
        stage = re.match(r"rule_([A-Za-z0-9]\w*?)(?:_wildcards_|$)", cells[5]) if len(cells) == 7 else None
        if stage is not None and Path(cells[6]).resolve() == here:
            reason = "" if cells[2] == "None" else cells[2]
            jobs.append(StageJob(cells[0], stage[1], JobState(cells[1], reason), *cells[3:5]))
    return jobs


def waiting_lines(jobs: Sequence[StageJob]) -> list[str]:
    """A line for each stage and reason that jobs wait for, with the remedy where there is one."""
    groups = defaultdict[tuple[str, str], list[StageJob]](list)
    for job in jobs:
        if job.state.name == "PENDING":
            groups[job.stage, job.state.text].append(job)
    return [f"stage {stage}: {_job_ids(same)}: {text}{_remedy(same[0])}" for (stage, text), same in groups.items()]


def _job_ids(jobs: Sequence[StageJob]) -> str:
    ids = ", ".join(job.job_id for job in jobs[:_LISTED])
    return f"job {ids}" if len(jobs) == 1 else f"{len(jobs)} jobs ({ids}{', …' if len(jobs) > _LISTED else ''})"


def _remedy(job: StageJob) -> str:
    hint = pending_hint(job.state.reason, runtime=f"limit {job.limit}", nodes=job.nodes, job_id=job.job_id)
    return f": {hint}" if hint else ""


def reasons_of_failed(logs: str | Sequence[str]) -> list[str]:
    """The last line of cellmill in the log of each job that failed, by Snakemake's own log or logs of the workflow."""
    reasons = []
    for log in [logs] if isinstance(logs, str) else logs:
        for name in re.findall(r"^    log: (.+) \(check log file", Path(log).read_text(encoding="utf-8"), re.MULTILINE):
            lines = (
                Path(name).read_text(encoding="utf-8", errors="replace").splitlines() if Path(name).is_file() else []
            )
            reasons += [line for line in lines if line.startswith("cellmill ")][-1:]
    return reasons


class StageWatch:
    """Says why stages wait, for as long as this process runs; each stage and reason once, and again if it comes back.

    A daemon thread of the process that waits for them.
    """

    def __init__(self, folder: Path, tell: Callable[[str], None], every_s: float = WATCH_S) -> None:
        self.folder, self.tell, self.every_s = folder, tell, every_s
        self._told, self._before = set[tuple[str, str]](), set[str]()

    def start(self) -> None:
        """Begin to watch, if there is a SLURM."""
        if shutil.which("squeue") is not None:
            threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        pause = threading.Event()
        while not pause.wait(self.every_s):
            try:
                self.look(stage_jobs(self.folder))
            except CommandError:  # the plugin reports it
                continue

    def look(self, jobs: Sequence[StageJob]) -> None:
        """Report why jobs wait that were waiting at the last look too, once for each."""
        waiting = [job for job in jobs if job.state.name == "PENDING"]
        present = {(job.stage, job.state.reason) for job in waiting}
        self._told &= present
        late = [job for job in waiting if job.job_id in self._before]
        new = {(job.stage, job.state.reason) for job in late} - self._told
        for line in waiting_lines([job for job in late if (job.stage, job.state.reason) in new]):
            self.tell(line)
        self._told |= new
        self._before = {job.job_id for job in waiting}
