"""Answers of squeue that the processes of a user on one host share, to spare the controller.

    $TMPDIR/cellmill-UID/KEY.json     when the last query began, and its answer
    $TMPDIR/cellmill-UID/KEY.lock     held by the process that queries

However many launchers wait, one of them asks and the others read. A process that cannot use the
folder, or waits for one that is stopped, asks for itself.
"""

import fcntl
import os
import shutil
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from cellmill.errors import DataError
from cellmill.files import HOST, digest, private_folder, read_json, write_json
from cellmill.runs.slurm import CommandError, ask

WAIT_S = 5.0  # for a process that queries
TURN_S = 0.05  # between two tries to take the lock


@dataclass(frozen=True)
class Answer:
    """The output of a command, or the error of a command without one."""

    queried_at: float  # begin of the query, by the monotonic clock
    text: str
    error: str

    @classmethod
    def of(cls, command: list[str]) -> "Answer":
        """The answer of a command that is run now."""
        began_at = time.monotonic()
        try:
            return cls(began_at, ask(command), "")
        except CommandError as error:  # shared as well: spare a controller in trouble
            return cls(began_at, "", str(error))


def shared_answer(command: list[str], max_age_s: float) -> Answer:
    """The answer of a query that began at most `max_age_s` before this call, by any process."""
    oldest = time.monotonic() - max_age_s
    folder = private_folder()
    answer = None
    # a different squeue or configuration has other jobs, and another host another clock
    settings = [os.environ.get(name) for name in ("SLURM_CONF", "SLURM_CLUSTERS")]
    key = digest([HOST, shutil.which(command[0]), command, settings])[:16]
    # without a folder, or on a full disk
    with suppress(OSError), open(f"{folder}/{key}.lock", "w", encoding="utf-8") as lock:
        _take(lock)
        file = Path(f"{folder}/{key}.json")
        with suppress(DataError, TypeError):  # none yet, or damaged
            stored = Answer(**read_json(file))
            if oldest <= stored.queried_at <= time.monotonic():
                return stored
        answer = Answer.of(command)
        write_json(file, asdict(answer))
    return answer or Answer.of(command)


def _take(lock: TextIO) -> None:
    """Wait for a lock, but not for long: its holder may be stopped (Ctrl-Z)."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(TURN_S)
