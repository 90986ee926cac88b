"""Jobs that Snakemake's SLURM plugin submitted for the stages of a workflow: why they wait, and why jobs failed.

The plugin gives each job the comment `rule_STAGE` or `rule_STAGE_wildcards_…`, and runs it in the workflow's folder.
"""

import os
import re
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cellmill.launch.queue import pending_hint
from cellmill.runs.job_states import JobState
from cellmill.runs.slurm_command import CommandError, ask

WATCH_S = 15.0
"""Between two looks; what pends in two of them is told."""
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
    return [f"stage {stage}: {_numbers(same)}: {text}{_remedy(same[0])}" for (stage, text), same in groups.items()]


def _numbers(jobs: Sequence[StageJob]) -> str:
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
            except CommandError:  # the plugin tells of it
                continue

    def look(self, jobs: Sequence[StageJob]) -> None:
        """Tell the reasons of jobs that were waiting at the last look too, but for those told before."""
        waiting = [job for job in jobs if job.state.name == "PENDING"]
        present = {(job.stage, job.state.reason) for job in waiting}
        self._told &= present
        late = [job for job in waiting if job.job_id in self._before]
        new = {(job.stage, job.state.reason) for job in late} - self._told
        for line in waiting_lines([job for job in late if (job.stage, job.state.reason) in new]):
            self.tell(line)
        self._told |= new
        self._before = {job.job_id for job in waiting}
