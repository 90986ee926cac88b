"""Jobs of the workflow's stages in SLURM's queue: why they wait, and why some failed.

Snakemake's SLURM plugin submits the jobs of stages, with the comment `rule_STAGE` or
`rule_STAGE_wildcards_…`, and runs them in the workflow's folder; that is how this module finds
them.
"""

import os
import re
import shutil
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from cellmill.launch.queue import QUOTA, QueuedJob, explained
from cellmill.runs.slurm import CommandError, JobState, ask

QUOTA_REMEDY = "run the same command again once others have ended, or with jobs in the profile below your quota"
WATCH_S = 60.0  # between two looks; a job that pends in two of them is reported
SOON_S = 15.0  # until the next look if a job has begun to pend
SHOWN_IDS = 5


def stage_jobs(folder: Path, states: str = "") -> list[QueuedJob]:
    """Jobs of the stages of the workflow in `folder` that are queued, or in one of some `states`.

    Raise CommandError without an answer.
    """
    jobs = []
    workflow = folder.resolve()
    words = ["squeue", "-a", "-h", "-u", str(os.getuid()), "-o", "%i|%T|%r|%l|%D|%k|%Z"]
    answer = ask([*words, *(["-t", states] if states else [])])
    for line in answer.splitlines():
        cells = line.strip().split("|", 6)
        if len(cells) < 7:
            continue
        job_id, state, reason, limit, nodes, comment, job_folder = cells
        stage = re.match(r"rule_([A-Za-z0-9]\w*?)(?:_wildcards_|$)", comment)
        if stage is not None and Path(job_folder).resolve() == workflow:
            reason = "" if reason == "None" else reason
            jobs.append(QueuedJob(job_id, JobState(state, reason), stage[1], limit, nodes))
    return jobs


def stage_lines(jobs: Sequence[QueuedJob]) -> list[str]:
    """A line for each stage and state of its jobs, with the reason and the remedy."""
    groups = defaultdict[tuple[str, JobState], list[QueuedJob]](list)
    for job in jobs:
        groups[job.name, job.state].append(job)
    lines = []
    for (stage, state), group in groups.items():
        first = group[0]
        ids = ", ".join(job.job_id for job in group[:SHOWN_IDS])
        if len(group) > SHOWN_IDS:
            ids += ", …"
        named = f"job {ids}" if len(group) == 1 else f"{len(group)} jobs ({ids})"
        limit = f"limit {first.limit}"
        why = explained(state, runtime=limit, nodes=first.nodes, job_id=first.job_id)
        lines.append(f"stage {stage}: {named}: {why}")
    return lines


def reasons_of_failed(logs: str | Sequence[str]) -> list[str]:
    """Why each job failed, by Snakemake's own log or logs of the workflow.

    That is the last line of cellmill in the job's log, or sbatch's refusal of the job.
    """
    reasons = dict[str, None]()  # an attempt that was repeated has the same reason again
    for log in [logs] if isinstance(logs, str) else logs:
        text = Path(log).read_text(encoding="utf-8")
        refusals = set[tuple[str, str]]()
        for error in re.split(r"^Error in rule ", text, flags=re.MULTILINE)[1:]:
            stage = error.partition(":")[0]
            job = (stage, error.partition("jobid: ")[2].partition("\n")[0])
            if job in refusals and "    message: None\n" in error:
                # Snakemake before 9.27 repeats its errors at the end, without sbatch's answer
                continue
            refusal = _refusal(stage, error, text)
            if refusal:  # its rule's log, if there is one, is of an earlier run
                refusals.add(job)
                reasons[refusal] = None
            else:
                reasons |= dict.fromkeys(_last_lines(error))
    return list(reasons)


def _refusal(stage: str, error: str, log: str) -> str:
    """sbatch's refusal of a job with the remedy; empty if it accepted the job.

    That of an array of jobs is in the log above the errors of its jobs.
    """
    array = ""
    tasks = re.search(r"Part of failed array sbatch submission (\(.*?\))", error)
    if tasks is not None:
        array = f" for array job submission {tasks[1]}"
        error = log[: log.index(error)]
    answer = rf"SLURM sbatch failed{re.escape(array)}\. The error message was '(.*?)'\.$"
    answers = re.findall(answer, error, re.MULTILINE | re.DOTALL)
    if not answers:
        return ""
    complaint = " ".join(answers[-1].replace("sbatch: error: ", "").split())
    remedy = f"the request is in the profile, set-resources: {stage} or default-resources"
    if QUOTA.search(complaint):
        remedy = QUOTA_REMEDY
    return f"cellmill: stage {stage}: sbatch refused the job: {complaint}; {remedy}"


def _last_lines(error: str) -> Iterator[str]:
    """The line of each log that says why a job failed.

    A job of SLURM has two logs, its rule's and SLURM's. Without the rule's it has not begun, and
    SLURM's ends with why.
    """
    for names in re.findall(r"^    log: (.+) \(check log file", error, re.MULTILINE):
        paths = [Path(names)]
        if not paths[0].is_file():
            paths = [_real_log(Path(name)) for name in names.split(", ")]
        last = last_of_cellmill = ""
        for path in filter(Path.is_file, paths):
            for line in path.read_text("utf-8", "replace").splitlines():
                if line.strip():
                    last = f"{path}: {line}"
                if line.startswith("cellmill "):
                    last_of_cellmill = line
        if last_of_cellmill:
            yield last_of_cellmill
        elif last and not all(path.is_file() for path in paths):
            yield last


def _real_log(path: Path) -> Path:
    """The log of a job: that of an array's job is one folder above where the plugin says."""
    above = path.parents[1] / path.name if len(path.parents) > 1 else path
    return above if above.is_file() and not path.is_file() else path


class StageWatch:
    """Daemon thread that says why stages wait, and which jobs Snakemake waits for without end.

    Each stage and reason once, and again if it comes back.
    """

    def __init__(self, folder: Path, tell: Callable[[str], None]) -> None:
        self.folder = folder
        self.tell = tell
        self._reported = set[tuple[str, str]]()
        self._before = set[str]()
        self._preempted: Counter[str] | None = None  # looks in which a job was PREEMPTED, by id

    def start(self) -> None:
        """Begin to watch, if there is a SLURM."""

        def watch() -> None:
            pause_s = SOON_S
            while True:
                time.sleep(pause_s)
                before = self._before
                with suppress(CommandError):  # the plugin reports it
                    self.look(stage_jobs(self.folder))
                    self.look_at_preempted(stage_jobs(self.folder, "PREEMPTED"))
                pause_s = SOON_S if self._before - before else WATCH_S

        if shutil.which("squeue") is not None:
            threading.Thread(target=watch, daemon=True).start()

    def look(self, jobs: Sequence[QueuedJob]) -> None:
        """Report why jobs wait that were waiting at the last look too, once for each reason."""
        waiting = [job for job in jobs if job.state.name == "PENDING"]
        reasons = {(job.name, job.state.reason) for job in waiting}
        late = []
        for job in waiting:
            if job.job_id in self._before and (job.name, job.state.reason) not in self._reported:
                late.append(job)
        for line in stage_lines(late):
            self.tell(line)
        self._reported &= reasons
        self._reported |= {(job.name, job.state.reason) for job in late}
        self._before = {job.job_id for job in waiting}

    def look_at_preempted(self, jobs: Sequence[QueuedJob]) -> None:
        """Report each job that is PREEMPTED in two looks: it is not requeued, but the plugin waits.

        Those of the first look are jobs of an earlier Snakemake.
        """
        if self._preempted is None:
            self._preempted = Counter({job.job_id: 2 for job in jobs})
            return
        self._preempted.update(job.job_id for job in jobs)
        for job in jobs:
            if self._preempted[job.job_id] == 2:
                self.tell(
                    f"stage {job.name}: job {job.job_id}: SLURM preempted it and does not requeue it, but Snakemake "
                    "waits for it without end; press Ctrl-C, and run the same command again"
                )
