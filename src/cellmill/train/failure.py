"""Failures of ranks: the one line that a failed rank leaves for the user, and detection of hung
ranks.

All ranks pass the same positions in the same order, so the others wait for whichever has passed the
fewest. Noting a position costs an assignment; a thread publishes it through the store of torchrun's
agent, since rank 0 may be the one that hangs. Time is counted in ticks of that thread, so a job
that was suspended as a whole is not reported.
"""

import faulthandler
import json
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from cellmill.errors import UserError
from cellmill.files import write_text
from cellmill.launch.job import NODE_LOG
from cellmill.launch.rendezvous import NODES, node_name
from cellmill.planner.search import ask, is_out_of_memory
from cellmill.runs.jobs import CONNECTION

PROGRAM = re.compile(  # errors of CUDA that another device would give too
    r"device-side assert|invalid (argument|configuration|device function|device ordinal|value|resource handle)|"
    r"no kernel image|not supported|insufficient driver|too many resources",
    re.IGNORECASE,
)
LOST_PEER = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|broken pipe|tcpstore", re.IGNORECASE
)
START_FACTOR = 5  # longer timeout before the first steps are done: weights, compilation, cold files
JOIN_S = 60.0  # shortest timeout until all ranks have joined: they import torch at different speeds
TICKS = 20  # of the thread within timeout_s
STORE_TIMEOUT_S = 60.0


def error_line(error: BaseException, folder: Path) -> str | None:
    """Return one line that says what went wrong; None when another rank may have failed first."""
    if isinstance(error, UserError):
        return str(error)
    text = " ".join(str(error).split())
    # std::bad_alloc of a backend that read garbage
    if isinstance(error, MemoryError) and _collective(error):
        return _process_group_line(error)
    if is_out_of_memory(error):
        # they hold the model, its activations and the batch
        traceback.clear_frames(error.__traceback__)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        world, local_world = (int(os.environ[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        advice = ask(folder / "run.json", world, local_world, device)
        advice = (
            advice or "lower train.token_budget, or set parallel.activation_checkpointing to full"
        )
        return (
            f"{_who()}: out of memory ({text[:120].rstrip('.') or type(error).__name__}); {advice}"
        )
    if isinstance(error, OSError) and not isinstance(error, ConnectionError):
        return f"{error.filename or folder}: {error.strerror or error}"
    if (
        _is_lost_device(error)
        or isinstance(error, ConnectionError | dist.DistError)
        or LOST_PEER.search(text)
    ):
        return None  # a peer or its node is lost, and says why itself if it could
    return f"{_who()}: {type(error).__name__}: {text[:300]}; its traceback is in {_trace_name()}"


def leave_reason(error_file: Path, error: BaseException, folder: Path) -> None:
    """Write the error's line for the launcher; what another rank may have caused goes to a file of
    its own.
    """
    connection = error_file.with_name(CONNECTION)
    line = error_line(error, folder)
    if line is not None:
        _leave_line(error_file, line)
    elif _is_lost_device(error):  # the cause of what other ranks may have written before
        first = str(error).partition("\n")[0][:200]  # CUDA's advice on debugging follows
        failed = f"its GPU {os.environ.get('LOCAL_RANK', '?')} failed ({first}); if it happens again on this node"
        _leave_line(
            connection,
            f"{_who()}: {failed}, leave it out (sbatch_options: exclude=NODE in the profile)",
        )
    elif not connection.exists():
        _leave_line(connection, _process_group_line(error))


@contextmanager
def trace_file() -> Iterator[TextIO]:
    """The file for this process's tracebacks: the node's log in a cluster job, where others would
    fill the job's log with what followed from the first failure; otherwise stderr.
    """
    try:
        file = open(os.environ[NODE_LOG], "a", encoding="utf-8")  # noqa: SIM115
    except (KeyError, OSError):  # none, or a full disk
        yield sys.stderr
        return
    with file:
        yield file


def _trace_name() -> str:
    return (
        f"{Path(given).name} beside the job's log"
        if (given := os.environ.get(NODE_LOG))
        else "the log"
    )


def give_up(error_file: Path, line: str) -> None:
    """End this process from a thread, while the main thread is in a call that does not return."""
    _leave_line(error_file, line)
    os._exit(1)


def _leave_line(error_file: Path, line: str) -> None:
    try:
        write_text(error_file, line)
    except OSError:  # the shared folder may be full; the log is left
        print(line, file=sys.stderr)
    sys.stderr.flush()


def _is_lost_device(error: BaseException) -> bool:
    """True for failures of an accelerator itself (ECC, a driver's Xid, illegal address, device
    unavailable).
    """
    text = str(error)
    failed = isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and "CUDA error: " in text
    )
    return failed and not is_out_of_memory(error) and PROGRAM.search(text) is None


def _process_group_line(error: BaseException) -> str:
    """Return the line about a collective that failed: rank, collective, message and the settings of
    the network.
    """
    text = " ".join(str(error).split())[:200] or type(error).__name__
    names = sorted(name for name in os.environ if name.startswith(("NCCL_", "GLOO_")))
    settings = (
        ", ".join(f"{name}={os.environ[name]}" for name in names) or "no setting of the network"
    )
    return f"{_who()}: {_collective(error) or 'a collective'} failed: {text} ({settings})"


def _collective(error: BaseException) -> str | None:
    frames = traceback.extract_tb(error.__traceback__)
    return next(
        (frame.name for frame in reversed(frames) if frame.filename == distributed_c10d.__file__),
        None,
    )


def _who() -> str:
    return f"rank {os.environ.get('RANK', '?')} on {node_name()}"


@dataclass(frozen=True)
class Position:
    passed: int  # number of positions passed
    what: str
    tick: int  # of its thread: it stands still while the process is stopped or its node is lost
    host: str
    saving: bool = False  # a checkpoint is being written, for which there is no timeout


class HangWatch:
    """Position of this rank, watched from `start` on."""

    _thread: threading.Thread

    def __init__(self) -> None:
        self.passed = 0
        self.what = "joining the process group"
        self.warm = False
        self.saving: Callable[[], bool] = lambda: False
        """Whether this rank is writing a checkpoint: others may wait for it longer than
        `timeout_s`.
        """
        self._closing = threading.Event()

    def at(self, what: str) -> None:
        """Note that this rank has reached `what`: a collective, or the work before one. Every rank,
        in one order, first when it has joined.
        """
        self.what = what
        self.passed += 1

    def start(self, timeout_s: float, end: Callable[[str], None]) -> None:
        """Start the thread; it calls `end` with a line that names the hung rank. Needs no group
        yet.
        """
        rank, world, local_world = (
            int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        )
        store: dist.Store = dist.HashStore()
        if world > 1:
            address = os.environ["MASTER_ADDR"]
            port = int(os.environ["MASTER_PORT"])
            # a connection of its own: a blocking call holds the lock of torch's
            store = dist.TCPStore(
                address, port, is_master=False, timeout=timedelta(seconds=STORE_TIMEOUT_S)
            )
        arguments = (store, rank, world, local_world, timeout_s, end)
        self._thread = threading.Thread(target=self._run, args=arguments, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(
        self,
        agent: dist.Store,
        rank: int,
        world: int,
        local_world: int,
        timeout_s: float,
        end: Callable[[str], None],
    ) -> None:
        store = dist.PrefixStore("watch", agent)
        host = node_name()
        keys = [str(other) for other in range(world)]
        passed = -1
        stalled = 0
        tick = 0
        earlier: list[Position | None] = []

        def positions() -> list[Position | None]:
            return [
                Position(**json.loads(store.get(key))) if store.check([key]) else None
                for key in keys
            ]

        try:
            while not self._closing.wait(timeout_s / TICKS):
                tick += 1
                mine = Position(self.passed, self.what, tick, host, self.saving())
                store.set(str(rank), json.dumps(asdict(mine)))
                stalled = stalled + 1 if mine.passed == passed else 0
                passed = mine.passed
                limit = TICKS
                source = "train.timeout_s"
                if not mine.passed and timeout_s < JOIN_S:
                    limit = round(TICKS * JOIN_S / timeout_s)
                    source = "the least time to join"
                elif mine.passed and not self.warm:
                    limit = TICKS * START_FACTOR
                    source = f"{START_FACTOR} x train.timeout_s until the first steps"
                if stalled == limit // 2:
                    earlier = positions()
                if stalled > limit:
                    now = positions()
                    if any(position is not None and position.saving for position in now):
                        stalled = 0
                        continue
                    if mine.passed == min(
                        position.passed for position in now if position is not None
                    ):
                        with trace_file() as file:
                            faulthandler.dump_traceback(file)
                    silent = [other for other, position in enumerate(now) if position is None][:8]
                    # as their agents published
                    named = {other: f"{NODES}/{other // local_world}" for other in silent}
                    hosts = {
                        other: agent.get(key).decode()
                        for other, key in named.items()
                        if agent.check([key])
                    }
                    end(
                        hang_line(
                            earlier, now, f"{timeout_s * limit / TICKS:g} s ({source})", hosts
                        )
                    )
                    return
        except dist.DistError:  # the agent is gone, and is ending this process
            return


def hang_line(
    earlier: list[Position | None],
    now: list[Position | None],
    waited: str,
    hosts: Mapping[int, str] | None = None,
) -> str:
    """Return the line that names the ranks for which the others wait.

    `earlier` and `now` are positions by rank, half of the time `waited` apart; None for a rank that
    never published one, whose node may be in `hosts`.
    """
    known = {rank: position for rank, position in enumerate(now) if position is not None}
    furthest, hindmost = (
        most(known.values(), key=lambda position: position.passed) for most in (max, min)
    )
    silent = [
        rank
        for rank, (a, b) in enumerate(zip(earlier, now))
        if b is None or (a is not None and a.tick == b.tick)
    ]
    behind = [
        rank
        for rank, position in known.items()
        if hindmost.passed == position.passed < furthest.passed
    ]
    if len(now) == 1:
        stuck = f"rank 0 on {furthest.host} has been stuck at {furthest.what} for {waited}"
        return f"{stuck}; its stack is in {_trace_name()}"
    hung = silent or behind
    if not hung:
        return f"all ranks have waited {waited} at {furthest.what} and none is behind: check the network between them"
    node = known[hung[0]].host if hung[0] in known else (hosts or {}).get(hung[0])
    who = f"rank {hung[0]}" + (f" on {node}" if node else "")
    others = hung[1:]
    if others:
        who += f" and {len(others)} more (ranks {', '.join(map(str, others[:8]))}{', …' if len(others) > 8 else ''})"
    do, be = ("do", "are") if others else ("does", "is")
    state = f"{do} not respond" if silent else f"{be} stuck at {hindmost.what}"
    return f"{who} {state}; the other ranks have waited {waited} at {furthest.what}"
