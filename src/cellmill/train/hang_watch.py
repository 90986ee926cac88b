"""Detection of hung ranks: each rank publishes its position in the training, and a stall names the rank behind.

All ranks pass the same positions in the same order, so the others wait for whichever has passed the fewest. Noting a
position costs an assignment; a thread publishes it through the store of torchrun's agent, since rank 0 may be the one
that hangs. Time is counted in ticks of that thread, so a job that was suspended as a whole is not reported.
"""

import faulthandler
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from cellmill.launch.rendezvous import NODES, node_name

START_FACTOR = 5  # longer timeout before the first steps are done: weights, compilation, cold files
JOIN_S = 60.0  # shortest timeout until all ranks have joined: they import torch at different speeds
TICKS = 20  # of the thread within timeout_s
STORE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Position:
    """Position of one rank."""

    passed: int
    """Number of positions passed."""
    what: str
    tick: int
    """Of its thread; it stands still where the process is stopped or its node is lost."""
    host: str
    saving: bool = False
    """Whether a checkpoint is being written, for which there is no timeout."""


class HangWatch:
    """Position of this rank, watched from `start` on."""

    def __init__(self) -> None:
        self.passed, self.what, self.warm = 0, "joining the process group", False
        self._has_joined = False
        self.saving: Callable[[], bool] = lambda: False
        """Whether this rank is writing a checkpoint: others may wait for it longer than `timeout_s`."""
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def at(self, what: str) -> None:
        """Note that this rank has reached `what`: a collective, or the work before one. Every rank, in one order."""
        self.what = what
        self.passed += 1

    def joined(self) -> None:
        """Note that all ranks have joined the process group."""
        self._has_joined = True
        self.at("the start")

    def start(self, timeout_s: float, end: Callable[[str], None]) -> None:
        """Start the thread; it calls `end` with a line that names the hung rank. Needs torchrun, and no group yet."""
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # a connection of its own: a blocking call holds the lock of torch's
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=STORE_TIMEOUT_S))
        names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        arguments = (store, *(int(os.environ[name]) for name in names), timeout_s, end)
        self._thread = threading.Thread(target=self._run, args=arguments, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _run(
        self, agent: dist.Store, rank: int, world: int, local_world: int, timeout_s: float, end: Callable[[str], None]
    ) -> None:
        store, host = dist.PrefixStore("watch", agent), node_name()
        passed, stalled, tick = -1, 0, 0
        earlier: list[Position | None] = []
        try:
            while not self._closing.wait(timeout_s / TICKS):
                tick += 1
                mine = Position(self.passed, self.what, tick, host, self.saving())
                store.set(str(rank), json.dumps(asdict(mine)))
                stalled = stalled + 1 if mine.passed == passed else 0
                passed = mine.passed
                limit = TICKS * (1 if self.warm else START_FACTOR)
                if not self._has_joined:
                    limit = round(TICKS * max(1.0, JOIN_S / timeout_s))
                if stalled == limit // 2:
                    earlier = _positions(store, world)
                if stalled > limit:
                    now = _positions(store, world)
                    if any(position is not None and position.saving for position in now):
                        stalled = 0
                        continue
                    if mine.passed == min(position.passed for position in now if position is not None):
                        faulthandler.dump_traceback(sys.stderr)  # the stack goes to the log
                    end(hang_line(earlier, now, timeout_s * limit / TICKS, _hosts(agent, now, local_world)))
                    return
        except dist.DistError:  # the agent is gone, and is ending this process
            return


def hang_line(
    earlier: list[Position | None], now: list[Position | None], waited_s: float, hosts: Mapping[int, str] | None = None
) -> str:
    """Return the line that names the ranks for which the others wait.

    Parameters
    ----------
    earlier, now
        Positions by rank, `waited_s` / 2 apart; None for a rank that never published one.
    hosts
        Nodes of ranks that never published a position, by rank, where known.
    """
    known = {rank: position for rank, position in enumerate(now) if position is not None}
    furthest, hindmost = (of(known.values(), key=lambda position: position.passed) for of in (max, min))
    silent = [
        rank for rank, (a, b) in enumerate(zip(earlier, now)) if b is None or (a is not None and a.tick == b.tick)
    ]
    behind = [rank for rank, position in known.items() if hindmost.passed == position.passed < furthest.passed]
    waited = f"{waited_s:g} s (train.timeout_s)"
    if len(now) == 1:
        return f"rank 0 on {furthest.host} has been stuck at {furthest.what} for {waited}; its stack is in the log"
    if not (hung := silent or behind):
        return f"all ranks have waited {waited} at {furthest.what} and none is behind: check the network between them"
    node = known[hung[0]].host if hung[0] in known else (hosts or {}).get(hung[0])
    who = f"rank {hung[0]}" + (f" on {node}" if node else "")
    do, be = "does", "is"
    if others := hung[1:]:
        who += f" and {len(others)} more (ranks {', '.join(map(str, others[:8]))}{', …' if len(others) > 8 else ''})"
        do, be = "do", "are"
    state = f"{do} not respond" if silent else f"{be} stuck at {hindmost.what}"
    return f"{who} {state}; the other ranks have waited {waited} at {furthest.what}"


def _positions(store: dist.Store, world: int) -> list[Position | None]:
    keys = [str(rank) for rank in range(world)]
    return [Position(**json.loads(store.get(key))) if store.check([key]) else None for key in keys]


def _hosts(agent: dist.Store, now: list[Position | None], local_world: int) -> dict[int, str]:
    """Return the nodes of the ranks without a position, as the nodes' agents published them."""
    silent = [rank for rank, position in enumerate(now) if position is None][:8]
    keys = {rank: f"{NODES}/{rank // local_world}" for rank in silent}
    return {rank: agent.get(key).decode() for rank, key in keys.items() if agent.check([key])}
