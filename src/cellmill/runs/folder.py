"""The folder of a training run: which checkpoints are whole, whose they are, and what a resume may build on.

    status.json     written once, when the last step is done: what the workflow waits for
    state.json      running, stopped or done, at which step: rewritten as training goes
    run.json        the resolved options, digests and environment of the newest start
    metrics.jsonl   the curve
    checkpoints/step-00000100/    DCP files, state.json, and manifest.json with every file's size and SHA-256
    jobs/           submissions to a cluster, see launch/jobs.py
    superseded-…/   what an earlier configuration left; never deleted here

A checkpoint is written as `….incomplete`, its manifest last, and then renamed. Torch-free, so that a launcher can
refuse a run before it asks for a GPU.
"""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from cellmill.errors import DataError
from cellmill.files import fsync_folder, read_json, sha256_file, write_json

INCOMPLETE = ".incomplete"
DAMAGED = ".damaged"
SMALL = ("state.json", ".metadata")  # hashed even where hashing tensors would take too long


@dataclass(frozen=True)
class Checkpoint:
    """One whole checkpoint on disk."""

    path: Path
    step: int

    def state(self) -> dict[str, Any]:
        """What was saved beside the tensors: progress, identity, fingerprint."""
        return read_json(self.path / "state.json")

    def best_step(self) -> int | None:
        """The step that was best when it was saved; None if none was judged, or if it cannot be read."""
        try:
            best: int | None = self.state()["progress"]["best_step"]
            return best
        except (DataError, KeyError, TypeError):
            return None

    def verify(self, contents: bool = True) -> None:
        """Raises DataError naming the first file that is missing, cut or changed; `contents` hashes the tensors too."""
        manifest = read_json(self.path / "manifest.json")
        if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
            raise DataError(f"{self.path / 'manifest.json'}: is not a checkpoint's manifest; the checkpoint is damaged")
        for name, expected in manifest["files"].items():
            file = self.path / name
            if not file.is_file():
                raise DataError(f"{file}: is missing; the checkpoint is damaged")
            if file.stat().st_size != expected["bytes"]:
                raise DataError(
                    f"{file}: has {file.stat().st_size} bytes, {expected['bytes']} were written; "
                    "the checkpoint is damaged"
                )
            if (contents or name in SMALL) and sha256_file(file) != expected["sha256"]:
                raise DataError(f"{file}: its bytes changed since it was written (SHA-256); the checkpoint is damaged")


class TrainFolder:
    """The files of one training run under `path`."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoint_folder = self.path / "checkpoints"

    def state(self) -> str:
        """running, stopped or done, by state.json; nothing when it never began, or when that file is damaged."""
        try:
            return str(read_json(self.path / "state.json")["state"])
        except (DataError, KeyError, TypeError):
            return ""

    def saved_step(self) -> int:
        """Step of the newest complete checkpoint; 0 without one."""
        return max((checkpoint.step for checkpoint in self.checkpoints()), default=0)

    def checkpoints(self) -> list[Checkpoint]:
        """Complete checkpoints, oldest first."""
        found = self.checkpoint_folder.glob("step-*/manifest.json")
        whole = [path.parent for path in found if re.fullmatch(r"step-\d{8,}", path.parent.name)]
        return sorted((Checkpoint(path, int(path.name.removeprefix("step-"))) for path in whole), key=lambda c: c.step)

    def set_damaged_aside(self, step: int) -> None:
        """Renames checkpoints later than `step`, which a resume from there found damaged: they must not be counted."""
        for checkpoint in self.checkpoints():
            if checkpoint.step > step:
                aside = checkpoint.path.with_name(checkpoint.path.name + DAMAGED)
                shutil.rmtree(aside, ignore_errors=True)
                checkpoint.path.rename(aside)

    def newest_whole(self, contents: bool = True) -> tuple[Checkpoint | None, list[str]]:
        """The newest undamaged checkpoint, and a line for each newer one that is damaged.

        None when there is no checkpoint at all. Raises DataError when there are some and all are damaged: training
        never begins again at step 0 on its own.
        """
        damaged: list[str] = []
        for checkpoint in reversed(self.checkpoints()):
            try:
                checkpoint.verify(contents)
                return checkpoint, damaged
            except DataError as error:
                damaged.append(str(error))
        if damaged:
            raise DataError(
                f"{self.checkpoint_folder}: no checkpoint is whole ({damaged[0]}); "
                f"restore one, or move the folder away to begin again at step 0"
            )
        return None, []

    def best(self) -> Checkpoint:
        """The checkpoint with the lowest validation loss as the newest one knows it; the newest if none was judged."""
        newest, _ = self.newest_whole()
        if newest is None:
            raise DataError(f"{self.checkpoint_folder}: no checkpoint; train the run first")
        best_step = newest.state()["progress"]["best_step"]
        if best_step is None or best_step == newest.step:
            return newest
        for checkpoint in self.checkpoints():
            if checkpoint.step == best_step:
                checkpoint.verify()
                return checkpoint
        raise DataError(
            f"{self.checkpoint_folder}: the best checkpoint, step {best_step}, is gone; "
            "set consolidate.checkpoint: last"
        )

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of `step` to."""
        path = self.checkpoint_folder / f"step-{step:08}{INCOMPLETE}"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def finish(self, path: Path, keep: int) -> None:
        """Makes the checkpoint in `path` (from `begin`) final, then removes those that are no longer wanted."""
        files = {file.name: file for file in sorted(path.iterdir()) if file.name != "manifest.json"}
        entries = {name: {"bytes": file.stat().st_size, "sha256": sha256_file(file)} for name, file in files.items()}
        write_json(path / "manifest.json", {"files": entries})  # last: its existence means the rest is complete
        final = path.with_name(path.name.removesuffix(INCOMPLETE))
        shutil.rmtree(final, ignore_errors=True)  # a damaged one of the same step, written again after a resume
        path.rename(final)
        fsync_folder(final.parent)
        self._prune(keep)

    def _prune(self, keep: int) -> None:
        whole = self.checkpoints()
        kept = whole[-keep:]
        wanted: set[int | None] = {checkpoint.step for checkpoint in kept}
        # a kept checkpoint may be resumed from, and then its best is the run's best
        wanted |= {checkpoint.best_step() for checkpoint in kept}
        for checkpoint in whole:
            if checkpoint.step not in wanted:
                shutil.rmtree(checkpoint.path)

    def set_aside(self) -> Path:
        """Moves checkpoints, curve and status into a new `superseded-…` folder beside them, and returns it."""
        number = 1 + sum(1 for _ in self.path.glob("superseded-*"))
        aside = self.path / f"superseded-{number:03}"
        aside.mkdir()
        for name in ("status.json", "state.json", "run.json", "metrics.jsonl", "checkpoints"):
            if (self.path / name).exists():
                (self.path / name).rename(aside / name)
        return aside

    @contextmanager
    def locked(self, wait_s: float = 60.0, follows: bool = False) -> Iterator[int]:
        """The folder for this process alone; gives the lock's file descriptor, which children may inherit to hold it.

        Raises DataError naming the holder when it is not free within `wait_s` seconds.

        Parameters
        ----------
        follows
            This process only follows a training that runs elsewhere: another of that kind on this host, left over
            from a workflow that was killed, is asked to let go.
        """
        self._make()
        with open(self.path / "lock", "a+", encoding="utf-8") as file:
            give_up, asked = time.monotonic() + wait_s, False
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    holder = Holder.read(file)
                    if follows and holder.follows and not asked and holder.holds(self.path / "lock"):
                        os.kill(holder.pid, signal.SIGUSR1)
                        asked = True
                    if time.monotonic() > give_up:
                        raise DataError(
                            f"{self.path}: another training is running here ({holder.text}); "
                            "stop it first, or give this run another name"
                        ) from None
                    time.sleep(0.2)
            Holder.of_this_process(follows).write(file)
            yield file.fileno()

    def _make(self) -> None:
        """The folder, for this user alone: a resume reads what lies here. Raises DataError naming its owner."""
        self.path.mkdir(parents=True, exist_ok=True)
        owner = self.path.stat().st_uid
        if owner != os.getuid():
            raise DataError(
                f"{self.path}: this run belongs to {_user(owner)}; give yours another name, or use a checkout of "
                "your own"
            )
        self.path.chmod(0o700)


@dataclass(frozen=True)
class Holder:
    """Who holds the lock, as the lock file says."""

    pid: int = 0
    host: str = ""
    user: str = ""
    follows: bool = False

    @classmethod
    def of_this_process(cls, follows: bool) -> Holder:
        return cls(os.getpid(), os.uname().nodename, _user(os.getuid()), follows)

    @classmethod
    def read(cls, file: TextIO) -> Holder:
        file.seek(0)
        try:
            return cls(**json.loads(file.read()))
        except (ValueError, TypeError):  # of an earlier version, or just being written
            return cls()

    def write(self, file: TextIO) -> None:
        file.seek(0)
        file.truncate()
        json.dump(asdict(self), file)
        file.flush()

    @property
    def text(self) -> str:
        """Process, user and host, for a message."""
        return f"process {self.pid} of {self.user} on {self.host}" if self.pid else "by an unknown process"

    def holds(self, lock: Path) -> bool:
        """Whether that process is of this host and has the lock file open: a number alone may be another's by now."""
        if self.host != os.uname().nodename:
            return False
        try:
            return any(link.resolve() == lock.resolve() for link in Path(f"/proc/{self.pid}/fd").iterdir())
        except OSError:
            return False


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"
