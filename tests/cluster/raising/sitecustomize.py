"""On PYTHONPATH of a worker: makes rank 1 raise once training has begun, as a bug would."""

import os
import signal
from pathlib import Path

_curve = os.environ.get("RAISE_WHEN_THERE")

if _curve and os.environ.get("RANK") == "1":

    def _raise(number: int, frame: object) -> None:
        if _curve and Path(_curve).exists():
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise ValueError("planted\nbug")

    signal.signal(signal.SIGALRM, _raise)
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
