"""Notices that the folder of a run was deleted while a process works in it.

By its lock file, which lives as long as the folder. A file system that is away for a while is no deletion: the nearest
folder above that is there must be on the same one.
"""

import os
import time
from pathlib import Path

from cellmill.errors import DataError

SURE_S = 5.0
"""How long the folder has to be gone."""


class FolderDeleted(DataError):
    """The run's folder is gone, and with it all that a training could save."""


class FolderWatch:
    """Watches a folder whose lock this process holds; nothing without a lock."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._gone_since = folder.resolve(), 0.0
        self._inode, self._device = _inode(self.folder), _device(self.folder)

    def gone(self) -> bool:
        """True if the folder is not the one that this process has locked."""
        now = _inode(self.folder)
        return bool(self._inode) and now not in (self._inode, 0) and _device(self.folder) == self._device

    def check(self, end: str = "") -> None:
        """Raises FolderDeleted once the folder has been gone for a while. `end` says what became of the training."""
        if not self.gone():
            self._gone_since = 0.0
            return
        self._gone_since = self._gone_since or time.monotonic()
        if time.monotonic() - self._gone_since >= SURE_S:
            raise FolderDeleted(f"{self.folder}: the run's folder was deleted{end}")

    def wait(self) -> None:
        """Raises FolderDeleted if the folder is gone and stays so."""
        while self.gone():
            self.check()
            time.sleep(0.2)


def _inode(folder: Path) -> int | None:
    """Inode of the lock; None without one, and 0 if nobody can tell."""
    try:
        return os.stat(folder / "lock").st_ino
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return 0


def _device(path: Path) -> int | None:
    """File system of `path`, or of the nearest folder above it that exists; None if nobody can tell."""
    try:
        return next(place.stat().st_dev for place in (path, *path.parents) if place.exists())
    except OSError:
        return None
