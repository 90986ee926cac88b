"""Trackers and observers of a training, each in a process that follows the run by its files.

    launcher -> python -m cellmill.track.follow TRAIN -> a fork for each tracker and observer

    train/track/NAME/sent.json      what it has been sent (`Sent`); NAME.observer/ for an observer
    train/track/NAME/log.txt        output of its own library
    train/track/NAME/lock           held while it follows: by one process at a time

What a follower has not sent is sent by `cellmill follow`, or by the next start. All followers die
with the launcher.
"""

import json
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from cellmill.config.load import stored_options
from cellmill.config.parts.trackers import ObserverConfig, Track
from cellmill.config.plugin import Plugin, in_one_line
from cellmill.errors import DataError, Stopped
from cellmill.files import read_json, sha256_file
from cellmill.launch.signals import die_with_parent
from cellmill.runs.folder import TrainFolder, parsed
from cellmill.runs.lock import locked
from cellmill.track.tracker import ArtifactTracker

ARTIFACTS = (
    "plan.json",
    "train/run.json",
    "train/metrics.jsonl",
    "train/status.json",
    "train/cost.json",
    "model/config.json",
    "model/README.md",
    "evaluate/metrics.json",
    "evaluate/umap.tsv",
)
"""Files of a run that trackers get."""
REPORT = "report/index.html"
LINES = 200  # lines sent before the record of what was sent is written again
SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL")
POLL_S = 1.0
FINISH_S = 30.0  # for all followers together
# exit codes of a follower; any other code is not its own
FINISHED = 10  # it has sent everything
WARNED = 11  # it has printed its warning


@dataclass
class Sent:
    """The part of a run that a tracker or observer has; in sent.json of its folder."""

    id: str  # id of the run at the tracker, the same after every resume
    step: int = 0  # newest step that was sent
    kinds: list[str] = field(default_factory=list)  # `kind_of` the lines sent for that step
    checkpoint: int = 0  # step of the newest checkpoint that an observer was given
    artifacts: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each file that was sent, by name."""

    @classmethod
    def read(cls, path: Path, new_id: str) -> "Sent":
        """Return the record at `path`, or a new record. Raise DataError if it is damaged."""
        try:
            return cls(**read_json(path)) if path.exists() else cls(new_id)
        except TypeError:
            raise DataError(
                f"{path}: not a record of what was sent; remove it to send all again"
            ) from None

    def write(self, path: Path) -> None:
        """Replace the record, in a folder that exists.

        It is not fsynced: a lost record costs lines that are sent twice.
        """
        temporary = path.with_name(f".{path.name}.incomplete")
        temporary.write_text(json.dumps(asdict(self)), encoding="utf-8")
        os.replace(temporary, path)

    def is_new(self, line: dict[str, Any]) -> bool:
        """Return True for a line that was not sent. Steps that a killed training repeats were."""
        if line["step"] == self.step:
            return kind_of(line) not in self.kinds
        return bool(line["step"] > self.step)

    def note(self, line: dict[str, Any]) -> None:
        """Count `line` as sent."""
        kinds = self.kinds if line["step"] == self.step else []
        self.step = line["step"]
        self.kinds = [*kinds, kind_of(line)]


def kind_of(line: dict[str, Any]) -> str:
    """Return the kind of a line of metrics.jsonl: a step has at most one line of each kind."""
    if "val_loss" in line:
        return "validation"
    return "skipped" if "skipped" in line else "step"


class CurveTail:
    """New complete lines of metrics.jsonl.

    It starts again at the first line after the file was replaced, as by a resume.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._inode = 0

    def read(self) -> list[dict[str, Any]]:
        """Return lines since the last call; empty without a file. Raise OSError if unreadable."""
        with suppress(FileNotFoundError), open(self._path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._position:
                self._inode = status.st_ino
                self._position = 0
            file.seek(self._position)
            text = file.read()
            complete = text[: text.rfind(b"\n") + 1]
            self._position += len(complete)
            return parsed(complete.splitlines())
        return []


def flat(tree: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Return values of a tree of mappings by path, such as `train.lr`, without empty mappings."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{before}{key}"
        if isinstance(value, dict):
            values |= flat(value, f"{name}.")
        else:
            values[name] = value
    return values


def digests(config: dict[str, Any]) -> dict[str, str]:
    """Return texts that identify data, first weights and code of a run (`Tracker.start`)."""
    identity = config["identity"]
    values = {
        "fingerprint": config["fingerprint"],
        "init_from": identity.get("init_from"),
        "gene_vectors": identity.get("model.gene_vectors"),
        **config.get("environment", {}),
    }
    return {name: str(value) for name, value in values.items() if value is not None}


class Follower:
    """One tracker or observer of the training in `train`, which need not have begun."""

    def __init__(self, train: Path, options: Plugin) -> None:
        self._train = train.resolve()
        self._options = options
        self._observes = isinstance(options, ObserverConfig)
        name = getattr(options, options.key)
        self.folder = self._train / "track" / (f"{name}.observer" if self._observes else name)
        self._record = self.folder / "sent.json"
        self._tail = CurveTail(self._train / "metrics.jsonl")
        self._plugin: Any = None  # the `Tracker` or `Observer`, once there is something to send
        # sent by this process
        self.n_lines = 0
        self.n_artifacts = 0

    def follow(self, ended: Callable[[], str]) -> None:
        """Send what is new until `ended` gives a status, and what came with the end.

        `ended` waits a moment and returns done, stopped or failed, or "" while the training runs.
        Raise what the tracker raises, DataError if another process sends to it, and OSError if the
        run's folder is deleted.
        """
        refusal = "{holder} sends this run to the same tracker"
        with locked(self.make_folder(), refusal, wait_s=10.0):
            self._sent = Sent.read(self._record, secrets.token_hex(16))
            status = ""
            while not status:
                status = ended()
                self.send()
            if not self._observes:
                self._finish(status)

    def make_folder(self) -> Path:
        """Make the follower's folder in the run's folder, which must exist."""
        for path in (self.folder.parent, self.folder):
            path.mkdir(exist_ok=True)
        return self.folder

    def send(self) -> None:
        """Send new lines, and new checkpoints to an observer. The tracker starts with the first."""
        lines = [line for line in self._tail.read() if self._sent.is_new(line)]
        for first in range(0, len(lines), LINES):
            self._start()
            try:
                for line in lines[first : first + LINES]:
                    self._send_line(line)
                    self._sent.note(line)
                    self.n_lines += 1
            finally:  # a plug-in that raises has the lines before
                self._sent.write(self._record)
        if self._observes and self._plugin is not None:
            for checkpoint in TrainFolder(self._train).checkpoints():
                if checkpoint.step > self._sent.checkpoint:
                    self._plugin.on_checkpoint(checkpoint.path)
                    self._sent.checkpoint = checkpoint.step
                    self._sent.write(self._record)

    def _send_line(self, line: dict[str, Any]) -> None:
        if not self._observes:
            scalars = numbers(line)
            if scalars:
                self._plugin.log(line["step"], scalars)
        elif "val_loss" in line:
            self._plugin.on_validation(line)
        else:
            self._plugin.on_step(line)

    def _finish(self, status: str) -> None:
        run = self._train.parent
        paths = {name: run / name for name in ARTIFACTS} | {REPORT: run.parents[1] / REPORT}
        changed = {}
        for name, path in paths.items():
            if self._sent.step and path.is_file():
                digest = sha256_file(path)
                if self._sent.artifacts.get(name) != digest:
                    changed[name] = digest
        if not changed and self._plugin is None:
            return  # no step was trained, or everything was sent before
        self._start()
        tracker = self._plugin
        try:
            if isinstance(tracker, ArtifactTracker):
                for name, digest in changed.items():
                    tracker.artifact(name, paths[name])
                    self._sent.artifacts[name] = digest
                    self.n_artifacts += 1
        finally:  # a refused file must not leave the run as running
            tracker.finish(status)
            self._sent.write(self._record)

    def _start(self) -> None:
        """Make the plug-in when there is something to send."""
        if self._plugin is not None:
            return
        self._plugin = self._options.load()(self._options)
        self._sent.write(self._record)  # the id, before the tracker has it
        if self._observes:
            return
        state = read_json(self._train / "state.json")
        config = read_json(self._train / "run.json") | {
            "steps": state["steps"],
            "world_size": state["world_size"],
            "run": self._train.parent.name,
            "id": self._sent.id,
            "folder": str(self.folder),
        }
        self._plugin.start(config, self._sent.step)


def numbers(line: dict[str, Any]) -> dict[str, int | float]:
    """Return the numbers of a line except its step: the largest of a list over ranks, and no text."""
    scalars = {}
    for name, value in line.items():
        number = max(value) if isinstance(value, list) and value else value
        if isinstance(number, int | float) and name != "step":
            scalars[name] = number
    return scalars


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
    print(without_secrets(text), file=sys.stderr, flush=True)


def _follow(train: Path, options: Plugin, status: int) -> NoReturn:
    """Follow in a child process until a status arrives in the pipe `status`, and end the process."""
    die_with_parent(signal.SIGKILL)
    code = FINISHED
    log = os.open(os.devnull, os.O_RDWR)
    # a library that asks for a key would read the status, which is the supervisor's
    os.dup2(log, 0)
    try:
        follower = Follower(train, options)
        sys.stderr = os.fdopen(os.dup(2), "w")  # not inherited by what the library starts
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
