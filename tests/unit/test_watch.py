"""cellmill watch: a run from its files alone, piped, on narrow terminals, and when folders come and
go.
"""

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cellmill.cli import main
from cellmill.commands.watch import Screen, WatchedRun, draw_bars
from cellmill.errors import UserError
from cellmill.runs.folder import TrainFolder
from tests.unit.tracked import tracked_run

LINE = {
    "loss": 0.5,
    "lr": 1e-3,
    "cells_per_s": 1234.5,
    "data_wait_frac": 0.25,
    "left_s": 7200.0,
    "skipped_steps": 2,
}
CURVE = "step 10/20 (50%)  loss 0.5  lr 1.00e-03  validation 0.75 at step 10  effective rank 12.3  2 steps skipped"


@pytest.fixture(autouse=True)
def without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def append(train: Path, *lines: dict[str, Any]) -> None:
    with open(train / "metrics.jsonl", "a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


def test_a_run_is_watched_until_it_is_done(
    tmp_path: Path,
) -> None:
    command = [
        sys.executable,
        "-m",
        "cellmill.cli",
        "watch",
        "one",
        "--results",
        "results",
        "--every-s",
        "0.1",
    ]
    (tmp_path / "Snakefile").touch()
    watching = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert watching.stdout.readline() == "one: not begun\n"
    train = tracked_run(tmp_path / "made")
    with TrainFolder(train).locked():
        append(train, {"step": 10} | LINE, {"step": 10, "val_loss": 0.75, "effective_rank": 12.34})
        (tmp_path / "made" / "results").rename(tmp_path / "results")
        running = f"one: running  {CURVE}  1,234 cells/s  waiting for data 25%  left 2.0 h\n"
        assert watching.stdout.readline() == running
        (tmp_path / "results" / "runs" / "one" / "train" / "status.json").write_text("{}")
        assert watching.stdout.readline() == f"one: done  {CURVE}\n"
    assert watching.wait(10) == 0
    assert watching.stdout.read() == ""


def test_a_resumed_run_is_shown_from_its_checkpoint(
    tmp_path: Path,
) -> None:
    train = tracked_run(tmp_path)
    watched = WatchedRun("one", train)
    append(train, *({"step": step, "loss": 1 / step} for step in range(1, 7)))
    watched.update()
    assert watched.list_losses() == [1 / step for step in range(1, 7)]
    (train / "metrics.jsonl").rename(train / "before")
    append(
        train,
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 0.5},
        {"step": 2, "skipped": "loss nan"},
    )
    watched.update()
    assert watched.list_losses() == [1.0, 0.5]
    assert watched.describe("stopped") == ["one: stopped", "step 2/20 (10%)", "loss 0.5"]
    shutil.rmtree(train)
    with pytest.raises(UserError, match="the run's folder was deleted"):
        watched.update()


def test_a_mistyped_run_is_refused_with_the_nearest_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tracked_run(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.yaml").write_text("runs: {demo: {corpus: pbmc}, one: {}}\n")
    results = str(tmp_path / "results")
    config = tmp_path / "config" / "config.yaml"
    for name, hint in (
        ("noe", "did you mean 'one'?"),
        ("dmeo", "did you mean 'demo'?"),
        ("x", "there are: one, demo"),
    ):
        assert main(["watch", name, "--results", results]) == 2
        message = f"no such run in {results}/runs or {config}; {hint}"
        assert capsys.readouterr().err == f"cellmill watch: {name!r}: {message}\n"

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupt)
    assert main(["watch", "demo", "--results", results]) == 0
    assert capsys.readouterr().out == "demo: not begun\n"
    assert main(["watch", "demo", "--every-s", "nan"]) == 2
    assert "--every-s: expected seconds from 0.1 to 3600, got nan" in capsys.readouterr().err


@pytest.mark.parametrize("columns", [200, 40, 12, 1])
def test_no_line_is_wider_than_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    pieces = CURVE.split("  ")
    losses = [2.0, float("nan"), *(1 / step for step in range(1, 400))]
    monkeypatch.setattr(terminal := io.StringIO(), "isatty", lambda: True)
    screen = Screen(terminal)
    screen.show(pieces, losses)
    first = terminal.getvalue()
    screen.show(pieces, losses)
    lines = first.splitlines()
    assert all(len(line) < max(columns, 2) for line in lines)
    assert len(lines) == {200: 2, 40: 4, 12: 7, 1: 7}[columns]
    assert terminal.getvalue() == first + f"\x1b[{len(lines)}A\x1b[J" + first
    assert columns < 3 or (lines[-1][0], lines[-1][-1]) == ("█", "▁")
    assert [draw_bars(few, 4) for few in ([], [1.0], [1.0, 1.0], [3.0, 2.0, 1.0, 0.0, 0.0])] == [
        "",
        "▁",
        "▁▁",
        "█▆▃▁",
    ]
