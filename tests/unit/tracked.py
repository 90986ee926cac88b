"""A run to track, and an installed package with trackers and observers that misbehave as they are
told.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cellmill.config.options import TrainOptions

NAMES = ("tracker_a", "tracker_b", "tracker_c", "tracker_d", "tracker_e", "observer_a")
PACKAGE = """
import json, os, signal, sys, time
from typing import ClassVar, Literal

from cellmill.config.parts.trackers import ObserverConfig, TrackerConfig


class TrackerOptions(TrackerConfig):
    implementation: ClassVar[str] = "toy_tracks:Tracker"
    name: Literal["tracker_a", "tracker_b", "tracker_c", "tracker_d", "tracker_e"]
    path: str
    does: str = ""


class ObserverOptions(ObserverConfig):
    implementation: ClassVar[str] = "toy_tracks:Observer"
    name: Literal["observer_a"]
    path: str
    does: str = ""


class Toy:
    def __init__(self, options):
        self.path, self.does = options.path, options.does

    def _call(self, *call):
        print("a word of the library", sys.stdin.read())
        with open(self.path, "a") as file:
            print(json.dumps(call), file=file)
        if self.does == "raise":
            raise ValueError(f"no account\\n{os.environ['TOY_API_KEY']} at https://me:word@host")
        if self.does == "hang":
            signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
            while True:
                time.sleep(60)
        if self.does == "exit":
            os._exit(0)
        if self.does == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)


class Tracker(Toy):
    def start(self, config, resume_step):
        self._call("start", config, resume_step)

    def log(self, step, scalars):
        self._call("log", step, scalars)

    def artifact(self, name, path):
        self._call("artifact", name, path.stat().st_size)
        if self.does == "refuse files":
            raise ValueError("too large")

    def finish(self, status):
        self._call("finish", status)


class Observer(Toy):
    def on_step(self, line):
        self._call("on_step", line)

    def on_validation(self, line):
        self._call("on_validation", line)

    def on_checkpoint(self, path):
        self._call("on_checkpoint", str(path))
"""


def install(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the package for processes that are started, and for this one, as pip would."""
    info = site / "toy_tracks-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "toy_tracks.py").write_text(PACKAGE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-tracks\nVersion: 1.0\n")
    lines = []
    for kind in ("tracker", "observer"):
        lines.append(f"[cellmill.{kind}]\n")
        for name in NAMES:
            if name.startswith(kind):
                lines.append(f"{name} = toy_tracks:{kind.title()}Options\n")
    (info / "entry_points.txt").write_text("".join(lines))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    )
    monkeypatch.syspath_prepend(str(site))


def tracked_run(folder: Path) -> Path:
    """The training folder of run `one` of 20 steps that has just begun, without trackers."""
    train = folder / "results" / "runs" / "one" / "train"
    train.mkdir(parents=True)
    tree: dict[str, Any] = {name: {} for name in TrainOptions.model_fields} | {
        "train": {"steps": 20}
    }
    made = TrainOptions.model_validate(tree).model_dump(mode="json")
    environment = {"cellmill": "0.1.0", "commit": "c" * 40}
    record = {
        "options": made,
        "identity": {"init_from": None},
        "fingerprint": "f" * 64,
        "environment": environment,
    }
    (train / "run.json").write_text(json.dumps(record))
    (train / "state.json").write_text(
        json.dumps({"state": "running", "steps": 20, "world_size": 1})
    )
    return train


def calls(path: Path) -> list[Any]:
    """What a toy was called with: JSON values, one a line; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
