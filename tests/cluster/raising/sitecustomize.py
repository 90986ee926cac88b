"""On PYTHONPATH of a worker: makes rank 1 raise once training has begun, as a bug would."""

import os
import signal
import sys
from pathlib import Path
from types import FrameType

_curve = os.environ.get("RAISE_WHEN_THERE")

if _curve and os.environ.get("RANK") == "1":

    def _raise(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if "importlib" in frame.f_code.co_filename:
                return  # torch catches what an optional import raises: try once more
            frame = frame.f_back
        if _curve and Path(_curve).exists():
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise ValueError("planted\nbug")

    def _again(lost: object) -> None:
        """Raised in a finalizer, which Python goes on from: try once more."""
        signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)

    sys.unraisablehook = _again
    signal.signal(signal.SIGALRM, _raise)
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
