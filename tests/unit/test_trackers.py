"""Trackers and observers: each line once, over kills and resumes, and none can fail, delay or slow
a training.
"""

import io
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from cellmill.cli import main
from cellmill.config import check_options
from cellmill.config.options import TrainOptions
from cellmill.config.parts.family import WEIGHTS_FORMAT
from cellmill.config.parts.trackers import Track
from cellmill.errors import ConfigError, Stopped
from cellmill.runs.folder import TrainFolder, cut_back
from cellmill.runs.identity import changed_free_options, changed_keys, identity
from cellmill.track.follow import followed
from cellmill.track.tracker import ConsoleTracker
from tests.distributed.command import pids_with, wait_for
from tests.unit.tracked import calls, install, tracked_run


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The training folder of run `one`; toy trackers and observers are installed."""
    install(tmp_path / "site", monkeypatch)
    return tracked_run(tmp_path)


def append(train: Path, *steps: int, **more: Any) -> None:
    with open(train / "metrics.jsonl", "a") as file:
        file.write(
            "".join(json.dumps({"step": step, "loss": 1 / step} | more) + "\n" for step in steps)
        )


def options(train: Path, **names: dict[str, Any]) -> Track:
    """Write run.json of a run with these trackers, or observers where the name says so."""
    named = {name: {"path": str(train / f"{name}.calls"), **given} for name, given in names.items()}
    kinds = {"to": "tracker", "observers": "observer"}
    tree = {
        key: {n: o for n, o in named.items() if n.startswith(kind)} for key, kind in kinds.items()
    }
    record = json.loads((train / "run.json").read_text())
    record["options"]["track"] = tree
    (train / "run.json").write_text(json.dumps(record))
    return Track.model_validate(tree)


def wait_for_calls(path: Path, n: int) -> None:
    """Wait until a toy has been called `n` times."""
    wait_for(lambda: len(calls(path)) >= n, lambda: str(calls(path)))


def test_each_line_is_sent_once_despite_kills(train: Path, capfd: Any) -> None:
    track = options(train, tracker_a={}, observer_a={})
    seen = train / "tracker_a.calls"
    observed = train / "observer_a.calls"
    checkpoint = train / "checkpoints" / "step-00000002"

    def until_it_is_stopped() -> None:
        with followed(train, track):
            append(train, 1, 2, resident_gb=[1, 4, 2], skipped="no number")
            append(train, 2, 3)
            wait_for_calls(seen, 5)  # start and four lines, while it trains
            checkpoint.mkdir(parents=True)
            (checkpoint / "manifest.json").write_text("{}")
            raise Stopped("")

    with pytest.raises(Stopped):
        until_it_is_stopped()
    cut_back(train / "metrics.jsonl", 2)  # the checkpoint that the next process starts from
    with followed(train, track):
        append(train, 3, 4)
        append(train, 4, val_loss=0.5)
    first, second = (call for call in calls(seen) if call[0] == "start")
    assert first[1]["id"] == second[1]["id"]
    assert (first[2], second[2]) == (0, 3)
    assert [first[1][key] for key in ("run", "steps", "fingerprint")] == ["one", 20, "f" * 64]
    logged = [call[1:] for call in calls(seen) if call[0] == "log"]
    skipped = [[1, {"loss": 1, "resident_gb": 4}], [2, {"loss": 0.5, "resident_gb": 4}]]
    assert logged == [
        *skipped,
        *([step, {"loss": 1 / step}] for step in (2, 3, 4)),
        [4, {"loss": 0.25, "val_loss": 0.5}],
    ]
    assert [call[1] for call in calls(seen) if call[0] == "finish"] == ["stopped", "done"]
    told = [call[0] for call in calls(observed)]
    assert [told.count(name) for name in ("on_step", "on_validation", "on_checkpoint")] == [5, 1, 1]
    assert ["on_checkpoint", str(checkpoint)] in calls(observed)
    assert calls(observed)[0] == [
        "on_step",
        {"step": 1, "loss": 1.0, "resident_gb": [1, 4, 2], "skipped": "no number"},
    ]
    artifacts = [call[1] for call in calls(seen) if call[0] == "artifact"]
    assert artifacts == ["train/run.json", "train/metrics.jsonl", "train/metrics.jsonl"], (
        "unchanged ones are not sent"
    )
    assert capfd.readouterr().err == ""


def test_a_broken_follower_costs_one_warning(
    train: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_API_KEY", "secret-of-mine")
    kinds = {
        "tracker_b": "raise",
        "tracker_c": "hang",
        "tracker_d": "exit",
        "tracker_e": "segfault",
    }
    track = options(
        train,
        tracker_a={},
        observer_a={"does": "raise"},
        **{n: {"does": d} for n, d in kinds.items()},
    )
    with followed(train, track, finish_s=3.0):
        append(train, *range(1, 21))
        wait_for_calls(train / "tracker_a.calls", 21)
        for name in (*kinds, "observer_a"):
            wait_for_calls(train / f"{name}.calls", 1)
        began = time.monotonic()
    assert time.monotonic() - began < 60, "a tracker that hangs holds the training"
    assert ["finish", "done"] in calls(train / "tracker_a.calls")
    tail = "; metrics.jsonl is complete"
    rest = ", and `cellmill follow one --to {}` sends the rest"
    problems = {
        "tracker 'tracker_b'": "failed and is dropped: ValueError: no account *** at https://***@host",
        "tracker 'tracker_c'": "did not finish within 3 s",
        "tracker 'tracker_d'": "failed and is dropped: its process ended with exit code 0",
        "tracker 'tracker_e'": "failed and is dropped: its process ended with signal SIGSEGV",
        "observer 'observer_a'": "failed and is dropped: ValueError: no account *** at https://***@host",
    }
    expected = [
        f"warning: {name} {problem}{tail}{rest.format(name.split(chr(39))[1]) if name[0] == 't' else ''}"
        for name, problem in problems.items()
    ]
    assert sorted(capfd.readouterr().err.splitlines()) == sorted(expected)
    for log in (train / "track").glob("*/log.txt"):
        assert "secret-of-mine" not in log.read_text()


def test_a_tracker_that_refuses_a_file_still_sees_the_end(train: Path, capfd: Any) -> None:
    track = options(train, tracker_a={"does": "refuse files"})
    with followed(train, track):
        append(train, 1)
    assert [call[0] for call in calls(train / "tracker_a.calls")] == [
        "start",
        "log",
        "artifact",
        "finish",
    ]
    assert (
        "tracker 'tracker_a' failed and is dropped: ValueError: too large" in capfd.readouterr().err
    )


def test_followers_end_with_a_killed_launcher(train: Path) -> None:
    track = options(train, tracker_a={}, tracker_c={"does": "hang"})
    append(train, 1, 2)
    sent = train / "track" / "tracker_a" / "sent.json"
    pid = os.fork()
    if pid == 0:
        with followed(train, track):
            # it has noted what it sent
            while '"step": 2' not in (sent.read_text() if sent.exists() else ""):
                time.sleep(0.05)
            os._exit(9)
    os.waitpid(pid, 0)
    append(train, 3)
    wait_for(lambda: not pids_with("cellmill.track.follow", str(train)))
    with followed(train, track, finish_s=1.0):
        pass
    assert [call[1] for call in calls(train / "tracker_a.calls") if call[0] == "log"] == [1, 2, 3]


def test_a_run_can_be_sent_afterwards(
    train: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    options(train, tracker_a={})
    append(train, 1, 2, 3)
    (train / "state.json").write_text(json.dumps({"state": "done", "steps": 3, "world_size": 1}))
    command = ["follow", "one", "--to", "tracker_a", "--results", str(train.parents[2])]
    assert main(command) == 0
    report = train.parents[2] / "report" / "index.html"
    report.parent.mkdir()
    report.write_text("<html>")
    assert main(command) == 0
    assert main(command) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line.startswith("one:")] == [
        "one: sent 3 lines and 2 files to tracker_a",
        "one: sent 0 lines and 1 files to tracker_a",
        "one: sent 0 lines and 0 files to tracker_a",
    ]
    assert [call[1] for call in calls(train / "tracker_a.calls") if call[0] == "artifact"][
        -1
    ] == "report/index.html"
    assert main([*command[:3], "tensorbord", *command[4:]]) == 2
    expected = "cellmill follow: --to tensorbord: unknown tracker 'tensorbord'; did you mean 'tensorboard'?\n"
    assert capsys.readouterr().err == expected


def test_a_run_that_starts_afresh_is_another_run_at_the_tracker(train: Path) -> None:
    track = options(train, tracker_a={})
    for _ in range(2):
        with followed(train, track):
            append(train, 1)
        record = (train / "run.json").read_text()
        TrainFolder(train).set_aside()
        (train / "run.json").write_text(record)
        (train / "state.json").write_text(
            json.dumps({"state": "running", "steps": 20, "world_size": 1})
        )
    first, second = (call for call in calls(train / "tracker_a.calls") if call[0] == "start")
    assert first[1]["id"] != second[1]["id"]
    assert second[2] == 0


def refused(**sections: Any) -> str:
    with pytest.raises(ConfigError) as error:
        check_options(Track, sections, "config.yaml")
    return str(error.value)


def test_options_of_trackers_are_checked_by_name() -> None:
    assert Track().to == {}
    track = Track.model_validate({"to": {"tensorboard": None, "wandb": {"mode": "offline"}}})
    assert track.model_dump()["to"]["wandb"] == {
        "name": "wandb",
        "project": None,
        "entity": None,
        "mode": "offline",
    }
    assert Track.model_validate(json.loads(track.model_dump_json())) == track
    assert (
        refused(to={"wandbb": {}})
        == "config.yaml: to: wandbb: unknown tracker 'wandbb'; did you mean 'wandb'?"
    )
    assert (
        refused(to={"wandb": {"mod": 1}})
        == "config.yaml: to: wandb: unknown key 'mod'; did you mean 'mode'?"
    )
    assert refused(to=["wandb"]) == "config.yaml: to: expected a mapping of names, got ['wandb']"
    assert refused(observers={"mine": {}}).startswith(
        "config.yaml: observers: mine: unknown observer 'mine'; there are:"
    )
    line = refused(to={"mlflow": {"uri": "postgresql://me:secret@host/db"}})
    assert "has a password, which run.json would show; set it in the environment" in line
    assert "secret" not in line


def test_a_tracker_does_not_change_the_identity_of_a_run() -> None:
    tree: dict[str, Any] = {name: {} for name in TrainOptions.model_fields} | {
        "train": {"steps": 1}
    }
    options = [
        TrainOptions.model_validate(tree | {"track": {"to": to}})
        for to in ({}, {"tensorboard": None})
    ]
    one, other = (identity(chosen, None) for chosen in options)
    assert one == other
    del tree["track"]
    assert TrainOptions.model_validate(tree) == options[0], (
        "options stored before there were trackers"
    )
    gone = {
        **options[0].model_dump(mode="json"),
        "track": {"to": {"of_a_package_that_is_gone": None}},
    }
    stored = {"options": gone, "identity": {"init_from": None, "weights_format": WEIGHTS_FORMAT}}
    assert changed_keys(stored, one, "state.json") == {}
    assert changed_free_options(stored, options[1].model_dump(mode="json"), "run.json") == {}
    tree["train"] |= {"token_budget": 4096, "lr": 0.5}  # a learning rate is part of the identity
    tree["parallel"] = {"strategy": "ddp"}
    changed = TrainOptions.model_validate(tree).model_dump(mode="json")
    assert changed_free_options(stored, changed, "run.json") == {
        "parallel.strategy": f"{options[0].parallel.strategy} -> ddp",
        "train.token_budget": f"{options[0].train.token_budget} -> 4096",
    }


def test_the_console_shows_steps_and_validations(
    capsys: pytest.CaptureFixture[str],
) -> None:
    times = iter((100.0, 104.9, 105.0, 109.0, 109.5))
    tracker = ConsoleTracker(lambda: next(times))
    tracker.start({"steps": 20}, 10)
    line = {"loss": 0.5, "lr": 1e-3, "cells_per_s": 10.0, "data_wait_frac": 0.25, "left_s": 75.4}
    for step in (11, 12, 13, 14, 20):  # less than 5 s after 11 and 13 come 12 and 14
        tracker.log(step, line)
    tracker.log(20, {"val_loss": 0.25})
    tracker.log(20, {"skipped": "validation loss inf"})
    tracker.finish("done")
    step = "loss 0.5000  lr 1.00e-03  10 cells/s  waiting for data 25%  left 75 s"
    assert capsys.readouterr().out.splitlines() == [
        f"step 11/20  {step}",
        f"step 13/20  {step}",
        f"step 20/20  {step}",
        "step 20/20  validation loss 0.2500",
        "step 20/20  skipped: validation loss inf",
    ]
