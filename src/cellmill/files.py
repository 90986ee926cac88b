"""Atomic files: write to a temporary file in the same folder, fsync, rename.

Every output of the workflow is written through here, so a killed process, a full disk or a lost node leaves the old
file or none, never a partial one. A folder's manifest is written last: if it exists, the rest is complete.
"""

import errno
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cellmill.errors import DataError

SPECIAL_KINDS = {stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}


@contextmanager
def atomic_path(final: Path) -> Iterator[Path]:
    """A temporary path to write to, fsynced and renamed to `final` when the block ends without an error.

    It has the suffix of `final`, since libraries choose a format by suffix. Removed if the block raises. Raises
    DataError for a `final` that is a device, FIFO or socket, which the rename would replace.
    """
    final = Path(final)
    if final.is_dir():  # the rename would name the temporary path
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(final))
    if (kind := special_kind(final)) is not None:
        raise DataError(f"{final}: expected the name of a file, got a {kind}")
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(f".{final.stem}.{secrets.token_hex(4)}.incomplete{final.suffix}")
    temporary.touch(exist_ok=False)
    mode = temporary.stat().st_mode
    try:
        yield temporary
        temporary.chmod(mode)  # safetensors replaces the file by one of mode 0600, which the group cannot read
        fsync(temporary)
        temporary.replace(final)
        fsync(final.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(final: Path, text: str) -> None:
    """Write `text` as UTF-8 to `final`, atomically."""
    with atomic_path(final) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(final: Path, value: Any) -> None:
    """Write `value` as indented JSON to `final`, atomically. NaN raises ValueError: it is not JSON."""
    write_text(final, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read the JSON in `path`. Raises DataError naming the file if it is missing or not JSON."""
    require_file(path)
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON ({error})") from None
    except RecursionError:
        raise DataError(f"{path}: not valid JSON (nested too deeply)") from None


def require_file(path: Path) -> None:
    """Raise DataError unless `path` is a regular file or a link to one: opening a FIFO would wait without end."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    if not stat.S_ISREG(mode):
        raise DataError(f"{path}: expected a file, got a {special_kind(path) or 'folder'}")


def special_kind(path: Path) -> str | None:
    """FIFO, socket or device; None for anything else and for a path that does not exist."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return None
    return SPECIAL_KINDS.get(stat.S_IFMT(mode))


def sha256_file(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes. Raises DataError if it is missing or not a regular file."""
    require_file(path)
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(value: Any) -> str:
    """Hexadecimal SHA-256 of a JSON-able value, independent of the order of keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def fsync(path: Path) -> None:
    """Make the bytes of a file, or a rename inside a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
