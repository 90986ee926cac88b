"""Signals that stop a training, what each means to a follower of a job, and control of orphans.

A follower cancels its job on INT, which people send. It leaves the job running on TERM, HUP and
USR2, so that neither a lost terminal nor the shutdown of a login node loses a job, and hands over
to another follower on USR1.
"""

import ctypes
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Event
from typing import cast

from cellmill.errors import Stopped

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
REQUESTS = {
    signal.SIGINT: "cancel",
    signal.SIGTERM: "detach",
    signal.SIGHUP: "detach",
    signal.SIGUSR2: "detach",
    signal.SIGUSR1: "hand over",
}
_libc = ctypes.CDLL(None)


class Interrupted(Stopped):
    """Ended by a signal, before there was anything to save."""


@contextmanager
def handled_by(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Call `handler` on every stop signal; restore the earlier handlers afterwards.

    SIGHUP stays ignored if it is, as under nohup.
    """
    earlier = {}
    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            earlier[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in earlier.items():
            signal.signal(number, old)


@contextmanager
def blocked(signals: Iterable[signal.Signals] = STOP_SIGNALS) -> Iterator[None]:
    """Delay signals, in this process and for good in its new children.

    A submission must not be cut in half.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


@contextmanager
def interrupted_later() -> Iterator[None]:
    """Handle Ctrl-C when the block has ended: an exception while Python forks would be lost."""
    noted: list[int] = []
    earlier = signal.signal(signal.SIGINT, lambda number, _: noted.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, earlier)
    if noted and callable(earlier):
        earlier(signal.SIGINT, None)


class StopFlag:
    """Handler of `STOP_SIGNALS`, installed when created; `received` is the name of the first signal."""

    def __init__(self, note: str = "") -> None:
        self.received: str | None = None
        self._note = note  # printed after the name, if there is one
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        if self.received is None:
            self.received = signal.Signals(number).name
            if self._note:
                os.write(1, f"{self.received}: {self._note}\n".encode())


class Requests:
    """Requests that signals have made of a follower."""

    def __init__(self) -> None:
        self.first: str | None = None  # cancel, detach or hand over
        self.again = False  # set by every signal; reset it to notice the next one
        self._event = Event()

    def wait(self, seconds: float) -> None:
        """Wait, at most until the next signal."""
        self._event.wait(seconds)
        self._event.clear()

    def note(self, number: int, frame: object) -> None:
        """Handle a signal."""
        self.first = self.first or REQUESTS[signal.Signals(number)]
        self.again = True
        self._event.set()


@contextmanager
def requests() -> Iterator[Requests]:
    """Collect the requests of signals instead of being ended by them."""
    collected = Requests()
    with handled_by(collected.note):
        yield collected


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process signal `number` when its parent ends (PR_SET_PDEATHSIG)."""
    _libc.prctl(1, number, 0, 0, 0)


def belong_to_parent() -> None:
    """Initialize a process of a pool: the parent handles Ctrl-C, and its end ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    if os.getppid() != cast(BaseProcess, parent_process()).pid:
        os._exit(1)


def children(pid: int) -> list[int]:
    """Process ids of the children of `pid`, of all its threads; empty if it has ended."""
    pids: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread ended between listing and reading
            pids += [int(child) for child in task.read_text().split()]
    return pids


def signal_all(pids: list[int], number: int) -> None:
    """Send a signal to all `pids` that are still alive."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
