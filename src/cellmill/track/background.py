"""Plug-in trackers on threads of their own: none can fail, delay or slow the training.

Each has a bounded queue. A tracker that raises is dropped with one warning; a slow one loses lines, with one warning,
and at the end is waited for at most FINISH_S. metrics.jsonl always has every line.
"""

import queue
import sys
import threading
import time
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from cellmill.config.track import TrackerConfig
from cellmill.track.tracker import Tracker

QUEUE_LINES = 1000
FINISH_S = 5.0  # for all trackers together


class BackgroundTrackers:
    """Trackers by name, as one tracker whose calls return at once."""

    def __init__(self, options: Mapping[str, TrackerConfig]) -> None:
        self._threads = [_TrackerThread(name, choice) for name, choice in options.items()]

    def start(self, config: dict[str, Any], resume_step: int) -> None:
        for thread in self._threads:
            thread.start(deepcopy(config), resume_step)

    def log(self, step: int, scalars: dict[str, Any]) -> None:
        largest = {name: max(value) if isinstance(value, list) else value for name, value in scalars.items()}
        numbers = {name: value for name, value in largest.items() if isinstance(value, int | float)}
        if numbers:
            for thread in self._threads:
                thread.log(step, dict(numbers))

    def finish(self, status: str) -> None:
        """Let the trackers end, for at most FINISH_S."""
        deadline = time.monotonic() + FINISH_S
        for thread in self._threads:
            thread.finish(status)
        for thread in self._threads:
            thread.wait(deadline)


class _TrackerThread:
    """One tracker; it is imported, made and called on its thread only."""

    def __init__(self, name: str, options: TrackerConfig) -> None:
        self._name, self._options = name, options
        self._queue: queue.Queue[tuple[int, dict[str, Any]] | str] = queue.Queue()  # lines, then the status
        self._warned = False

    def start(self, config: dict[str, Any], resume_step: int) -> None:
        self._thread = threading.Thread(
            target=self._run, args=(config, resume_step), name=f"cellmill-track-{self._name}", daemon=True
        )
        self._thread.start()

    def log(self, step: int, scalars: dict[str, Any]) -> None:
        if self._queue.qsize() < QUEUE_LINES:
            self._queue.put((step, scalars))
        elif self._thread.is_alive() and not self._warned:
            self._warned = True
            self._warn(f"is too slow: lines are dropped from step {step} on")

    def finish(self, status: str) -> None:
        self._queue.put(status)

    def wait(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._warn(f"did not finish within {FINISH_S:g} s; its last lines may be lost")

    def _run(self, config: dict[str, Any], resume_step: int) -> None:
        try:
            tracker: Tracker = self._options.load()(self._options)
            tracker.start(config, resume_step)
            while not isinstance(item := self._queue.get(), str):
                tracker.log(*item)
            tracker.finish(item)
        except BaseException as error:  # also SystemExit of a library
            self._warn(f"failed and is dropped: {type(error).__name__}: {' '.join(str(error).split())[:300]}")

    def _warn(self, problem: str) -> None:
        print(f"warning: tracker {self._name!r} {problem}; metrics.jsonl is complete", file=sys.stderr, flush=True)
