"""A walk over users' HDF5 files by a child process, before they are opened.

Some damaged files make HDF5 loop for ever, or crash. Such a loop holds the interpreter, so nothing in
the process itself can end it. The child reads what opening reads, attributes, sizes and text, no
counts. The limit is on its CPU time: a slow disk is not taken for a damaged file.
"""

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py

from cellmill.errors import DataError

# errors of flock where a file system has none; 524 is ENOTSUPP of the kernel, as NFS returns it
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EROFS, 524)
LIMIT_S = 8  # CPU time without progress in one file
_RENEWED = 1000  # further objects that are progress; they take 0.1 s
_MAX_TEXTS = 1_000_000  # texts read of one file; the rest would take as long as opening it
_known: set[tuple[str, int, int]] = set()  # files that this process has had walked


def check_walk(paths: Iterable[Path], limit_s: int = LIMIT_S) -> None:
    """Raise DataError for the first of the HDF5 files among `paths` that HDF5 cannot walk.

    A process walks each file once. Whatever else is wrong with a file is left to its reader.
    """
    files = {path: path.stat() for path in paths if is_hdf5(path)}
    keys = {(str(path.absolute()), at.st_size, at.st_mtime_ns): path for path, at in files.items()}
    new = {key: path for key, path in keys.items() if key not in _known}
    if not new:
        return
    command = [sys.executable, "-P", "-m", "cellmill.data.inputs.h5_walk", str(limit_s)]
    names = b"\0".join(os.fsencode(path.absolute()) for path in new.values())
    done = subprocess.run(
        command, input=names, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False
    )
    if done.returncode < 0 and len(done.stdout) < len(new):
        path = [*new.values()][len(done.stdout)]
        if done.returncode == -signal.SIGXCPU:
            fault = f"HDF5 came to no further objects within {limit_s} s of CPU time"
        else:
            fault = f"HDF5 crashes on it ({signal.Signals(-done.returncode).name})"
        raise DataError(
            f"{path}: damaged: {fault}; copy it again, or write it again from its source"
        )
    _known.update(new)


def is_hdf5(path: Path) -> bool:
    """True for a regular file with the signature of HDF5, whole or damaged."""
    try:
        return bool(h5py.is_hdf5(path))
    except OSError:  # no permission
        return False


def _walk(path: bytes, renew_limit: Callable[[], None]) -> None:
    """Read what opening a file reads: attributes, sizes on disk, and text.

    Errors that Python raises are left to the reader. A loop in HDF5 comes to no further objects.
    """
    left = _MAX_TEXTS
    seen = set[int]()

    def visit(item: Any) -> None:
        nonlocal left
        with suppress(Exception):
            for key in item.attrs:
                with suppress(Exception):
                    item.attrs[key]
        if isinstance(item, h5py.Dataset) and item.shape is not None:
            item.id.get_storage_size()
            if (
                item.dtype.kind == "O"
                and len(item.shape) == 1
                and not item.external
                and not item.is_virtual
            ):
                left -= len(item[:left])
        if isinstance(item, h5py.Group):
            for name in item:
                with suppress(Exception):
                    address = h5py.h5o.get_info(item.id, name.encode()).addr
                    if (
                        isinstance(item.get(name, getlink=True), h5py.HardLink)
                        and address not in seen
                    ):
                        seen.add(address)
                        if len(seen) % _RENEWED == 0:
                            renew_limit()
                        visit(item[name])

    with suppress(Exception), open_without_locks(path) as file:
        visit(file)


def open_without_locks(path: Path | bytes) -> h5py.File:
    """Open a file for reading, without a lock if its file system has none.

    Where there are locks HDF5 takes one, as other programs do: it refuses a file that one process
    opens in both ways. Raises OSError.
    """
    try:
        return h5py.File(path, "r")
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return h5py.File(path, "r", locking=False)


def main() -> None:
    """Walk the files named on stdin, and write a dot to stdout for each file that is done.

    The limit is the first argument.
    """
    limit_s = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]

    def renew_limit() -> None:
        ends = int(time.process_time()) + 1 + limit_s
        soft = ends if hard == resource.RLIM_INFINITY else min(ends, hard)
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))

    for name in sys.stdin.buffer.read().split(b"\0"):
        renew_limit()
        _walk(name, renew_limit)
        os.write(1, b".")


if __name__ == "__main__":
    main()
