"""Linux's means against orphans: children that die with their parent, and the children of a process."""

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process signal `number` when its parent ends, however it ends (prctl(2))."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def children(pid: int) -> list[int]:
    """Process ids of the children of `pid`, of all its threads; empty if it has ended."""
    pids: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread ended between listing and reading
            pids += [int(child) for child in task.read_text().split()]
    return pids


def signal_all(pids: list[int], number: int) -> None:
    """Send a signal to those of `pids` that are still alive."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
