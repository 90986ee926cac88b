"""Copies of shards on a node's own disk. They are made while a training runs.

One process per node makes the copies; this module is its program. It reads a `CopyTask` from stdin, as one
line of JSON, and copies the shards. Then it waits for the end of stdin, and removes the copies. The end of
stdin comes however the training process that started it ends.

A copy is first written under a temporary name. It is read back from the disk and compared with the manifest's
SHA-256. Only then it gets the name of its shard.

The first failure prints one warning and ends the copying. Complete copies stay in use, and the other shards
are read from the shared folder.
"""

import fcntl
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Lock, Thread

from cellmill.errors import UserError
from cellmill.files import named_errors, sha256_file
from cellmill.launch.signals import STOP_SIGNALS

PREFIX = "cellmill-shards-"  # names of folders of copies begin with it
LOCK = "lock"  # a file in each folder of copies, locked as long as the process that made the folder lives
_CHUNK_BYTES = 8 << 20  # a shard is copied in pieces of this size
_FREE_FRAC = 0.05  # this fraction of the disk is left free, because other programs write to it too


def warn(line: str) -> None:
    """Print a warning with the name of this node to stderr."""
    print(f"warning: {os.uname().nodename}: {line}", file=sys.stderr)


class LocalCopies:
    """Complete copies of shards in `folder`, under the names of the shards. Thread-safe.

    A copy appears under the name of its shard when it is complete and verified. After a copy could not be
    read, no copy is used any more.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._copy_by_name: dict[str, Path] = {}  # copies that were found, by name of the shard
        self._given_up = False
        self._lock = Lock()

    def find(self, shard: Path) -> Path | None:
        """Return the path of the copy of a shard, or None if there is no copy to use."""
        if self._given_up:
            return None
        copy = self._copy_by_name.get(shard.name)
        if copy is None:
            path = f"{self.folder}/{shard.name}"
            if os.path.exists(path):
                copy = Path(path)
                self._copy_by_name[shard.name] = copy
        return copy

    def give_up(self, error: Exception, shard: Path) -> None:
        """Stop using copies, because reading the copy of `shard` raised `error`. Warns only once."""
        with self._lock:
            if not self._given_up:
                warn(
                    f"{self.folder}: a copy cannot be read ({error}); shards are read from {shard.parent}"
                )
            self._given_up = True

    def remove(self) -> None:
        """Remove the folder with all copies. Files that cannot be removed are left."""
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True)
class CopyTask:
    """The copies that a process is to make."""

    folder: str  # a folder for the copies, which does not exist yet. Its parent may be missing too
    shards: dict[str, str]  # SHA-256 of each shard by its path, in the order of copying
    limit_bytes: float | None  # all copies together have at most this size; None: no limit


class _TrainingEnded(Exception):
    """The training ended while a shard was being copied."""


def main() -> None:
    """Copy shards, wait until the training ends, and remove the copies."""
    # SLURM sends these signals to all processes of a job. The training still reads copies while it saves
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)
    task = CopyTask(**json.loads(sys.stdin.buffer.readline()))
    ended = Event()  # set when the training has ended

    def wait_for_end() -> None:
        with suppress(OSError):
            sys.stdin.buffer.read()
        ended.set()

    Thread(target=wait_for_end, daemon=True).start()
    folder = Path(task.folder)
    lock = None  # descriptor of the lock file; None: the folder was not made, so there is nothing to remove
    with suppress(OSError):
        remove_abandoned(folder.parent)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
        lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        with named_errors(folder / LOCK):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _copy_all(task, folder, ended)
    except _TrainingEnded:
        pass
    except (OSError, UserError) as error:
        reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        warn(
            f"stream.stage_to stopped copying: {reason}; shards without a copy are read from the shared folder"
        )
    ended.wait()
    if lock is not None:
        LocalCopies(folder).remove()


def remove_abandoned(parent: Path) -> None:
    """Remove the folders of copies in `parent` whose processes ended without removing them.

    A process cannot remove its folder if its node is lost.
    """
    for lock in parent.glob(f"{PREFIX}*/{LOCK}"):
        # an OSError means that the folder belongs to another user, or that its process still lives
        with suppress(OSError), open(lock, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            LocalCopies(lock.parent).remove()


def _copy_all(task: CopyTask, folder: Path, ended: Event) -> None:
    """Copy shards in order. Stops at a shard that does not fit into the limit or on the disk."""
    started = time.monotonic()
    n_copied = 0
    n_bytes = 0
    reason = ""  # why the copying stopped before the last shard
    for name, sha256 in task.shards.items():
        shard = Path(name)
        size = shard.stat().st_size
        if task.limit_bytes is not None and n_bytes + size > task.limit_bytes:
            reason = ", as many as stream.stage_limit_gb allows"
            break
        disk = shutil.disk_usage(folder)
        if disk.free - size < _FREE_FRAC * disk.total:
            warn(
                f"stream.stage_to: {folder.parent} has {disk.free / 1e9:.1f} GB free of {disk.total / 1e9:.1f}: room "
                f"for {n_copied} of {len(task.shards)} shards; the others are read from the shared folder"
            )
            return
        _copy(shard, folder / shard.name, sha256, ended)
        n_copied += 1
        n_bytes += size
    print(
        f"{os.uname().nodename}: copied {n_copied} of {len(task.shards)} shards, {n_bytes / 1e9:.2f} GB, to "
        f"{folder.parent} in {time.monotonic() - started:.0f} s{reason}",
        flush=True,
    )


def _copy(shard: Path, copy: Path, sha256: str, ended: Event) -> None:
    """Copy a shard.

    Raises UserError if the SHA-256 of the copy is not `sha256`, which the manifest has. Raises
    `_TrainingEnded` if `ended` is set.
    """
    temporary = copy.with_name(f".{copy.name}.incomplete")
    try:
        with named_errors(copy), open(temporary, "xb", buffering=0) as target:
            for chunk in _read_chunks(shard):
                remaining = memoryview(chunk)
                # a write may store only a part of the bytes, such as just before a disk is full
                while remaining:
                    remaining = remaining[target.write(remaining) :]
                if ended.is_set():
                    raise _TrainingEnded
            os.fsync(target)
            # drop the bytes from memory, so that the digest is computed from the bytes on disk
            os.posix_fadvise(target.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        actual = sha256_file(temporary)
        if actual != sha256:
            raise UserError(
                f"{copy}: expected sha256 {sha256[:12]} as in the manifest, got {actual[:12]}"
            )
        temporary.rename(copy)
    finally:
        temporary.unlink(missing_ok=True)


def _read_chunks(shard: Path) -> Iterator[bytes]:
    """Yield the bytes of a shard in pieces. An OSError has the path of the shard."""
    with named_errors(shard), open(shard, "rb", buffering=0) as source:
        yield from iter(partial(source.read, _CHUNK_BYTES), b"")


if __name__ == "__main__":
    main()
