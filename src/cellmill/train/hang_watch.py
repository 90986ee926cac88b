"""Detection of hung ranks, and the line that names them.

All ranks pass the same positions in the same order, so the others wait for whichever has passed the
fewest. Noting a position costs an assignment; a thread publishes it through the store of torchrun's
agent, since rank 0 may be the one that hangs. Time is counted in ticks of that thread, so a job
that was suspended as a whole is not reported.
"""

import faulthandler
import json
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from cellmill.launch.rendezvous import NODES, node_name
from cellmill.train.failure import trace_file, trace_name

START_FACTOR = 5  # longer timeout before the first steps are done: weights, compilation, cold files
JOIN_S = 60.0  # shortest timeout until all ranks have joined: they import torch at different speeds
TICKS = 20  # ticks of the thread within timeout_s
STORE_TIMEOUT_S = 60.0
MAX_LISTED = 8  # ranks in a message


@dataclass(frozen=True)
class Position:
    passed: int  # number of positions passed
    what: str
    tick: int
    """Ticks of the rank's thread: they stop while its process is stopped or its node is lost."""
    host: str
    saving: bool = False  # a checkpoint is being written, for which there is no timeout


class HangWatch:
    """Position of this rank, which a thread publishes and compares with others from `start` on."""

    def __init__(self) -> None:
        self.passed = 0
        self.what = "joining the process group"
        self.warm = False
        self.saving: Callable[[], bool] = lambda: False
        """True while this rank writes a checkpoint: others may wait for it longer than timeout_s."""
        self._closing = threading.Event()

    def reach(self, what: str) -> None:
        """Note that this rank has reached `what`: a collective, or the work before one.

        Every rank calls it in the same order, first when it has joined.
        """
        self.what = what
        self.passed += 1

    def start(self, timeout_s: float, end: Callable[[str], None]) -> None:
        """Start the thread; it calls `end` with a line that names the hung rank.

        It needs no process group yet.
        """
        peers = _Peers()
        self._thread = threading.Thread(
            target=self._run, args=(peers, timeout_s, end), name="watch", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self, peers: "_Peers", timeout_s: float, end: Callable[[str], None]) -> None:
        host = node_name()
        tick = 0
        passed = -1
        stalled = 0  # ticks since this rank passed a position
        earlier: list[Position | None] = []
        try:
            while not self._closing.wait(timeout_s / TICKS):
                tick += 1
                position = Position(self.passed, self.what, tick, host, self.saving())
                peers.publish(position)
                stalled = stalled + 1 if position.passed == passed else 0
                passed = position.passed
                limit, source = self._limit(passed, timeout_s)
                if stalled == limit // 2:
                    earlier = peers.read()
                if stalled <= limit:
                    continue
                now = peers.read()
                if any(position is not None and position.saving for position in now):
                    stalled = 0
                    continue
                if passed == min(peer.passed for peer in now if peer is not None):
                    with trace_file() as file:
                        faulthandler.dump_traceback(file)
                waited = f"{timeout_s * limit / TICKS:g} s ({source})"
                end(hang_line(earlier, now, waited, peers.find_node))
                return
        except dist.DistError:  # the agent is gone, and is ending this process
            return

    def _limit(self, passed: int, timeout_s: float) -> tuple[int, str]:
        """Return the ticks that a rank may stall, and where that limit comes from."""
        if not passed and timeout_s < JOIN_S:
            return round(TICKS * JOIN_S / timeout_s), "the least time to join"
        if passed and not self.warm:
            source = f"{START_FACTOR} x train.timeout_s until the first steps"
            return TICKS * START_FACTOR, source
        return TICKS, "train.timeout_s"


class _Peers:
    """Positions of all ranks of this job, in the store of torchrun's agent."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.world = int(os.environ["WORLD_SIZE"])
        self.local_world = int(os.environ["LOCAL_WORLD_SIZE"])
        self.agent: dist.Store = dist.HashStore()
        if self.world > 1:
            # a connection of its own: a blocking call holds the lock of torch's
            self.agent = dist.TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=False,
                timeout=timedelta(seconds=STORE_TIMEOUT_S),
            )
        self.store = dist.PrefixStore("watch", self.agent)

    def publish(self, position: Position) -> None:
        self.store.set(str(self.rank), json.dumps(asdict(position)))

    def read(self) -> list[Position | None]:
        """Return positions by rank; None for a rank that has published none."""
        positions: list[Position | None] = []
        for rank in range(self.world):
            is_published = self.store.check([str(rank)])
            positions.append(
                Position(**json.loads(self.store.get(str(rank)))) if is_published else None
            )
        return positions

    def find_node(self, rank: int) -> str | None:
        """Return the name of the rank's node, if its agent has published it."""
        key = f"{NODES}/{rank // self.local_world}"
        return self.agent.get(key).decode() if self.agent.check([key]) else None


def hang_line(
    earlier: Sequence[Position | None],
    now: Sequence[Position | None],
    waited: str,
    find_node: Callable[[int], str | None] = lambda rank: None,
) -> str:
    """Return the line that names the ranks for which the others wait.

    `earlier` and `now` are positions by rank, half of the time `waited` apart; None for a rank that
    never published one, whose node `find_node` may know.
    """
    published = [position for position in now if position is not None]
    furthest = max(published, key=lambda position: position.passed)
    hindmost = min(published, key=lambda position: position.passed)
    if len(now) == 1:
        return (
            f"rank 0 on {furthest.host} has been stuck at {furthest.what} for {waited}; its stack is in "
            f"{trace_name()}"
        )
    silent = []
    for rank, (before, after) in enumerate(zip(earlier, now)):
        if after is None or (before is not None and before.tick == after.tick):
            silent.append(rank)
    behind = []
    if hindmost.passed < furthest.passed:
        for rank, position in enumerate(now):
            if position is not None and position.passed == hindmost.passed:
                behind.append(rank)
    hung = silent or behind
    if not hung:
        return (
            f"all ranks have waited {waited} at {furthest.what} and none is behind: check the network "
            "between them"
        )
    first_hung = now[hung[0]]
    node = find_node(hung[0]) if first_hung is None else first_hung.host
    hung_ranks = _name_ranks(hung, node)
    is_single = len(hung) == 1
    if silent:
        state = "does not respond" if is_single else "do not respond"
    else:
        state = f"is stuck at {hindmost.what}" if is_single else f"are stuck at {hindmost.what}"
    return f"{hung_ranks} {state}; the other ranks have waited {waited} at {furthest.what}"


def _name_ranks(ranks: list[int], node: str | None) -> str:
    """Return the words for ranks, of which the first is on `node`."""
    name = f"rank {ranks[0]} on {node}" if node else f"rank {ranks[0]}"
    others = ranks[1:]
    if not others:
        return name
    listed = ", ".join(map(str, others[:MAX_LISTED]))
    if len(others) > MAX_LISTED:
        listed += ", …"
    return f"{name} and {len(others)} more (ranks {listed})"
