"""Copies of shards on a node's own disk, made while a training runs.

One process per node makes them. It reads a `CopyTask` as one line of JSON from stdin and copies. At
the end of stdin, which comes however the process that started it ends, it removes the copies. A copy
is written under another name, read back from the disk, compared with the manifest's SHA-256, and
renamed. The first failure prints one warning and ends the copying: complete copies stay in use, and
other shards are read from the shared folder.
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

PREFIX = "cellmill-shards-"
LOCK = "lock"  # file in a folder of copies, locked while the process that owns the folder lives
_CHUNK = 8 << 20  # bytes
_FREE_FRAC = 0.05  # fraction of the file system that is left free, since others write to it too


def warn(line: str) -> None:
    """Warn on stderr; training goes on."""
    print(f"warning: {os.uname().nodename}: {line}", file=sys.stderr, flush=True)


class LocalCopies:
    """Complete copies in `folder`, under the names of their shards. Thread-safe.

    A copy appears under its name when it is complete and verified. Once a copy cannot be read, no copy
    is used any more.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._complete: dict[str, Path] = {}
        self._given_up = False
        self._lock = Lock()

    def find(self, shard: Path) -> Path | None:
        """Return the path of the copy of a shard; None as long as there is none."""
        if self._given_up:
            return None
        copy = self._complete.get(shard.name)
        if copy is None:
            path = f"{self.folder}/{shard.name}"
            if os.path.exists(path):
                copy = Path(path)
                self._complete[shard.name] = copy
        return copy

    def give_up(self, error: Exception, shard: Path) -> None:
        """Stop using copies, and warn once."""
        with self._lock:
            if not self._given_up:
                warn(
                    f"{self.folder}: a copy cannot be read ({error}); shards are read from {shard.parent}"
                )
            self._given_up = True

    def remove(self) -> None:
        """Remove the folder with all copies, as far as that is possible."""
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True)
class CopyTask:
    """Copies to make."""

    folder: str  # a new folder for the copies; its parent may be missing
    shards: dict[str, str]  # SHA-256 of each shard by path, in the order of copying
    limit_bytes: float | None  # largest size of all copies together


class _TrainingEnded(Exception):
    """The training ended."""


def main() -> None:
    """Copy, wait for the end of stdin, and remove the copies."""
    # SLURM sends these signals to all processes of a job; the training still reads while it saves
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)
    task = CopyTask(**json.loads(sys.stdin.buffer.readline()))
    ended = Event()

    def wait_for_end() -> None:
        with suppress(OSError):
            sys.stdin.buffer.read()
        ended.set()

    Thread(target=wait_for_end, daemon=True).start()
    folder = Path(task.folder)
    lock = None
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
    """Remove the folders in `parent` of processes that ended without removing them.

    This happens when a node is lost.
    """
    for lock in parent.glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError), open(lock, "rb") as file:  # of another user, or in use
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            LocalCopies(lock.parent).remove()


def _copy_all(task: CopyTask, folder: Path, ended: Event) -> None:
    """Copy shards in order until one does not fit into the limit or on the disk."""
    started = time.monotonic()
    n_copied = 0
    n_bytes = 0
    why = ""
    for name, sha256 in task.shards.items():
        shard = Path(name)
        size = shard.stat().st_size
        if task.limit_bytes is not None and n_bytes + size > task.limit_bytes:
            why = ", as many as stream.stage_limit_gb allows"
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
        f"{folder.parent} in {time.monotonic() - started:.0f} s{why}",
        flush=True,
    )


def _copy(shard: Path, copy: Path, sha256: str, ended: Event) -> None:
    """Copy a shard. Raises UserError if its bytes differ from the manifest's digest."""
    temporary = copy.with_name(f".{copy.name}.incomplete")
    try:
        with named_errors(copy), open(temporary, "xb", buffering=0) as target:
            for chunk in _read_chunks(shard):
                view = memoryview(chunk)
                while view:  # a write may be short, as just before a disk is full
                    view = view[target.write(view) :]
                if ended.is_set():
                    raise _TrainingEnded
            os.fsync(target)
            # drop the bytes from memory, so that the digest is of the bytes on disk
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
    with named_errors(shard), open(shard, "rb", buffering=0) as source:
        yield from iter(partial(source.read, _CHUNK), b"")


if __name__ == "__main__":
    main()
