"""Trackers and observers of a training, each in a process of its own beside the launcher.

    launcher -> python -m cellmill.track.followers TRAIN -> a fork for each tracker and observer

A follower that raises, hangs, crashes or has no network is one warning on stderr and nothing else: the training knows
nothing of it. At the end of the training followers get FINISH_S to send what came last; what is not sent then is sent
by `cellmill follow RUN --to NAME`, or by the next start. All of them die with the launcher.
"""

import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from cellmill.config.load import stored_options
from cellmill.config.plugin import Plugin
from cellmill.config.track import Track
from cellmill.errors import Stopped
from cellmill.files import read_json
from cellmill.launch.processes import die_with_parent
from cellmill.registry import in_one_line
from cellmill.track.follower import Follower, without_secrets

POLL_S = 1.0
FINISH_S = 30.0
"""For all followers together."""
FINISHED, WARNED = 10, 11
"""Exit codes of a follower: it has sent all, or has printed its warning. Any other is not its own."""


@contextmanager
def followed(train: Path, track: Track, finish_s: float = FINISH_S) -> Iterator[None]:
    """Run the trackers and observers of `track`, as recorded in run.json of `train`, while the block trains there."""
    if not track.to and not track.observers:
        yield
        return
    command = [sys.executable, "-m", "cellmill.track.followers", str(train), str(finish_s)]
    followers = subprocess.Popen(
        command, stdin=subprocess.PIPE, start_new_session=True, preexec_fn=lambda: die_with_parent(signal.SIGKILL)
    )
    status = "failed"
    try:
        yield
        status = "done"
    except Stopped:
        status = "stopped"
        raise
    finally:
        with suppress(BrokenPipeError, subprocess.TimeoutExpired):
            followers.communicate(status.encode(), timeout=finish_s + 10)
        followers.kill()
        followers.wait()


@dataclass
class _Child:
    options: Plugin
    pid: int
    asked: int
    """Pipe on which the child reads the status."""


def supervise(train: Path, finish_s: float) -> None:
    """Run the followers of the run in `train` until stdin says how the training ended, or is closed."""
    track = stored_options(read_json(train / "run.json")["options"], str(train / "run.json")).track
    children = [_fork(train, options) for options in (*track.to.values(), *track.observers.values())]
    while children and not _readable(0, POLL_S):
        children = [child for child in children if not _has_ended(child, train)]
    if not children:
        return
    status = os.read(0, 100)
    if not status:  # the launcher is gone; the next one goes on
        return
    for child in children:
        with suppress(BrokenPipeError):
            os.write(child.asked, status)
    deadline = time.monotonic() + finish_s
    while children and time.monotonic() < deadline:
        time.sleep(0.02)
        children = [child for child in children if not _has_ended(child, train)]
    for child in children:
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
        warn(train, child.options, f"did not finish within {finish_s:g} s")


def warn(train: Path, options: Plugin, problem: str) -> None:
    """Print the one warning about a tracker or observer."""
    name, run = getattr(options, options.key), train.resolve().parent.name
    rest = "" if options.kind == "observer" else f", and `cellmill follow {run} --to {name}` sends the rest"
    text = f"warning: {options.kind} {name!r} {problem}; metrics.jsonl is complete{rest}"
    print(without_secrets(text), file=sys.stderr, flush=True)


def _fork(train: Path, options: Plugin) -> _Child:
    """Fork the follower of a tracker or observer; this process has one thread, so a fork is safe."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writes)
        _follow(train, options, reads)
    os.close(reads)
    return _Child(options, pid, writes)


def _follow(train: Path, options: Plugin, asked: int) -> NoReturn:
    """Follow in a child process, and end it."""
    die_with_parent(signal.SIGKILL)
    code, log = FINISHED, os.open(os.devnull, os.O_RDWR)
    os.dup2(log, 0)  # a library that asks for a key would read the status, which is the supervisor's
    try:
        follower = Follower(train, options)
        sys.stderr = os.fdopen(os.dup(2), "w")  # not inherited by what the library starts
        log = os.open(follower.made_folder() / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        follower.follow(lambda: os.read(asked, 100).decode() if _readable(asked, POLL_S) else "")
    except BaseException as error:  # also SystemExit of a library
        code = WARNED
        os.write(log, without_secrets(traceback.format_exc()).encode())
        warn(train, options, f"failed and is dropped: {_told(options, error)}")
    finally:
        os._exit(code)  # threads and exit handlers of a library may hang


def _told(options: Plugin, error: BaseException) -> str:
    if isinstance(error.__cause__, ModuleNotFoundError):
        return f"{error.__cause__}; pip install 'cellmill[{getattr(options, options.key)}]'"
    return in_one_line(error)


def _readable(descriptor: int, timeout_s: float) -> bool:
    return bool(select.select([descriptor], [], [], timeout_s)[0])


def _has_ended(child: _Child, train: Path) -> bool:
    """True if the child has ended; prints the warning of one that could not."""
    pid, status = os.waitpid(child.pid, os.WNOHANG)
    if pid == 0:
        return False
    code = os.waitstatus_to_exitcode(status)
    if code not in (FINISHED, WARNED):
        ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        warn(train, child.options, f"failed and is dropped: its process ended with {ended}")
    return True


if __name__ == "__main__":
    supervise(Path(sys.argv[1]), float(sys.argv[2]))
