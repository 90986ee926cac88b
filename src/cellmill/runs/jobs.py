"""The jobs of a run on disk: `train/jobs/NNN/`, one folder for each submission.

    job.json               what was submitted, and SLURM's last word on it
    attempt-000.json       when and where it ran; one for each time SLURM started it
    error.txt              the one line of what went wrong, where a process knew it
    {job}_{task}_log.out   what the tasks printed
    …                      submitit's own files

A newest folder without job.json is a submission that was cut off: its job, if SLURM has it, is found by name. What
lies here is JSON and text of our own; submitit's pickled results are never read.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cellmill.errors import DataError
from cellmill.files import read_json, write_json


@dataclass(frozen=True)
class JobRecord:
    """One submission; see job.json. Times are seconds since 1970."""

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
    state: str = "PENDING"
    reason: str = ""
    ended_at: float | None = None

    @property
    def log(self) -> Path:
        """What task 0 prints."""
        return self.path / f"{self.job_id}_0_log.out"

    @property
    def error(self) -> str | None:
        """The line a process or a node left about what went wrong."""
        file = self.path / "error.txt"
        return " ".join(file.read_text(encoding="utf-8", errors="replace").split()) if file.exists() else None

    def attempts(self) -> list[dict[str, Any]]:
        """Its attempt files, oldest first."""
        return [read_json(path) for path in sorted(self.path.glob("attempt-*.json"))]

    def write(self) -> JobRecord:
        """Writes job.json and returns the record."""
        value = asdict(self)
        del value["path"]
        write_json(self.path / "job.json", value)
        return self

    def now(self, state: str, reason: str = "", ended: bool = False) -> JobRecord:
        """The record with a new state, written where there is room: a full disk must not hide how the job ended."""
        record = replace(self, state=state, reason=reason, ended_at=time.time() if ended else None)
        try:
            record.write()
        except OSError as error:
            print(f"warning: {self.path / 'job.json'}: {error.strerror}", flush=True)
        return record


class Jobs:
    """The submissions of the run in `train`."""

    def __init__(self, train: Path) -> None:
        self.path = Path(train) / "jobs"
        run = re.sub(r"[^A-Za-z0-9_-]", "", self.path.resolve().parent.parent.name)[:24]
        where = hashlib.sha256(str(self.path.resolve()).encode()).hexdigest()[:12]
        self.name = f"cellmill-{run}-{where}"
        """Of its jobs in the queue, followed by a dot and the folder's number: the same for one folder only."""

    def all(self) -> list[JobRecord]:
        """Recorded submissions, oldest first. Raises DataError naming a record that cannot be read."""
        return [_read(path) for path in self._folders() if (path / "job.json").exists()]

    def newest(self) -> JobRecord | None:
        """The last recorded submission of this folder; a copy of another has records that are not its own."""
        records = [record for record in self.all() if record.name.startswith(f"{self.name}.")]
        return records[-1] if records else None

    def unrecorded(self, name: str) -> Path | None:
        """The folder of the submission called `name` when it was cut off before it was recorded."""
        number = name.removeprefix(f"{self.name}.")
        path = self.path / number
        return path if number.isdigit() and path.is_dir() and not (path / "job.json").exists() else None

    def new(self) -> tuple[Path, str]:
        """An empty folder for the next submission, for this user alone, and the job's name."""
        folders = self._folders()
        number = f"{1 + int(folders[-1].name) if folders else 1:03}"
        path = self.path / number
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
        return path, f"{self.name}.{number}"

    def drop_unrecorded(self) -> None:
        """Removes folders of submissions that were cut off; only when SLURM has no job of this run."""
        for path in self._folders():
            if not (path / "job.json").exists():
                self.drop(path)

    def drop(self, path: Path) -> None:
        """Removes the folder of a submission that was refused."""
        shutil.rmtree(path, ignore_errors=True)

    def _folders(self) -> list[Path]:
        return sorted((path for path in self.path.glob("*") if path.name.isdigit()), key=lambda path: int(path.name))


def _read(folder: Path) -> JobRecord:
    file = folder / "job.json"
    try:
        return JobRecord(path=folder, **read_json(file))
    except (DataError, TypeError):
        raise DataError(
            f"{file}: is not a job's record; remove the file: a job that still lives is then found by its name"
        ) from None
