"""Limits under which bad input is read: a hang or a huge allocation is an error of the test."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

SECONDS = 60  # also on a busy machine
MORE_BYTES = 2 << 30


class HangError(Exception):
    """What is read did not end within SECONDS."""


@contextmanager
def limited() -> Iterator[None]:
    """Raise HangError after SECONDS, and MemoryError when MORE_BYTES more of address space are
    asked for.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    previous = signal.signal(signal.SIGALRM, _hang)
    # that of pytest-timeout goes on afterwards
    timer = signal.setitimer(signal.ITIMER_REAL, SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MORE_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGALRM, previous)
        signal.setitimer(signal.ITIMER_REAL, *timer)


@contextmanager
def full_after(n_bytes: int) -> Iterator[None]:
    """No file grows beyond `n_bytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _hang(number: int, frame: FrameType | None) -> None:
    raise HangError(f"no end within {SECONDS} s")
