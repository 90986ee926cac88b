"""Copies of shards on a node's own disk, which `data/copy_shards.py` makes while a training runs."""

import os
import shutil
import sys
from pathlib import Path
from threading import Lock

PREFIX = "cellmill-shards-"
LOCK = "lock"
"""File of a folder of copies, locked while the process that owns the folder lives."""


def warn(line: str) -> None:
    """Print a warning that ends no training."""
    print(f"warning: {os.uname().nodename}: {line}", file=sys.stderr, flush=True)


class LocalCopies:
    """Complete copies in `folder`, by the name of the shard. Thread-safe.

    A copy appears under its name when it is complete and verified. After the first that cannot be read no copy is
    used any more.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._complete: dict[str, Path] = {}
        self._given_up = False
        self._lock = Lock()

    def of(self, shard: Path) -> Path | None:
        """Path of the copy of a shard; None as long as there is none."""
        if self._given_up:
            return None
        copy = self._complete.get(shard.name)
        if copy is None and os.path.exists(path := f"{self.folder}/{shard.name}"):
            copy = self._complete[shard.name] = Path(path)
        return copy

    def give_up(self, error: Exception, shard: Path) -> None:
        """Use no copy any more, and warn once."""
        with self._lock:
            if not self._given_up:
                warn(f"{self.folder}: a copy cannot be read ({error}); shards are read from {shard.parent}")
            self._given_up = True

    def remove(self) -> None:
        """Remove the folder with all copies, as far as that is possible."""
        shutil.rmtree(self.folder, ignore_errors=True)
