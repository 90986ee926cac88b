"""A tracker or observer of a training run, which follows the run only through its files.

train/track/NAME/sent.json      what it has been sent (`track.sent`); NAME.observer/ for an observer
train/track/NAME/log.txt        output of its own library
train/track/NAME/lock           held while it follows: by one process at a time
"""

import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cellmill.config.plugin import Plugin
from cellmill.config.track import ObserverConfig
from cellmill.files import read_json, sha256_file
from cellmill.runs.folder import TrainFolder
from cellmill.runs.lock import locked
from cellmill.track.observer import ObserverTracker
from cellmill.track.sent import CurveTail, Sent
from cellmill.track.tracker import ArtifactTracker, Tracker

ARTIFACTS = (
    *("plan.json", "train/run.json", "train/metrics.jsonl", "train/status.json", "train/cost.json"),
    *("model/config.json", "model/README.md", "evaluate/metrics.json", "evaluate/umap.tsv"),
)
"""Files of a run that trackers get, by name."""
REPORT = "report/index.html"
LINES = 200
"""Lines sent before the record of what was sent is written again."""
SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL")


def track_folder(train: Path, options: Plugin) -> Path:
    """Folder of a tracker's or observer's own files in the training folder."""
    name = getattr(options, options.key)
    return train / "track" / (f"{name}.observer" if isinstance(options, ObserverConfig) else name)


class Follower:
    """One tracker or observer of the training in `train`, which need not have begun."""

    def __init__(self, train: Path, options: Plugin) -> None:
        self._train, self._options = train.resolve(), options
        self.folder = track_folder(self._train, options)
        self._record = self.folder / "sent.json"
        self._tail = CurveTail(self._train / "metrics.jsonl")
        self._tracker: Tracker | ObserverTracker | None = None
        self.n_lines = self.n_artifacts = 0  # sent by this process

    def follow(self, ended: Callable[[], str]) -> None:
        """Send what is new until `ended` gives a status, and what came with the end.

        `ended` waits a moment and returns done, stopped or failed; empty while the training goes on. Raises what the
        tracker raises, DataError if another process sends to it, and OSError if the run's folder is deleted.
        """
        with locked(self.made_folder(), "{holder} sends this run to the same tracker", wait_s=10.0):
            self._sent = Sent.read(self._record, secrets.token_hex(16))
            status = ""
            while not status:
                status = ended()
                self.send()
            self._finish(status)

    def made_folder(self) -> Path:
        """The follower's folder. Made in the run's own, which must exist."""
        for path in (self.folder.parent, self.folder):
            path.mkdir(exist_ok=True)
        return self.folder

    def send(self) -> None:
        """Send new lines, and tell an observer of new checkpoints. The tracker starts with the first."""
        lines = [line for line in self._tail.read() if self._sent.is_new(line)]
        for first in range(0, len(lines), LINES):
            tracker = self._started()
            try:
                for line in lines[first : first + LINES]:
                    scalars = {name: value for name, value in line.items() if name != "step"}
                    if not isinstance(tracker, ObserverTracker):
                        scalars = numbers(scalars)
                    if scalars:
                        tracker.log(line["step"], scalars)
                    self._sent.note(line)
                    self.n_lines += 1
            finally:  # a tracker that raises has the lines before
                self._sent.write(self._record)
        if isinstance(self._tracker, ObserverTracker):
            newest = self._tracker.checkpoints(self._sent.checkpoint)
            if newest != self._sent.checkpoint:
                self._sent.checkpoint = newest
                self._sent.write(self._record)

    def _finish(self, status: str) -> None:
        changed = self._changed_artifacts() if self._sent.step else {}
        if changed:
            self._started()
        if self._tracker is None:
            return  # no step was trained, or all was sent before
        try:
            if isinstance(self._tracker, ArtifactTracker):
                for name, (path, digest) in changed.items():
                    self._tracker.artifact(name, path)
                    self._sent.artifacts[name] = digest
                    self.n_artifacts += 1
        finally:  # a refused file must not leave the run as running
            self._tracker.finish(status)
            self._sent.write(self._record)

    def _changed_artifacts(self) -> dict[str, tuple[Path, str]]:
        """Files that exist and are not as they were sent: paths and SHA-256 by name."""
        run = self._train.parent
        paths = {name: run / name for name in ARTIFACTS} | {REPORT: run.parents[1] / REPORT}
        files = {name: (path, sha256_file(path)) for name, path in paths.items() if path.is_file()}
        return {name: file for name, file in files.items() if self._sent.artifacts.get(name) != file[1]}

    def _started(self) -> Tracker | ObserverTracker:
        if self._tracker is None:
            made = self._options.load()(self._options)
            is_observer = isinstance(self._options, ObserverConfig)
            self._tracker = ObserverTracker(made, TrainFolder(self._train)) if is_observer else made
            self._sent.write(self._record)  # the id, before anything has it
            self._tracker.start(self._config(), self._sent.step)
        return self._tracker

    def _config(self) -> dict[str, Any]:
        """`config` of `Tracker.start`."""
        record, state = read_json(self._train / "run.json"), read_json(self._train / "state.json")
        own = {"run": self._train.parent.name, "id": self._sent.id, "folder": str(self.folder)}
        return record | {key: state[key] for key in ("steps", "world_size")} | own


def numbers(scalars: dict[str, Any]) -> dict[str, int | float]:
    """Numbers of a line: the largest of a list over ranks, and no text."""
    largest = {name: max(value) if isinstance(value, list) and value else value for name, value in scalars.items()}
    return {name: value for name, value in largest.items() if isinstance(value, int | float)}


def without_secrets(text: str) -> str:
    """`text` without values of environment variables that are named like keys, and without passwords in URLs."""
    for name, value in os.environ.items():
        if SECRET.search(name.upper()) and len(value) >= 6:
            text = text.replace(value, "***")
    return re.sub(r"(?<=://)[^/\s@]+@", "***@", text)
