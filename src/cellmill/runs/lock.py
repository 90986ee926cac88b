"""One training per folder: its lock, the claim of a running job, and a watch for its deletion.

The lock is flock(2) on `FOLDER/lock`, whose text names the holder. It is released when the last
process that inherited its file descriptor ends, for any reason. On a file system without flock a
claim in `FOLDER/lease`, as below, takes its place while the process lives. A process that lost it, as
its host was frozen or cut off, learns this from its `FolderWatch`.

The claim of a running job makes sure that two jobs never work in one folder:

    FOLDER/claims/00000007.json     the job that claimed it; its modification time is the job's last sign of life

The claim with the highest number counts, and none is ever removed: a job that looked for the newest
long ago could take a number that others have passed. It is created with O_EXCL, which is atomic on
NFS and Lustre too, where flock may be missing or local to a node. Its job renews it every `RENEW_S`
and marks it as released when it ends. A job that finds another's claim waits until it is renewed,
which proves that the other job lives, or until it was silent for `LEASE_S`, and then creates the
next one. A job that was itself silent for so long finds the next claim when it wakes up, and ends.
Ages are differences of times of the file server, so clocks of nodes do not matter.

A deleted folder is noticed by its lock file, which lives as long as the folder. A file system that
is away for a while does not count as a deletion: the nearest existing folder above must be on the
same file system.
"""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import re
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import TextIO

from cellmill.errors import DataError
from cellmill.files import read_json, write_json

RENEW_S = 10.0
LEASE_S = 60.0
TICK_S = 1.0
UNREADABLE = Path()  # the newest claim, if the file system gives an error
LEASE = "lease"  # folder for claims to a lock on a file system without flock
SURE_S = 5.0  # how long the folder has to be gone


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock, as written in the lock file."""

    pid: int = 0
    host: str = ""
    user: str = ""
    follows: bool = False  # it only follows a training that runs elsewhere

    @classmethod
    def read(cls, file: TextIO) -> Holder:
        """The holder written in an open lock file; an empty one if it cannot be read."""
        file.seek(0)
        with suppress(ValueError, TypeError):  # half written
            return cls(**json.loads(file.read()))
        return cls()

    @property
    def text(self) -> str:
        """Process, user and host, for messages."""
        if not self.pid:
            return "an unknown process"
        text = f"process {self.pid} of {self.user} on {self.host}"
        if self._status("State") == "T":
            text += f", which is stopped: `kill -CONT {self.pid}` continues it"
        return text

    @property
    def is_on_this_host(self) -> bool:
        return self.host == os.uname().nodename

    def _status(self, key: str) -> str:
        """First word of a field that the kernel of this host has on the process; empty if unknown."""
        with suppress(OSError):
            if self.is_on_this_host:
                text = Path(f"/proc/{self.pid}/status").read_text()
                return "".join(re.findall(rf"^{key}:\s*(\w+)", text, re.MULTILINE))
        return ""

    def holds(self, lock: Path) -> bool:
        """True if the process is on this host and has the lock file open: its pid may be reused."""
        with suppress(OSError):
            if self.is_on_this_host:
                links = Path(f"/proc/{self.pid}/fd").iterdir()
                return any(link.resolve() == lock.resolve() for link in links)
        return False

    def keeps(self, lock: Path) -> bool:
        """True of another process that holds the lock, even if it is stopped and renews no claim."""
        return self.pid != os.getpid() and self.holds(lock)

    def hands_over(self, lock: Path) -> bool:
        """True if the process holds the lock and can hand it over at SIGUSR1.

        The signal ends a process without a handler, and waits in a stopped process, though nobody
        may want the lock when it continues.
        """
        is_stopped = self._status("State") == "T"
        return self.handles(signal.SIGUSR1) and not is_stopped and self.holds(lock)

    def handles(self, number: int) -> bool:
        """True if the process is on this host and has a handler of the signal."""
        return bool(int(self._status("SigCgt") or "0", 16) >> (number - 1) & 1)


@contextmanager
def locked(folder: Path, busy: str, wait_s: float = 60.0, follows: bool = False) -> Iterator[int]:
    """Hold the lock of `folder`.

    Yields its file descriptor: a child that inherits it holds the lock as well.

    Raise DataError with the text `busy`, in which `{holder}` is filled in, if it is not free
    within `wait_s`. With `follows` this process only follows a training that runs elsewhere: a
    holder of the same kind on this host, left over from a workflow that was killed, is made to hand
    over (SIGUSR1).
    """
    with open(folder / "lock", "a+", encoding="utf-8") as file:
        started = time.monotonic()
        signalled = False
        printed = False
        while True:
            try:
                lease = _take(file, folder)
                break
            except (BlockingIOError, Claimed):
                holder = Holder.read(file)
            if follows and holder.follows and not signalled and holder.hands_over(folder / "lock"):
                os.kill(holder.pid, signal.SIGUSR1)
                signalled = True
            waited = time.monotonic() - started
            if waited > wait_s:
                raise DataError(f"{folder}: {busy.format(holder=holder.text)}")
            if waited > wait_s / 20 and not printed:
                print(
                    f"{folder}: locked by {holder.text}; waiting up to {wait_s:g} s for it",
                    flush=True,
                )
                printed = True
            time.sleep(0.2)
        file.seek(0)
        file.truncate()
        user = user_name(os.getuid())
        json.dump(asdict(Holder(os.getpid(), os.uname().nodename, user, follows)), file)
        file.flush()
        with nullcontext() if lease is None else _renewing(lease):
            yield file.fileno()


def _take(file: TextIO, folder: Path) -> Claim | None:
    """Take a lock by flock or, if the file system has none, by a claim, which is returned.

    Raise BlockingIOError or Claimed if it is held.
    """
    holder = Holder.read(file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if holder.keeps(folder / "lock"):
            raise BlockingIOError from None
        lease = claim(folder / LEASE, str(os.getpid()))
        print(
            f"{folder}: this file system has no locks ({error.strerror}): a file in {LEASE}/claims, renewed every "
            f"{RENEW_S:g} s, takes their place",
            flush=True,
        )
        return lease
    return None


@contextmanager
def _renewing(lease: Claim) -> Iterator[None]:
    """Renew a lease in a thread until the block ends; then release it."""
    ended = Event()

    def renew() -> None:
        with suppress(Claimed):  # FolderWatch says so
            while not ended.wait(TICK_S):
                lease.renew()

    Thread(target=renew, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        lease.release()


def find_holder(folder: Path) -> Holder | None:
    """The process that holds the lock of `folder`; None if it is free. Changes no file.

    Raise DataError naming the owner of a folder that this user may not enter.
    """
    try:
        with suppress(FileNotFoundError), open(folder / "lock", encoding="utf-8") as file:
            try:
                # released when the file is closed, at once
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return Holder.read(file)
            except OSError:  # a file system without locks
                holder = Holder.read(file)
                if claimant(folder / LEASE) or holder.keeps(folder / "lock"):
                    return holder
    except PermissionError:
        owner = user_name(folder.stat().st_uid)
        raise DataError(f"{folder}: this run belongs to {owner}, who alone may read it") from None
    return None


def user_name(uid: int) -> str:
    with suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return f"user {uid}"


class Claimed(Exception):
    """Another job has the folder."""


@dataclass
class Claim:
    """This job's claim on a folder."""

    file: Path
    job: str
    renewed: float = field(default_factory=time.monotonic)

    def renew(self) -> None:
        """Say that this job lives, if it is time to.

        Raise Claimed if another job has taken the folder over.
        """
        now = time.monotonic()
        if now - self.renewed < RENEW_S:
            return
        with suppress(OSError):  # a full disk or a server in trouble: the next one may succeed
            newest = _newest(self.file.parent)
            if newest is not None and newest != self.file:
                other = _read(newest)[0] or "of another launcher"
                raise Claimed(
                    f"job {other} has taken over from job {self.job}, which was silent for too long"
                )
            os.utime(self.file)
            self.renewed = now

    def release(self) -> None:
        """Let the next job have the folder at once."""
        with suppress(OSError):
            self.file.parent.stat()  # a deleted run is not made again
            write_json(self.file, {"job": self.job, "released": True})


def claim(folder: Path, job: str, wait: Callable[[float], None] = time.sleep) -> Claim:
    """Claim `folder` for the job `job`.

    Waits for at most `LEASE_S` after the last sign of life of another job. Raise Claimed if
    another job lives there.
    """
    claims = folder / "claims"
    claims.mkdir(mode=0o700, parents=True, exist_ok=True)
    while True:
        number = 1
        newest = _newest(claims)
        if newest is not None:
            _wait_until_silent(newest, job, wait)
            number += int(newest.stem)
        file = claims / f"{number:08}.json"
        try:
            with open(file, "x", encoding="utf-8") as text:
                json.dump({"job": job, "released": False}, text)
        except FileExistsError:  # another job was faster
            continue
        return Claim(file, job)


def claimant(folder: Path, after_ns: int = 0) -> str:
    """The job that claimed `folder` last and still renews its claim; otherwise empty.

    The claim must be renewed after `after_ns`, a modification time of the same file system.
    """
    newest = _newest(folder / "claims")
    sign = None if newest is None else _last_sign(newest)
    if newest is None or sign is None:
        return ""
    modified_ns, silent_s = sign
    job, is_released = _read(newest)
    if is_released or silent_s >= LEASE_S or modified_ns <= after_ns:
        return ""
    return job


def _wait_until_silent(newest: Path, job: str, wait: Callable[[float], None]) -> None:
    """Return once the claim is released or silent for `LEASE_S`. Raise Claimed if it is renewed."""
    first_ns: int | None = None
    while True:
        sign = _last_sign(newest)
        if sign is None:  # removed, since there is a newer one
            return
        modified_ns, silent_s = sign
        other, is_released = _read(newest)
        if not other and silent_s < LEASE_S:  # a claim of this moment: its job is not written yet
            wait(TICK_S)
            continue
        first_ns = first_ns or modified_ns
        if is_released or (modified_ns == first_ns and silent_s >= LEASE_S):
            return
        if modified_ns != first_ns:
            train = newest.parent.parent
            if other == job:  # SLURM lost the node of its first start and requeued it
                raise Claimed(
                    f"an earlier start of job {job} is training in {train}; this start ends"
                )
            raise Claimed(f"job {other} is training in {train}; job {job} ends")
        wait(TICK_S)


def _newest(claims: Path) -> Path | None:
    return max(claims.glob("[0-9]*.json"), key=lambda file: int(file.stem), default=None)


def _read(file: Path) -> tuple[str, bool]:
    """The job of a claim, empty while it is being written, and if it has released the claim."""
    with suppress(DataError, KeyError, TypeError):
        claim = read_json(file)
        return str(claim["job"]), bool(claim["released"])
    return "", False


def _last_sign(file: Path) -> tuple[int, float] | None:
    """Modification time of a claim in ns, and its age in s by the clock of the file server.

    None if it is gone.
    """
    probe = file.with_name(f".now.{secrets.token_hex(4)}")
    try:
        with open(file, encoding="utf-8") as opened:  # a network file system then asks the server
            modified = os.fstat(opened.fileno()).st_mtime_ns
        probe.touch(exist_ok=False)
        return modified, (probe.stat().st_mtime_ns - modified) / 1e9
    except FileNotFoundError:
        return None
    finally:
        probe.unlink(missing_ok=True)


class FolderDeleted(DataError):
    """The run's folder is gone, and with it all that a training could save."""


class FolderWatch:
    """Watches a folder whose lock this process holds; nothing without a lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._gone_since = 0.0
        self._inode = _inode(self.folder)
        self._lease = self._newest_lease()
        self._device = _device(self.folder)

    def gone(self) -> bool:
        """True if the folder is not the one that this process has locked."""
        if not self._inode or _inode(self.folder) in (self._inode, 0):
            return False
        return _device(self.folder) == self._device

    def check(self, end: str = "") -> None:
        """Raise FolderDeleted once the folder has been gone for a while.

        `end` says what became of the training. Raise DataError if another process has the lease.
        """
        newest = self._newest_lease()
        if self._lease is UNREADABLE:
            self._lease = newest
        if newest not in (self._lease, None, UNREADABLE):
            raise DataError(
                f"{self.folder}: another process has taken this run over, as this one did not renew its file in "
                f"{LEASE}/claims for {LEASE_S:g} s; this one ends, and the other goes on"
            )
        now = time.monotonic()
        self._gone_since = (self._gone_since or now) if self.gone() else 0.0
        if self._gone_since and now - self._gone_since >= SURE_S:
            raise FolderDeleted(f"{self.folder}: the run's folder was deleted{end}")

    def _newest_lease(self) -> Path | None:
        with suppress(OSError):
            return _newest(self.folder / LEASE / "claims")
        return UNREADABLE

    def wait(self) -> None:
        """Raise FolderDeleted if the folder is gone and stays so."""
        while self.gone():
            self.check()
            time.sleep(0.2)


def _inode(folder: Path) -> int | None:
    """Inode of the lock; None without one, and 0 if it cannot be read."""
    try:
        return os.stat(folder / "lock").st_ino
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return 0


def _device(path: Path) -> int | None:
    """Device of `path`, or of the nearest folder above that exists; None if it cannot be read."""
    with suppress(OSError):
        while not path.exists():
            path = path.parent
        return path.stat().st_dev
    return None
