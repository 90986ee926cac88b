"""Job records on disk, `train/jobs/NNN/`, one folder per submission.

    job.json               the submitted request, and the last known state of the job
    task.json              the task of each node, see launch/node.py
    attempt-000.json       when and where it ran; one for each time SLURM started it
    error.txt              one line saying what went wrong, if a process knew
    connection.txt         the first collective that failed, perhaps for the end of another process
    late.txt               nodes for which the first one waits, until they have joined
    node-N.log             messages and tracebacks of torchrun on node N, if there are any
    cancelled              empty; `cellmill cancel` requested the end of the job
    {job}_{task}_log.out   output of the tasks
    …                      submitit's own files

A folder without job.json is a submission that was interrupted: its job, if SLURM has it, is found
by name. submitit's pickled results are never read.

`FOLDER/id.json` identifies a folder: the same by every path that leads to it, and new in a copy. It
names its own inode and path: a folder seen under another path has the same inode, and one on a file
system whose inode numbers change has the same path. Where both differ the folder was copied.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cellmill.errors import DataError
from cellmill.files import fsync, read_json, write_json
from cellmill.runs.slurm import ClusterJob

if TYPE_CHECKING:  # the agent of a node needs no configuration
    from cellmill.config.machine import Machine

ID_FILE = "id.json"
CONNECTION = "connection.txt"  # the first collective that failed
LATE = "late.txt"  # nodes that have not joined
HANG = "hang.txt"  # the rank that hung in the latest start
CANCELLED = "cancelled"


def folder_id(folder: Path) -> str | None:
    """The identity of `folder`, 12 hexadecimal digits; None if it has none yet. Changes no file."""
    file = folder / ID_FILE
    with suppress(DataError, FileNotFoundError, KeyError, TypeError):
        value = read_json(file)
        if value["inode"] == file.stat().st_ino or value["path"] == str(file.resolve()):
            return str(value["id"])
    return None


def make_folder_id(folder: Path) -> str:
    """The identity of `folder`, created if necessary: the same for all concurrent callers."""
    file = folder / ID_FILE
    while True:
        identity = folder_id(folder)
        if identity is not None:
            return identity
        digits = secrets.token_hex(6)
        new = file.with_name(f".{file.stem}.{digits}.incomplete")
        with open(new, "x", encoding="utf-8") as text:
            inode = os.fstat(text.fileno()).st_ino
            json.dump({"id": digits, "inode": inode, "path": str(file.resolve())}, text)
        fsync(new)
        try:
            os.link(new, file)  # unless another process was faster
        except FileExistsError:
            if folder_id(folder) is None:  # the file was copied with the folder
                new.replace(file)
        except OSError:  # a file system without links
            new.replace(file)
        finally:
            new.unlink(missing_ok=True)
        fsync(folder)


def _requested(machine: Machine) -> dict[str, Any]:
    """The request for a machine, as a record has it."""
    return {
        "slurm_partition": machine.slurm_partition,
        "nodes": machine.nodes,
        "nproc_per_node": machine.nproc_per_node,
        "gpus_per_node": machine.gpus,
        "cpus_per_node": machine.cpus,
        "runtime": machine.runtime,
    }


@dataclass(frozen=True)
class JobRecord(ClusterJob):
    """One submission, as in job.json. Times are seconds since 1970."""

    path: Path  # its folder
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
    cluster: str = ""  # as sbatch named it; empty for the default
    limit_s: float | None = None  # its time limit, as SLURM last gave it

    @classmethod
    def of(
        cls, machine: Machine, path: Path, job_id: str, name: str, cluster: str = ""
    ) -> JobRecord:
        """The record of a job for `machine` that was submitted now."""
        return cls(
            path,
            job_id,
            name,
            submitted_at=time.time(),
            save_within_s=machine.save_within_s,
            cluster=cluster,
            **_requested(machine),
        )

    def changes(self, machine: Machine) -> list[str]:
        """Values that a job for `machine` would have instead: `nodes 2 -> 4`."""
        changes = []
        for name, now in _requested(machine).items():
            before = getattr(self, name)
            if before != now:
                changes.append(f"{name} {before or 'none'} -> {now or 'none'}")
        return changes

    @property
    def request(self) -> dict[str, str]:
        """The request in the words that messages use."""
        return {
            "runtime": f"runtime {self.runtime} min",
            "nodes": self.nodes,
            "job_id": self.argument,
        }

    @property
    def log(self) -> Path:
        """Output of task 0."""
        return self.path / f"{self.job_id}_0_log.out"

    @property
    def error(self) -> str | None:
        """The line that a process or node left about what went wrong."""
        return error_line(self.path)

    @property
    def late(self) -> str | None:
        """The line about nodes that had not joined when its last start ended; None if all had."""
        return error_line(self.path, LATE)

    def attempts(self) -> list[dict[str, Any]]:
        """Contents of its attempt files, oldest first."""
        return [read_json(path) for path in sorted(self.path.glob("attempt-*.json"))]

    def write(self) -> JobRecord:
        """Write job.json; return the record."""
        write_json(self.path / "job.json", self._value())
        return self

    def write_state(self, state: str, reason: str = "", ended: bool = False) -> JobRecord:
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
        run = self.path.resolve().parent.parent.name
        self.run = re.sub(r"[^A-Za-z0-9_-]", "", run)[:24] or "run"
        # read once it is made: `owns` is called for every job in the queue
        self._id: str | None = None

    def owns(self, name: str) -> bool:
        """True for `RUN.ID.NUMBER`, the name of a job of this folder, submitted by whatever path."""
        self._id = self._id or folder_id(self.path.parent)
        return self._id is not None and re.search(rf"\.{self._id}\.\d+$", name) is not None

    def all(self) -> list[JobRecord]:
        """Recorded submissions, oldest first. Raise DataError naming an unreadable record."""
        records = []
        for folder in self._folders():
            file = folder / "job.json"
            if file.exists():
                try:
                    records.append(JobRecord(path=folder, **read_json(file)))
                except (DataError, TypeError):
                    remedy = "remove the file: a job that is still alive is then found by its name"
                    raise DataError(f"{file}: not a job record; {remedy}") from None
        return records

    def newest(self) -> JobRecord | None:
        """The last recorded submission; records that came with a copied folder do not count."""
        records = [record for record in self.all() if self.owns(record.name)]
        return records[-1] if records else None

    def cluster(self) -> str:
        """The cluster of the newest submission, or those it may have; empty for the default."""
        for folder in self._folders()[-1:]:
            for name in ("job.json", "task.json"):
                with suppress(DataError, FileNotFoundError, KeyError):
                    return str(read_json(folder / name)["cluster"])
        return ""

    def record(self, job_id: str, name: str) -> JobRecord | None:
        """The record of a job; None if it was submitted but not recorded."""
        records = {(record.job_id, record.name): record for record in self.all()}
        return records.get((job_id, name))

    def may_be_alive(self) -> bool:
        """True if SLURM must be queried: the newest submission has no end on record, or no record."""
        folders = self._folders()
        newest = self.newest()
        if not folders:
            return False
        return newest is None or newest.path != folders[-1] or newest.ended_at is None

    def folder(self, name: str) -> Path | None:
        """The folder of the job called `name`, one of this folder's; None if it is missing."""
        path = self.path / name.rpartition(".")[2]
        return path if path.is_dir() else None

    def new(self) -> tuple[Path, str]:
        """Create the folder of the next submission, only for this user; return it and the job's name."""
        folders = self._folders()
        number = f"{1 + int(folders[-1].name) if folders else 1:03}"
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.path / number).mkdir(mode=0o700)
        return self.path / number, self.name(number)

    def name(self, number: str) -> str:
        """The name of the job of a submission; the folder gets an identity if it has none."""
        return f"{self.run}.{make_folder_id(self.path.parent)}.{number}"

    def _folders(self) -> list[Path]:
        folders = [path for path in self.path.glob("*") if path.name.isdigit()]
        return sorted(folders, key=lambda path: int(path.name))


def write_if_room(file: Path, value: Any) -> None:
    """Write JSON, or warn: a full disk must not hide how a training ended."""
    try:
        if file.parent.is_dir():  # a deleted run is not made again
            write_json(file, value)
    except OSError as error:
        print(f"warning: {file}: {error.strerror}", flush=True)


def error_line(folder: Path, name: str = "error.txt") -> str | None:
    """The text of a file in one line; None if there is none."""
    file = folder / name
    if not file.exists():
        return None
    return " ".join(file.read_text(encoding="utf-8", errors="replace").split())
