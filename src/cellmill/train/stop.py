"""Signals that stop a training. The handler only sets a flag: all ranks save together at the end of a common step."""

import signal

from cellmill.launch.signals import STOP_SIGNALS


class StopFlag:
    """Handler of `STOP_SIGNALS`, installed when made; `received` is the name of the last one."""

    def __init__(self) -> None:
        self.received: str | None = None
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        self.received = signal.Signals(number).name
