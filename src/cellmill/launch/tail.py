"""A job's log as it grows."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path


class Tail:
    """Copies what is appended to a file to stdout."""

    def __init__(self, path: Path) -> None:
        self.path, self.position = path, 0

    def copy(self) -> None:
        try:
            with open(self.path, "rb") as file:
                file.seek(self.position)
                new = file.read()
        except OSError:  # not there yet, or for a moment not reachable
            return
        self.position += len(new)
        sys.stdout.write(new.decode(errors="replace"))
        sys.stdout.flush()

    def says_out_of_memory(self) -> bool:
        """Whether SLURM reported there that the kernel killed a process for memory."""
        try:
            with open(self.path, "rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - 65536))
                return bool(re.search(rb"oom[-_]kill event|Out Of Memory", file.read()))
        except OSError:
            return False
