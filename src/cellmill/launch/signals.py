"""What signals ask of the process that follows a job: INT and TERM to cancel it, HUP and USR2 to leave it running (a
lost terminal loses no job), USR1 to let another process follow it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any


class Signals:
    """Notes what was asked, while it is entered: `asked` is None, cancel, detach or hand over."""

    def __init__(self) -> None:
        self.asked: str | None = None
        self.again = False
        self._event = Event()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        meant = {
            signal.SIGINT: "cancel",
            signal.SIGTERM: "cancel",
            signal.SIGHUP: "detach",
            signal.SIGUSR2: "detach",
            signal.SIGUSR1: "hand over",
        }

        def note(number: int, frame: object) -> None:
            self.asked, self.again = self.asked or meant[signal.Signals(number)], True
            self._event.set()

        for number in meant:
            self._before[number] = signal.signal(number, note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self, seconds: float) -> None:
        """Waits, but not longer than until the next signal."""
        self._event.wait(seconds)
        self._event.clear()


@contextmanager
def blocked() -> Iterator[None]:
    """Holds signals back, from this process and those it starts: a submission is made whole or not at all."""
    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
