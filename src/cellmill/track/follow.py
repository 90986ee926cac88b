"""Trackers and observers of a training, each in its own process beside the launcher, following the
run by its files.

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

ARTIFACTS = (  # files of a run that trackers get, by name
    *("plan.json", "train/run.json", "train/metrics.jsonl", "train/status.json", "train/cost.json"),
    *("model/config.json", "model/README.md", "evaluate/metrics.json", "evaluate/umap.tsv"),
)
REPORT = "report/index.html"
LINES = 200  # lines sent before the record of what was sent is written again
SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL")
POLL_S = 1.0
FINISH_S = 30.0  # for all followers together


@dataclass
class Sent:
    """The part of a run that a tracker or observer has; in sent.json of its folder."""

    id: str  # of the run at the tracker, the same after every resume
    step: int = 0  # newest step that was sent
    # kinds of lines sent for that step, see `kind_of`
    kinds: list[str] = field(default_factory=list)
    checkpoint: int = 0  # step of the newest checkpoint that an observer was given
    # SHA-256 of each file that was sent, by name
    artifacts: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, new_id: str) -> "Sent":
        """The record at `path`; a new one if there is none. Raises DataError if it is damaged."""
        try:
            return cls(**read_json(path)) if path.exists() else cls(new_id)
        except TypeError:
            raise DataError(
                f"{path}: not a record of what was sent; remove it to send all again"
            ) from None

    def write(self, path: Path) -> None:
        """Replace the record. Not fsynced: a lost one costs lines that are sent twice. Makes no
        folder.
        """
        temporary = path.with_name(f".{path.name}.incomplete")
        temporary.write_text(json.dumps(asdict(self)), encoding="utf-8")
        os.replace(temporary, path)

    def is_new(self, line: dict[str, Any]) -> bool:
        """True for a line that was not sent. Steps that a killed training repeats were."""
        return line["step"] > self.step or (
            line["step"] == self.step and kind_of(line) not in self.kinds
        )

    def note(self, line: dict[str, Any]) -> None:
        """Count `line` as sent."""
        kinds = self.kinds if line["step"] == self.step else []
        self.step = line["step"]
        self.kinds = [*kinds, kind_of(line)]


def kind_of(line: dict[str, Any]) -> str:
    """Kind of a line of metrics.jsonl: step, validation or skipped. A step has at most one of each."""
    return "validation" if "val_loss" in line else "skipped" if "skipped" in line else "step"


class CurveTail:
    """New complete lines of metrics.jsonl; from the first one again after the file was replaced, as
    by a resume.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._inode = 0

    def read(self) -> list[dict[str, Any]]:
        """Lines since the last call; empty if there is no file. Raises OSError if it cannot be
        read.
        """
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
    """Values of a tree of mappings by their path, such as `train.lr`; empty mappings are left out."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{before}{key}"
        values |= flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return values


def digests(config: dict[str, Any]) -> dict[str, str]:
    """Texts that identify the data, the first weights and the code of a run, from `config` of
    `Tracker.start`.
    """
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
        self.folder = (
            self._train / "track" / (getattr(options, options.key) + ".observer" * self._observes)
        )
        self._record = self.folder / "sent.json"
        self._tail = CurveTail(self._train / "metrics.jsonl")
        self._plugin: Any = None  # the `Tracker` or `Observer`, once there is something to send
        self.n_lines = self.n_artifacts = 0  # sent by this process

    def follow(self, ended: Callable[[], str]) -> None:
        """Send what is new until `ended` gives a status, and what came with the end.

        `ended` waits a moment and returns done, stopped or failed; empty while the training goes
        on. Raises what the tracker raises, DataError if another process sends to it, and OSError if
        the run's folder is deleted.
        """
        with locked(self.made_folder(), "{holder} sends this run to the same tracker", wait_s=10.0):
            self._sent = Sent.read(self._record, secrets.token_hex(16))
            while not (status := ended()):
                self.send()
            self.send()
            if not self._observes:
                self._finish(status)

    def made_folder(self) -> Path:
        """The follower's folder. Made in the run's own, which must exist."""
        for path in (self.folder.parent, self.folder):
            path.mkdir(exist_ok=True)
        return self.folder

    def send(self) -> None:
        """Send new lines, and new checkpoints to an observer. The tracker starts with the first."""
        lines = [line for line in self._tail.read() if self._sent.is_new(line)]
        for first in range(0, len(lines), LINES):
            plugin = self._started()
            try:
                for line in lines[first : first + LINES]:
                    if self._observes:
                        (plugin.on_validation if "val_loss" in line else plugin.on_step)(line)
                    elif scalars := numbers(line):
                        plugin.log(line["step"], scalars)
                    self._sent.note(line)
                    self.n_lines += 1
            finally:  # one that raises has the lines before
                self._sent.write(self._record)
        if self._observes and self._plugin is not None:
            for checkpoint in TrainFolder(self._train).checkpoints():
                if checkpoint.step > self._sent.checkpoint:
                    self._plugin.on_checkpoint(checkpoint.path)
                    self._sent.checkpoint = checkpoint.step
                    self._sent.write(self._record)

    def _finish(self, status: str) -> None:
        run = self._train.parent
        paths = {name: run / name for name in ARTIFACTS} | {REPORT: run.parents[1] / REPORT}
        hashes = (
            {name: sha256_file(path) for name, path in paths.items() if path.is_file()}
            if self._sent.step
            else {}
        )
        changed = {
            name: digest
            for name, digest in hashes.items()
            if self._sent.artifacts.get(name) != digest
        }
        if not changed and self._plugin is None:
            return  # no step was trained, or all was sent before
        tracker = self._started()
        try:
            if isinstance(tracker, ArtifactTracker):
                for name, digest in changed.items():
                    tracker.artifact(name, paths[name])
                    self._sent.artifacts[name] = digest
                    self.n_artifacts += 1
        finally:  # a refused file must not leave the run as running
            tracker.finish(status)
            self._sent.write(self._record)

    def _started(self) -> Any:
        if self._plugin is None:
            self._plugin = self._options.load()(self._options)
            self._sent.write(self._record)  # the id, before anything has it
            if not self._observes:
                record = read_json(self._train / "run.json")
                state = read_json(self._train / "state.json")
                config = record | {key: state[key] for key in ("steps", "world_size")}
                config |= {
                    "run": self._train.parent.name,
                    "id": self._sent.id,
                    "folder": str(self.folder),
                }
                self._plugin.start(config, self._sent.step)
        return self._plugin


def numbers(line: dict[str, Any]) -> dict[str, int | float]:
    """Numbers of a line but its step: the largest of a list over ranks, and no text."""
    largest = {
        name: max(value) if isinstance(value, list) and value else value
        for name, value in line.items()
    }
    return {
        name: value
        for name, value in largest.items()
        if isinstance(value, int | float) and name != "step"
    }


def without_secrets(text: str) -> str:
    """`text` without values of environment variables that are named like keys, and without
    passwords in URLs.
    """
    for name, value in os.environ.items():
        if SECRET.search(name.upper()) and len(value) >= 6:
            text = text.replace(value, "***")
    return re.sub(r"(?<=://)[^/\s@]+@", "***@", text)


FINISHED, WARNED = 10, 11
"""Exit codes of a follower: it has sent all, or has printed its warning. Any other is not its own.
"""


@contextmanager
def followed(train: Path, track: Track, finish_s: float = FINISH_S) -> Iterator[None]:
    """Run the trackers and observers of `track`, as recorded in run.json of `train`, while the
    block trains there.
    """
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
    """Run the followers of the run in `train` until stdin says how the training ended, or is
    closed.
    """
    track = stored_options(read_json(train / "run.json")["options"], str(train / "run.json")).track
    # options of each follower by its process, and the pipe on which it reads how the training ended
    children = dict[int, tuple[Plugin, int]]()
    for options in (*track.to.values(), *track.observers.values()):
        reads, writes = os.pipe()
        pid = os.fork()
        if pid == 0:  # this process has one thread, so a fork is safe
            os.close(writes)
            _follow(train, options, reads)
        os.close(reads)
        children[pid] = options, writes

    def reap() -> None:
        """Forget children that have ended, with a warning of one that could print none."""
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
    if not status:  # all have ended, or the launcher is gone; the next one continues
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
    name, run = getattr(options, options.key), train.resolve().parent.name
    rest = (
        ""
        if options.kind == "observer"
        else f", and `cellmill follow {run} --to {name}` sends the rest"
    )
    text = f"warning: {options.kind} {name!r} {problem}; metrics.jsonl is complete{rest}"
    print(without_secrets(text), file=sys.stderr, flush=True)


def _follow(train: Path, options: Plugin, status: int) -> NoReturn:
    """Follow in a child process until its pipe `status` has one, and end the process."""
    die_with_parent(signal.SIGKILL)
    code = FINISHED
    log = os.open(os.devnull, os.O_RDWR)
    # a library that asks for a key would read the status, which is the supervisor's
    os.dup2(log, 0)
    try:
        follower = Follower(train, options)
        sys.stderr = os.fdopen(os.dup(2), "w")  # not inherited by what the library starts
        log = os.open(
            follower.made_folder() / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )
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
