"""Signals that ask a training to stop. The handler sets a flag and no more: saving is done by all ranks together,
at the end of a common step, not inside a handler.
"""

from __future__ import annotations

import signal

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class StopFlag:
    """Set by any of SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2 from the moment it is made."""

    def __init__(self) -> None:
        self.received: str | None = None
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        self.received = signal.Signals(number).name
