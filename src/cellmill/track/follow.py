"""Processes of the trackers and observers of a training, each of which follows the run's files.

    launcher -> python -m cellmill.track.follow TRAIN -> a fork for each tracker and observer

    train/track/NAME/sent.json      record of what was sent (`Sent`); NAME.observer/ for an observer
    train/track/NAME/log.txt        output of the tracker's library
    train/track/NAME/lock           held by the one process that follows

`cellmill follow` or the next start sends what a follower has not sent. All followers die with the
launcher.
"""

import os
import re
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from cellmill.config.load import stored_options
from cellmill.config.parts.trackers import Track
from cellmill.config.plugin import Plugin, in_one_line
from cellmill.errors import Stopped
from cellmill.files import read_json
from cellmill.launch.signals import die_with_parent
from cellmill.track.follower import Follower

SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL")
POLL_S = 1.0
FINISH_S = 30.0  # for all followers together
# exit codes of a follower; any other code is not its own
FINISHED = 10  # it has sent everything
WARNED = 11  # it has printed its warning


def without_secrets(text: str) -> str:
    """Return `text` without passwords in URLs and values of environment variables named like keys."""
    for name, value in os.environ.items():
        if SECRET.search(name.upper()) and len(value) >= 6:
            text = text.replace(value, "***")
    return re.sub(r"(?<=://)[^/\s@]+@", "***@", text)


@contextmanager
def followed(train: Path, track: Track, finish_s: float = FINISH_S) -> Iterator[None]:
    """Run the trackers and observers of `track` while the block trains in the folder `train`."""
    if not track.to and not track.observers:
        yield
        return
    command = [sys.executable, "-m", "cellmill.track.follow", str(train), str(finish_s)]
    followers = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: die_with_parent(signal.SIGKILL),
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


def supervise(train: Path, finish_s: float) -> None:
    """Run the followers of a run until stdin says how the training ended, or is closed."""
    record = train / "run.json"
    track = stored_options(read_json(record)["options"], str(record)).track
    children = dict[int, tuple[Plugin, int]]()
    """Options of each follower, and the pipe for how the training ended, by process."""
    for options in (*track.to.values(), *track.observers.values()):
        reads, writes = os.pipe()
        pid = os.fork()
        if pid == 0:  # this process has one thread, so a fork is safe
            os.close(writes)
            _follow(train, options, reads)
        os.close(reads)
        children[pid] = options, writes

    def reap() -> None:
        """Forget children that have ended, and warn of a child that could not warn itself."""
        for pid, (options, _) in list(children.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            del children[pid]
            code = os.waitstatus_to_exitcode(status)
            if code not in (FINISHED, WARNED):
                how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                warn(train, options, f"failed and is dropped: its process ended with {how}")

    while children and not _readable(0, POLL_S):
        reap()
    status = os.read(0, 100) if children else b""
    if not status:  # all have ended, or the launcher is gone; the next launcher continues
        return
    for _, pipe in children.values():
        with suppress(BrokenPipeError):
            os.write(pipe, status)
    deadline = time.monotonic() + finish_s
    while children and time.monotonic() < deadline:
        time.sleep(0.02)
        reap()
    for pid, (options, _) in children.items():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        warn(train, options, f"did not finish within {finish_s:g} s")


def warn(train: Path, options: Plugin, problem: str) -> None:
    """Print the one warning about a tracker or observer."""
    name = getattr(options, options.key)
    text = f"warning: {options.kind} {name!r} {problem}; metrics.jsonl is complete"
    if options.kind != "observer":
        run = train.resolve().parent.name
        text += f", and `cellmill follow {run} --to {name}` sends the rest"
    print(without_secrets(text), file=sys.stderr)


def _follow(train: Path, options: Plugin, status: int) -> NoReturn:
    """Follow in a child process until a status arrives in the pipe `status`, and end the process."""
    die_with_parent(signal.SIGKILL)
    code = FINISHED
    log = os.open(os.devnull, os.O_RDWR)
    # a library that asks for a key would read the status, which is the supervisor's
    os.dup2(log, 0)
    try:
        follower = Follower(train, options)
        sys.stderr = os.fdopen(os.dup(2), "w", 1)  # not inherited by what the library starts
        path = follower.make_folder() / "log.txt"
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        follower.follow(lambda: os.read(status, 100).decode() if _readable(status, POLL_S) else "")
    except BaseException as error:  # also SystemExit of a library
        code = WARNED
        os.write(log, without_secrets(traceback.format_exc()).encode())
        message = in_one_line(error)
        if isinstance(error.__cause__, ModuleNotFoundError):
            message = f"{error.__cause__}; pip install 'cellmill[{getattr(options, options.key)}]'"
        warn(train, options, f"failed and is dropped: {message}")
    finally:
        os._exit(code)  # threads and exit handlers of a library may hang


def _readable(descriptor: int, timeout_s: float) -> bool:
    return bool(select.select([descriptor], [], [], timeout_s)[0])


if __name__ == "__main__":
    supervise(Path(sys.argv[1]), float(sys.argv[2]))
