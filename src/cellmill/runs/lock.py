"""The lock of a folder: flock(2) on `FOLDER/lock`, whose text names the holder.

The lock is released when the last process that inherited its file descriptor ends, however it ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from cellmill.errors import DataError


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock, as written in the lock file."""

    pid: int = 0
    host: str = ""
    user: str = ""
    follows: bool = False
    """It only follows a training that runs elsewhere."""

    @classmethod
    def read(cls, file: TextIO) -> Holder:
        """The holder written in an open lock file; an empty one if it cannot be read."""
        file.seek(0)
        try:
            return cls(**json.loads(file.read()))
        except (ValueError, TypeError):  # written by an earlier version, or half written
            return cls()

    @property
    def text(self) -> str:
        """Process, user and host, for messages."""
        return f"process {self.pid} of {self.user} on {self.host}" if self.pid else "an unknown process"

    def holds(self, lock: Path) -> bool:
        """True if the process is on this host and has the lock file open; its pid alone may have been reused."""
        if self.host != os.uname().nodename:
            return False
        try:
            return any(link.resolve() == lock.resolve() for link in Path(f"/proc/{self.pid}/fd").iterdir())
        except OSError:
            return False

    def hands_over(self) -> bool:
        """True if the process, of this host, has a handler of SIGUSR1, which would end it while it starts."""
        try:
            caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{self.pid}/status").read_text(), re.MULTILINE)
        except OSError:
            return False
        return caught is not None and bool(int(caught[1], 16) >> (signal.SIGUSR1 - 1) & 1)


@contextmanager
def locked(folder: Path, busy: str, wait_s: float = 60.0, follows: bool = False) -> Iterator[int]:
    """Hold the lock of `folder`. Yields its file descriptor: a child that inherits it holds the lock as well.

    Raises DataError if the lock is not free within `wait_s` seconds.

    Parameters
    ----------
    busy
        Text of that error; `{holder}` is filled in.
    follows
        This process only follows a training that runs elsewhere. A holder of the same kind on this host, left over
        from a workflow that was killed, is asked (SIGUSR1) to hand over.
    """
    with open(folder / "lock", "a+", encoding="utf-8") as file:
        deadline, asked = time.monotonic() + wait_s, False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = Holder.read(file)
            except OSError as error:
                raise DataError(
                    f"{folder}: this file system has no locks ({error.strerror}); use one where flock works, such as "
                    "Lustre mounted with -o flock"
                ) from None
            if follows and holder.follows and not asked and holder.holds(folder / "lock") and holder.hands_over():
                os.kill(holder.pid, signal.SIGUSR1)
                asked = True
            if time.monotonic() > deadline:
                raise DataError(f"{folder}: {busy.format(holder=holder.text)}")
            time.sleep(0.2)
        file.seek(0)
        file.truncate()
        json.dump(asdict(Holder(os.getpid(), os.uname().nodename, user_name(os.getuid()), follows)), file)
        file.flush()
        yield file.fileno()


def holder_of(folder: Path) -> Holder | None:
    """The process that holds the lock of `folder`; None if it is free. Changes no file."""
    try:
        file = open(folder / "lock", encoding="utf-8")  # noqa: SIM115 - closed by the with below
    except FileNotFoundError:
        return None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released when the file is closed, at once
        except BlockingIOError:
            return Holder.read(file)
        except OSError:  # a file system without locks: nobody can hold one
            return None
        return None


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
