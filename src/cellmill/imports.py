"""Imports of heavy libraries without the garbage collector: a sixth of their time, and as much
again at the exit.
"""

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Import modules inside. Nothing of them is garbage: the collector looks at none of it, now,
    later or at the exit.

    Python's shutdown collects several times, which takes 0.4 s with torch in memory.
    """
    enabled = gc.isenabled()
    known = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > known:
            gc.freeze()
            atexit.register(gc.freeze)  # modules that were imported later, too
        if enabled:
            gc.enable()
