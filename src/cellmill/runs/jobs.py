"""Job records on disk: `train/jobs/NNN/`, one folder for each submission.

    job.json               the submitted request, and the last known state of the job
    task.json              the task of each node, see launch/node.py
    attempt-000.json       when and where it ran; one for each time SLURM started it
    error.txt              one line saying what went wrong, if a process knew
    connection.txt         the first collective that failed, perhaps for the end of another process
    node-N.log             messages and tracebacks of torchrun on node N, if there are any
    cancelled              empty; `cellmill cancel` asked the job to end
    {job}_{task}_log.out   output of the tasks
    …                      submitit's own files

A folder without job.json is a submission that was interrupted: its job, if SLURM has it, is found by name.
submitit's pickled results are never read.
"""

from __future__ import annotations

import hashlib
import re
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cellmill.config.machine import Machine
from cellmill.errors import DataError
from cellmill.files import read_json, write_json
from cellmill.runs.folder_id import folder_id, make_folder_id

CONNECTION = "connection.txt"
CANCELLED = "cancelled"


@dataclass(frozen=True)
class JobRecord:
    """One submission, as in job.json. Times are seconds since 1970."""

    path: Path
    """Its folder."""
    job_id: str
    name: str
    submitted_at: float
    nodes: str
    nproc_per_node: int
    gpus_per_node: int
    cpus_per_node: int
    slurm_partition: str
    runtime: int
    save_within_s: int = 120
    state: str = "PENDING"
    reason: str = ""
    ended_at: float | None = None

    @classmethod
    def of(cls, machine: Machine, path: Path, job_id: str, name: str) -> JobRecord:
        """The record of a job for `machine` that was submitted now."""
        return cls(
            path=path,
            job_id=job_id,
            name=name,
            submitted_at=time.time(),
            nodes=machine.nodes,
            nproc_per_node=machine.nproc_per_node,
            gpus_per_node=machine.gpus,
            cpus_per_node=machine.cpus,
            slurm_partition=machine.slurm_partition,
            runtime=machine.runtime,
            save_within_s=machine.save_within_s,
        )

    def changes(self, machine: Machine) -> list[str]:
        """Values that a job for `machine` would have instead: `nodes 2 -> 4`."""
        other = JobRecord.of(machine, self.path, self.job_id, self.name)
        names = ("slurm_partition", "nodes", "nproc_per_node", "gpus_per_node", "cpus_per_node", "runtime")
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        return [f"{name} {before or 'none'} -> {now or 'none'}" for name, before, now in pairs if before != now]

    @property
    def log(self) -> Path:
        """Output of task 0."""
        return self.path / f"{self.job_id}_0_log.out"

    @property
    def error(self) -> str | None:
        """The line that a process or node left about what went wrong."""
        return error_line(self.path)

    @property
    def connection(self) -> str | None:
        """The line about the first collective that failed."""
        return error_line(self.path, CONNECTION)

    def attempts(self) -> list[dict[str, Any]]:
        """Contents of its attempt files, oldest first."""
        return [read_json(path) for path in sorted(self.path.glob("attempt-*.json"))]

    def write(self) -> JobRecord:
        """Write job.json; return the record."""
        write_json(self.path / "job.json", self._value())
        return self

    def now(self, state: str, reason: str = "", ended: bool = False) -> JobRecord:
        """The record with a new state, written if the disk has room."""
        record = replace(self, state=state, reason=reason, ended_at=time.time() if ended else None)
        write_if_room(self.path / "job.json", record._value())
        return record

    def _value(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "path"}


class Jobs:
    """Submissions of the run in `train`."""

    def __init__(self, train: Path) -> None:
        self.path = Path(train) / "jobs"
        self.run = re.sub(r"[^A-Za-z0-9_-]", "", self.path.resolve().parent.parent.name)[:24] or "run"
        digest = hashlib.sha256(str(self.path.resolve()).encode()).hexdigest()[:12]
        self._id: str | None = None  # read once it is made: `owns` is asked about every job in the queue
        self.former = f"cellmill-{self.run}-{digest}"  # name of jobs that earlier versions submitted

    def owns(self, name: str) -> bool:
        """True for the name of a job of this folder, by whatever path it was submitted: `RUN.ID.NUMBER`."""
        first, _, number = name.rpartition(".")
        self._id = self._id or folder_id(self.path.parent)
        ours = first == self.former or (self._id is not None and first.endswith(f".{self._id}"))
        return ours and number.isdigit()

    def all(self) -> list[JobRecord]:
        """Recorded submissions, oldest first. Raises DataError naming an unreadable record."""
        return [_read(path) for path in self._folders() if (path / "job.json").exists()]

    def newest(self) -> JobRecord | None:
        """The last recorded submission; records that came with a copied folder do not count."""
        return next((record for record in reversed(self.all()) if self.owns(record.name)), None)

    def record(self, job_id: str, name: str) -> JobRecord | None:
        """The record of a job; None if it was submitted but not recorded."""
        return next((record for record in self.all() if (record.job_id, record.name) == (job_id, name)), None)

    def may_be_alive(self) -> bool:
        """True if SLURM must be queried: the newest submission has no end on record, or no record."""
        folders, newest = self._folders(), self.newest()
        return bool(folders) and (newest is None or newest.path != folders[-1] or newest.ended_at is None)

    def folder(self, name: str) -> Path | None:
        """The folder of the job called `name`, one of this folder's; None if it is missing."""
        path = self.path / name.rpartition(".")[2]
        return path if path.is_dir() else None

    def new(self) -> tuple[Path, str]:
        """Create the folder of the next submission, for this user alone; return it and the job's name."""
        folders = self._folders()
        number = f"{1 + int(folders[-1].name) if folders else 1:03}"
        path = self.path / number
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
        return path, self.name(number)

    def name(self, number: str) -> str:
        """The name of the job of a submission; the folder gets an identity if it has none."""
        return f"{self.run}.{make_folder_id(self.path.parent)}.{number}"

    def _folders(self) -> list[Path]:
        return sorted((path for path in self.path.glob("*") if path.name.isdigit()), key=lambda path: int(path.name))


def write_if_room(file: Path, value: Any) -> None:
    """Write JSON, or warn: a full disk must not hide how a training ended."""
    if not file.parent.is_dir():  # a deleted run is not made again
        return
    try:
        write_json(file, value)
    except OSError as error:
        print(f"warning: {file}: {error.strerror}", flush=True)


def error_line(folder: Path, name: str = "error.txt") -> str | None:
    """The text of a file in one line; None if there is none."""
    file = folder / name
    return " ".join(file.read_text(encoding="utf-8", errors="replace").split()) if file.exists() else None


def _read(folder: Path) -> JobRecord:
    file = folder / "job.json"
    try:
        return JobRecord(path=folder, **read_json(file))
    except (DataError, TypeError):
        raise DataError(
            f"{file}: not a job record; remove the file: a job that is still alive is then found by its name"
        ) from None
