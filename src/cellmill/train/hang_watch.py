"""Finds a process that hangs: where each is in a training, told to the others, and looked at when nothing goes on.

All processes go through the same places in the same order, so whoever has been through the fewest is what the others
wait for. To note a place costs an assignment. A thread tells it through the store of torchrun's agent: rank 0 may be
the one that hangs. Time is counted in turns of that thread, so a job that was suspended as a whole is not blamed.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

START_FACTOR = 5  # before the first steps are done: rendezvous, weights, compilation, cold files
TURNS = 20  # of the thread in timeout_s
ANSWER_S = 60.0  # how long the store may take


@dataclass(frozen=True)
class Position:
    """Where a process is."""

    passed: int
    """Places it has been through."""
    what: str
    turn: int
    """Of its thread; one that stands still is that of a process that is stopped, or whose node is gone."""
    host: str
    saving: bool = False
    """Whether a checkpoint is being written, which takes as long as it takes."""


class HangWatch:
    """Where this process is. Nothing looks at it until `start`."""

    def __init__(self) -> None:
        self.passed, self.what, self.warm = 0, "the start", False
        self.saving: Callable[[], bool] = lambda: False
        """Whether this process writes a checkpoint: the others may wait for it longer than `timeout_s`."""
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def at(self, what: str) -> None:
        """Notes that this process has come to `what`, a collective or what comes before one. Every rank, the same."""
        self.what = what
        self.passed += 1

    def start(self, timeout_s: float, end: Callable[[str], None]) -> None:
        """Looks from now on, in a thread; `end` is given the line that names who hangs. Needs torchrun."""
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # a connection of its own: a call that waits holds the other's lock
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=ANSWER_S))
        arguments = (dist.PrefixStore("watch", store), timeout_s, end)
        self._thread = threading.Thread(target=self._run, args=arguments, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Looks no more."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, store: dist.Store, timeout_s: float, end: Callable[[str], None]) -> None:
        rank, world, host = dist.get_rank(), dist.get_world_size(), os.uname().nodename
        passed, stood, turn = -1, 0, 0
        earlier: list[Position | None] = []
        try:
            while not self._closing.wait(timeout_s / TURNS):
                turn += 1
                mine = Position(self.passed, self.what, turn, host, self.saving())
                store.set(str(rank), json.dumps(asdict(mine)))
                stood = stood + 1 if mine.passed == passed else 0
                passed = mine.passed
                limit = TURNS * (1 if self.warm else START_FACTOR)
                if stood == limit // 2:
                    earlier = _places(store, world)
                if stood > limit:
                    now = _places(store, world)
                    if any(place is not None and place.saving for place in now):
                        stood = 0
                        continue
                    if mine.passed == min(place.passed for place in now if place is not None):
                        faulthandler.dump_traceback(sys.stderr)  # where, for the log
                    end(finding(earlier, now, timeout_s * limit / TURNS))
                    return
        except dist.DistError:  # the agent is gone: this process is being ended
            return


def finding(earlier: list[Position | None], now: list[Position | None], waited_s: float) -> str:
    """The line that says which ranks the others wait for.

    Parameters
    ----------
    earlier, now
        Places by rank, `waited_s` / 2 apart; None for a rank that never told its own.
    """
    known = {rank: place for rank, place in enumerate(now) if place is not None}
    furthest, fewest = (of(known.values(), key=lambda place: place.passed) for of in (max, min))
    silent = [
        rank for rank, (a, b) in enumerate(zip(earlier, now)) if b is None or (a is not None and a.turn == b.turn)
    ]
    behind = [rank for rank, place in known.items() if fewest.passed == place.passed < furthest.passed]
    waited = f"for {waited_s:g} s (train.timeout_s)"
    if len(now) == 1:
        return f"rank 0 on {furthest.host} has been at {furthest.what} {waited}: where, is in the log"
    if not (hung := silent or behind):
        return f"all ranks have been at {furthest.what} {waited}: no one is behind, look at the network between them"
    what = f"rank {hung[0]}" + (f" on {known[hung[0]].host}" if hung[0] in known else "")
    if others := hung[1:]:
        what += f" and {len(others)} more (ranks {', '.join(map(str, others[:8]))}{', …' if len(others) > 8 else ''})"
    state = "does not answer" if silent else f"is still at {fewest.what}"
    return f"{what} did not come through {furthest.what} {waited} and the others wait: it {state}"


def _places(store: dist.Store, world: int) -> list[Position | None]:
    keys = [str(rank) for rank in range(world)]
    return [Position(**json.loads(store.get(key))) if store.check([key]) else None for key in keys]
