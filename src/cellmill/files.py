"""Atomic files: write to a temporary file in the same folder, fsync, rename.

Every output of the workflow is written through here, so a killed process, a full disk or a lost node leaves the old
file or none, never a partial one. A folder's manifest is written last: if it exists, the rest is complete.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cellmill.errors import DataError


@contextmanager
def atomic_path(final: Path) -> Iterator[Path]:
    """A temporary path to write to, fsynced and renamed to `final` when the block ends without an error.

    It has the suffix of `final`, since libraries choose a format by suffix. Removed if the block raises.
    """
    final = Path(final)
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
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON ({error})") from None


def sha256_file(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
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
