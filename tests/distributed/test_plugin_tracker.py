"""An installed tracker in real training processes: what it is told, and that its failure is not the run's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cellmill.runs.progress import read_lines
from tests.distributed.conftest import options

PACKAGE = """
import json
from typing import ClassVar, Literal

from cellmill.config.parts.trackers import TrackerConfig


class Options(TrackerConfig):
    implementation: ClassVar[str] = "toy_tracker:Tracker"
    name: Literal["toy", "broken"] = "toy"
    path: str | None = None


class Tracker:
    def __init__(self, options):
        self._file = open(options.path, "a")  # raises where there is no path

    def _write(self, *call):
        print(json.dumps(call), file=self._file, flush=True)

    def start(self, config, resume_step):
        self._write("start", [config["run"], config["steps"], config["options"]["train"]["lr"]], resume_step)

    def log(self, step, scalars):
        self._write("log", step, scalars)

    def finish(self, status):
        self._write("finish", status)
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with two trackers, as pip would install it."""
    site = tmp_path / "site"
    info = site / "toy_tracker-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "toy_tracker.py").write_text(PACKAGE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-tracker\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[cellmill.tracker]\ntoy = toy_tracker:Options\nbroken = toy_tracker:Options\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])]))


def train(corpus: str, out: Path, calls: Path, **sections: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    track = {"to": {"broken": None, "toy": {"path": str(calls)}}}
    tree = options(**sections) | {"track": track}
    command = [sys.executable, "-m", "cellmill.cli", "train", "--options", json.dumps(tree), "--out", str(out)]
    command += ["--manifest", f"{corpus}/shards/manifest.json", "--vocabulary", f"{corpus}/vocabulary.tsv"]
    return subprocess.run([*command, "--nproc-per-node", "2"], capture_output=True, text=True, timeout=300)


def test_an_installed_tracker_gets_every_number_and_a_broken_one_is_one_warning(
    corpus: str, tmp_path: Path, installed: None
) -> None:
    out, calls = tmp_path / "results" / "one" / "train", tmp_path / "calls.jsonl"
    done = train(corpus, out, calls, train={"steps": 5, "val_every_steps": 5})
    assert done.returncode == 0, done.stderr
    start, *lines, finish = read_calls(calls)
    assert start == ["start", ["one", 5, 1e-3], 0]
    curve = read_lines(out / "metrics.jsonl")
    assert [step for _, step, _ in lines] == [1, 2, 3, 4, 5, 5] == [line["step"] for line in curve]
    for (_, _, scalars), line in zip(lines, curve):
        of_ranks = {name: max(value) for name, value in line.items() if isinstance(value, list)}
        assert {"step": line["step"]} | scalars == line | of_ranks
    assert finish == ["finish", "done"]
    warnings = [line for line in done.stderr.splitlines() if "warning: tracker" in line]
    assert len(warnings) == 1
    assert "tracker 'broken' failed and is dropped: TypeError" in warnings[0]


@pytest.mark.full
def test_an_installed_tracker_is_told_that_the_run_failed(corpus: str, tmp_path: Path, installed: None) -> None:
    out, calls = tmp_path / "results" / "one" / "train", tmp_path / "calls.jsonl"
    done = train(corpus, out, calls, train={"steps": 50, "lr": 1e30, "warmup_steps": 0, "max_bad_steps": 1})
    assert done.returncode == 2
    assert "train.max_bad_steps" in done.stderr
    assert read_calls(calls)[-1] == ["finish", "failed"]


def read_calls(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]
