"""A job's log as it grows."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

NOT_LAUNCHED = re.compile(
    r"^srun: error: (?:tasks? ([\d,-]+):? launch failed|task launch for \S+ failed on node (\S+)): (.*)$",
    re.IGNORECASE | re.MULTILINE,
)
_BEGINS = "Starting with JobEnvironment"  # what submitit prints each time SLURM starts the job


class Tail:
    """Copies what is appended to a file to stdout."""

    def __init__(self, path: Path) -> None:
        self.path, self.position = path, 0
        self.not_launched = ""
        """What srun says of a task that it could not launch since the job last began: the others wait for it."""

    def copy(self) -> None:
        """Copies what is new; a file that is not there yet has nothing new."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.position)
                new = file.read()
        except OSError:  # not there yet, or for a moment not reachable
            return
        self.position += len(new)
        text = new.decode(errors="replace")
        sys.stdout.write(text)
        sys.stdout.flush()
        if _BEGINS in text:
            self.not_launched = ""
        if match := NOT_LAUNCHED.search(text.rpartition(_BEGINS)[2]):
            self.not_launched = match[0].removeprefix("srun: error: ")

    def says_out_of_memory(self) -> bool:
        """Whether SLURM reported there that the kernel killed a process for memory."""
        try:
            with open(self.path, "rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - 65536))
                return bool(re.search(rb"oom[-_]kill event|Out Of Memory", file.read()))
        except OSError:
            return False
