"""Installed toys in real training processes, and the checks that an author of a plug-in calls."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cellmill.runs.folder import read_lines
from tests.conftest import PLUGIN
from tests.distributed.command import Run
from tests.distributed.conftest import options


@pytest.fixture
def installed(plugins: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The toys, and an observer among them that fails at its first step."""
    monkeypatch.setenv("PYTHONPATH", plugins["PYTHONPATH"])


def tracked(tmp_path: Path, **steps: Any) -> tuple[Path, Path, dict[str, Any]]:
    """Folder of a run, file of a tracker, and options with that tracker and a broken observer."""
    out = tmp_path / "results" / "one" / "train"
    calls = tmp_path / "calls.jsonl"
    track = {
        "to": {"toy_file": {"path": str(calls)}},
        "observers": {"toy_steps": {"path": str(tmp_path)}},
    }
    return out, calls, options(train=steps) | {"track": track}


def test_a_broken_observer_costs_one_warning(corpus: str, tmp_path: Path, installed: None) -> None:
    out, calls, given = tracked(tmp_path, steps=5, val_every_steps=5)
    _, error = Run(corpus, out).train(given, nproc_per_node=2)
    start, *lines, finish = read_calls(calls)
    expected = {"start": "encoder", "run": "one", "steps": 5, "resume_step": 0}
    assert start == expected
    assert finish == {"finish": "done"}
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 5]
    curve = read_lines(out / "metrics.jsonl")
    for line, written in zip(lines, curve, strict=True):
        for name, value in written.items():
            if isinstance(value, list):  # a number of each rank: the tracker gets the largest
                written[name] = max(value)
        assert {"step": line["step"], **line["scalars"]} == written
    [warning] = [line for line in error.splitlines() if "warning: " in line]
    assert "observer 'toy_steps' failed and is dropped: IsADirectoryError" in warning


@pytest.mark.full
def test_an_installed_tracker_learns_that_the_run_failed(
    corpus: str, tmp_path: Path, installed: None
) -> None:
    out, calls, given = tracked(tmp_path, steps=50, lr=1e30, warmup_steps=0, max_bad_steps=1)
    _, error = Run(corpus, out).train(given, nproc_per_node=2, code=2)
    assert "train.max_bad_steps" in error
    assert read_calls(calls)[-1] == {"finish": "failed"}


def read_calls(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_toys_keep_the_promises_of_built_in_parts(plugins: dict[str, str]) -> None:
    words = ["-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-o", "timeout=1800"]
    command = [sys.executable, *words, str(PLUGIN / "checks.py")]
    done = subprocess.run(command, env=plugins, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
