"""A follower: it sends the new lines, checkpoints and files of a run to one tracker or observer."""

import json
import os
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cellmill.config.parts.trackers import ObserverConfig
from cellmill.config.plugin import Plugin
from cellmill.errors import DataError
from cellmill.files import read_json, sha256_file
from cellmill.runs.folder import TrainFolder
from cellmill.runs.lock import locked
from cellmill.track.metric_lines import CurveTail, name_kind, select_scalars
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


@dataclass
class Sent:
    """The part of a run that a tracker or observer has; in sent.json of its folder."""

    id: str  # id of the run at the tracker, the same after every resume
    step: int = 0  # newest step that was sent
    kinds: list[str] = field(default_factory=list)  # `name_kind` of the lines sent for that step
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
            return name_kind(line) not in self.kinds
        return bool(line["step"] > self.step)

    def note(self, line: dict[str, Any]) -> None:
        """Count `line` as sent."""
        kinds = self.kinds if line["step"] == self.step else []
        self.step = line["step"]
        self.kinds = [*kinds, name_kind(line)]


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
            scalars = select_scalars(line)
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
