"""HDF5 files: opening with one-line errors, and writing that survives a full disk."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np

from cellmill.errors import ConfigError, DataError
from cellmill.files import atomic_path, named_errors

ALIGNMENT = 4096  # bytes; for direct I/O and page-aligned preads


def open_h5(path: Path, remedy: str = "") -> h5py.File:
    """Open `path` for reading. Raises DataError, ending in `remedy`, when it is missing, truncated or not HDF5."""
    then = f"; {remedy}" if remedy else ""
    if not path.is_file():
        raise DataError(f"{path}: {'not a file' if path.exists() else 'no such file'}{then}")
    try:
        return h5py.File(path, "r")
    except OSError as error:
        text = one_line(error)
        if "truncated" in text:
            stored = re.search(r"stored_eof = (\d+)", text)
            of = f" of {int(stored[1]):,}" if stored else ""
            then = then or "; copy it again"
            raise DataError(f"{path}: truncated: {path.stat().st_size:,}{of} bytes{then}") from None
        if "signature not found" in text:
            raise DataError(f"{path}: not an HDF5 file{then}") from None
        raise DataError(f"{path}: cannot be read: {text}{then}") from None


def read_texts(item: h5py.Dataset | h5py.Group) -> np.ndarray:
    """Text of an array, `(n,)` object, as anndata stores it: plain, or a group of values and a mask of missing ones."""
    if isinstance(item, h5py.Dataset):
        return np.asarray(item.asstr()[:] if len(item) else [], object)  # an empty array may be of numbers
    texts = np.asarray(item["values"].asstr()[:], object)
    if "mask" in item:
        texts[item["mask"][:]] = "nan"
    return texts


def check_h5ad(out: Path, option: str) -> None:
    """Raise ConfigError for an output whose name is not that of an AnnData file."""
    if out.suffix != ".h5ad":
        raise ConfigError(f"{option} {out}: expected a name that ends in .h5ad")


class NewH5File(h5py.File):
    """HDF5 file being written or changed."""

    def __init__(self, disk: _Disk, mode: Literal["w", "r+"], alignment: int) -> None:
        super().__init__(disk, mode, alignment_threshold=alignment, alignment_interval=alignment)
        self._disk = disk

    def raise_if_failed(self) -> None:
        """Raise the first failed write, if any; to stop early, since closing the file raises it too."""
        self._disk.raise_if_failed()


@contextmanager
def create_h5(path: Path, alignment: int = ALIGNMENT) -> Iterator[NewH5File]:
    """New HDF5 file that replaces `path` when the block ends without an error.

    Arrays and chunks of at least `alignment` bytes begin at a multiple of it.

    Raises OSError naming `path` when the disk is full.
    """
    with named_errors(path), atomic_path(path) as temporary, _written(temporary, "w", alignment) as file:
        yield file


@contextmanager
def change_h5(path: Path, source: Path) -> Iterator[NewH5File]:
    """Copy of the HDF5 file `source` to change, which replaces `path` (it may be `source`) when the block ends.

    Raises OSError naming `path` when the disk is full.
    """
    with named_errors(path), atomic_path(path) as temporary:
        shutil.copyfile(source, temporary)
        with _written(temporary, "r+") as file:
            yield file


@contextmanager
def _written(temporary: Path, mode: Literal["w", "r+"], alignment: int = ALIGNMENT) -> Iterator[NewH5File]:
    """HDF5 file in `temporary`, which the caller syncs."""
    with _Disk(temporary, "r+") as disk:
        try:
            with NewH5File(disk, mode, alignment) as file:
                yield file
        except (OSError, RuntimeError) as error:
            raise disk.error or error from None
        disk.raise_if_failed()


class _Disk(io.FileIO):
    """The file object under an HDF5 file. Keeps the first failed write as `error` and drops all later ones.

    HDF5 must not see the failure: closing a file that cannot be written crashes the interpreter (seen with 2.0.0).
    """

    error: OSError | None = None

    def raise_if_failed(self) -> None:
        if self.error is not None:
            raise self.error

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while len(rest) and self.error is None:  # a disk that fills up takes a part first
                rest = rest[super().write(rest) :]
        except OSError as error:
            self.error = error
        return size

    def truncate(self, size: int | None = None) -> int:
        try:
            if self.error is None:
                super().truncate(size)
        except OSError as error:
            self.error = error
        return size or 0

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        n_read = super().readinto(view) or 0
        view[n_read:] = bytes(len(view) - n_read)  # dropped by a failed write
        return len(view)


def one_line(error: BaseException) -> str:
    """Message of `error` in one line of at most 300 characters."""
    return (" ".join(str(error).split()) or type(error).__name__)[:300]
