"""A growing log file of a job."""

import os
import re
import sys
from pathlib import Path

NOT_LAUNCHED = re.compile(
    r"^srun: error: (?:tasks? ([\d,-]+):? launch failed|task launch for \S+ failed on node (\S+)): (.*)$",
    re.IGNORECASE | re.MULTILINE,
)
BEGINS = "Starting with JobEnvironment"  # printed by submitit each time SLURM starts the job


class Tail:
    """Reads what is appended to a file, and prints it if `echo`."""

    def __init__(self, path: Path, echo: bool = True) -> None:
        self.path, self.echo, self.position = path, echo, 0
        self._begun = False
        self.not_launched: re.Match[str] | None = None
        """srun's message about a task it could not launch in the present start: tasks, or node, and reason. The other
        tasks wait for it."""

    def read(self) -> None:
        """Read what is new. A file that does not exist yet has nothing new."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.position)
                new = file.read()
        except OSError:  # not there yet, or briefly unreachable
            return
        self.position += len(new)
        text = new.decode(errors="replace")
        if self.echo:
            sys.stdout.write(text)
            sys.stdout.flush()
        for number, part in enumerate(text.split(BEGINS)):
            if number > 0:
                # srun's message may come before the first line of its own start
                self.not_launched, self._begun = None if self._begun else self.not_launched, True
            self.not_launched = NOT_LAUNCHED.search(part) or self.not_launched

    def reports_out_of_memory(self) -> bool:
        """True if SLURM reports in the log that the kernel killed a process for memory."""
        try:
            with open(self.path, "rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - 65536))
                return bool(re.search(rb"oom[-_]kill event|Out Of Memory", file.read()))
        except OSError:
            return False
