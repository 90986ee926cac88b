"""Descriptors of files that are read by offset, a bounded number of them."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from cellmill.data.local_copies import LocalCopies

MOST_OPEN = 256
"""Files open at once: a quarter of the usual limit of a process. A window of a lane reads from 128 at most."""


@dataclass
class _Open:
    descriptor: int
    users: int = 0
    gone: bool = False  # to be closed by its last user


class OpenFiles:
    """Descriptors of the files used last; others are closed, and opened again when they are needed. Thread-safe.

    More than `most` are open only while as many threads read. `copies` are those that may be read instead.
    """

    def __init__(self, most: int = MOST_OPEN, copies: LocalCopies | None = None):
        self._most, self.copies = most, copies
        self._open: OrderedDict[Path, _Open] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def reading(self, path: Path) -> Iterator[int]:
        """Descriptor of `path`, which stays open until the block ends. Raises OSError when it cannot be opened."""
        with self._lock:
            file = self._open.get(path)
            if file is not None:
                file.users += 1
                self._open.move_to_end(path)
        if file is None:
            file = self._opened(path)
        try:
            yield file.descriptor
        finally:
            with self._lock:
                file.users -= 1
                if file.gone and not file.users:
                    os.close(file.descriptor)

    def _opened(self, path: Path) -> _Open:
        # without the lock: it may take long on a shared file system; a FIFO would wait without end
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with self._lock:
            other = self._open.get(path)
            if other is not None:  # of a thread that was quicker
                os.close(descriptor)
                other.users += 1
                return other
            file = self._open[path] = _Open(descriptor, users=1)
            idle = [name for name, known in self._open.items() if not known.users]
            for name in idle[: max(len(self._open) - self._most, 0)]:
                self._drop(name)
            return file

    def close(self, path: Path) -> None:
        """Close one file, when nothing reads it any more."""
        with self._lock:
            if path in self._open:
                self._drop(path)

    def _drop(self, path: Path) -> None:
        file = self._open.pop(path)
        if file.users:
            file.gone = True
        else:
            os.close(file.descriptor)

    def __del__(self) -> None:
        for file in self._open.values():
            os.close(file.descriptor)
