"""Identity of a folder: the same by every path that leads to it, and new in a copy.

`FOLDER/id.json` is made once and kept. It names its own inode and path: a folder seen under another path (a bind mount,
a symbolic link, another mount point) has the same inode, and one on a file system whose inode numbers change has the
same path. Where both differ the folder was copied, and gets an identity of its own.
"""

import json
import os
import secrets
from pathlib import Path

from cellmill.errors import DataError
from cellmill.files import fsync, read_json

NAME = "id.json"


def folder_id(folder: Path) -> str | None:
    """The identity of `folder`, 12 hexadecimal digits; None if it has none yet. Changes no file."""
    file = folder / NAME
    try:
        value = read_json(file)
        same = value["inode"] == file.stat().st_ino or value["path"] == str(file.resolve())
        return str(value["id"]) if same else None
    except (DataError, FileNotFoundError, KeyError, TypeError):
        return None


def make_folder_id(folder: Path) -> str:
    """The identity of `folder`, which is made if there is none: one for all processes that ask at once."""
    while (known := folder_id(folder)) is None:
        _offer(folder / NAME)
    return known


def _offer(file: Path) -> None:
    """Make `file` with a new identity, unless another process was faster."""
    own = secrets.token_hex(6)
    new = file.with_name(f".{file.stem}.{own}.incomplete")
    with open(new, "x", encoding="utf-8") as text:
        json.dump({"id": own, "inode": os.fstat(text.fileno()).st_ino, "path": str(file.resolve())}, text)
    fsync(new)
    try:
        os.link(new, file)
    except FileExistsError:
        if folder_id(file.parent) is None:  # that of the folder which this one is a copy of
            new.replace(file)
    except OSError:  # a file system without links
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)
    fsync(file.parent)
