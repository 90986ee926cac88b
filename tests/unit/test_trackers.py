"""Trackers: plug-ins get every line in order, and none can fail, delay or slow a training."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from cellmill import registry
from cellmill.config import check_options
from cellmill.config.family import WEIGHTS_FORMAT
from cellmill.config.options import TrainOptions
from cellmill.config.track import Track, TrackerConfig
from cellmill.errors import ConfigError
from cellmill.runs.identity import changed_keys, identity
from cellmill.track import background
from cellmill.track.background import BackgroundTrackers
from cellmill.track.tracker import ConsoleTracker, JsonlTracker, Tracker

Call = tuple[Any, ...]
CALLS: list[Call] = []
"""What the recording tracker was called with."""
RELEASE = threading.Event()
"""Ends trackers that hang."""


class RecordingTracker(TrackerConfig):
    """A tracker that keeps its calls, and may raise or hang in one of them."""

    implementation: ClassVar[str] = f"{__name__}:Recorder"
    name: Literal["recording", "other"] = "recording"
    raises_in: str = ""
    hangs_in: str = ""
    seconds: float = 0.0


class Recorder:
    def __init__(self, options: RecordingTracker) -> None:
        self._options = options
        self._call("init")

    def start(self, config: dict[str, Any], resume_step: int) -> None:
        self._call("start", config, resume_step)

    def log(self, step: int, scalars: dict[str, Any]) -> None:
        self._call("log", step, scalars)

    def finish(self, status: str) -> None:
        self._call("finish", status)

    def _call(self, name: str, *arguments: Any) -> None:
        if self._options.raises_in == name:
            raise SystemExit("no account\nat all") if name == "log" else ValueError("no account\nat all")
        if self._options.hangs_in == name:
            RELEASE.wait(60)
            return
        time.sleep(self._options.seconds)
        CALLS.append((name, *arguments))


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("recording", "other"):
        monkeypatch.setitem(registry.BUILT_IN["tracker"], name, f"{__name__}:RecordingTracker")
    monkeypatch.setattr(background, "FINISH_S", 0.4)
    CALLS.clear()
    RELEASE.clear()
    yield
    RELEASE.set()


def train(trackers: Tracker, steps: int = 20, resume_step: int = 0, status: str = "done") -> None:
    """A training of no time."""
    trackers.start({"steps": steps}, resume_step)
    for step in range(resume_step + 1, steps + 1):
        trackers.log(step, {"loss": 1 / step, "lr": 0.1})
    trackers.finish(status)


def made(**options: Any) -> BackgroundTrackers:
    return BackgroundTrackers(Track.model_validate({"to": {"recording": options}}).to)


@pytest.mark.parametrize("status", ["done", "stopped", "failed"])
def test_a_tracker_gets_every_line_in_order_from_the_resumed_step_on(status: str, capfd: Any) -> None:
    train(made(), steps=500, resume_step=7, status=status)
    lines = [("log", step, {"loss": 1 / step, "lr": 0.1}) for step in range(8, 501)]
    assert [("init",), ("start", {"steps": 500}, 7), *lines, ("finish", status)] == CALLS
    assert capfd.readouterr().err == ""


def test_trackers_get_numbers_only_and_copies_of_their_own() -> None:
    config, scalars = {"options": {"train": {}}}, {"skipped": "loss nan", "skipped_steps": 3, "resident_gb": [1, 4, 2]}
    trackers = BackgroundTrackers(Track.model_validate({"to": {"recording": None, "other": None}}).to)
    trackers.start(config, 0)
    trackers.log(1, scalars)
    trackers.log(2, {"skipped": "validation loss nan"})
    trackers.finish("done")
    assert [call for call in CALLS if call[0] == "log"] == [("log", 1, {"skipped_steps": 3, "resident_gb": 4})] * 2
    configs = [call[1] for call in CALLS if call[0] == "start"]
    assert configs == [config, config]
    assert configs[0]["options"] is not configs[1]["options"]


@pytest.mark.parametrize("call", ["init", "start", "log", "finish"])
def test_a_tracker_that_raises_is_dropped_with_one_warning_and_the_others_go_on(call: str, capfd: Any) -> None:
    options = {"to": {"other": {"raises_in": call}, "recording": {}}}
    train(BackgroundTrackers(Track.model_validate(options).to))
    error = "SystemExit" if call == "log" else "ValueError"
    assert capfd.readouterr().err == (
        f"warning: tracker 'other' failed and is dropped: {error}: no account at all; metrics.jsonl is complete\n"
    )
    assert [c[1] for c in CALLS if c[0] == "log" and c[2]["loss"]][-1] == 20
    assert ("finish", "done") in CALLS


@pytest.mark.parametrize("call", ["init", "start", "log", "finish"])
def test_a_tracker_that_hangs_delays_no_step_and_is_waited_for_only_at_the_end(call: str, capfd: Any) -> None:
    trackers = made(hangs_in=call)
    trackers.start({}, 0)
    began = time.monotonic()
    for step in range(5000):
        trackers.log(step, {"loss": 0.0})
    assert time.monotonic() - began < 1.0
    RELEASE.wait(0.2)  # a moment for the queue to be emptied
    began = time.monotonic()
    trackers.finish("done")
    assert 0.3 < time.monotonic() - began < 2.0
    warnings = capfd.readouterr().err.splitlines()
    hangs = "did not finish within 0.4 s; its last lines may be lost"
    assert warnings[-1] == f"warning: tracker 'recording' {hangs}; metrics.jsonl is complete"
    slow = [] if call == "finish" else ["is too slow: lines are dropped from step"]
    assert [text for text in slow if text in warnings[0]] == slow
    assert len(warnings) <= 2


def test_all_hanging_trackers_together_are_waited_for_once() -> None:
    hang = {"hangs_in": "finish"}
    trackers = BackgroundTrackers(Track.model_validate({"to": {"recording": hang, "other": hang}}).to)
    trackers.start({}, 0)
    began = time.monotonic()
    trackers.finish("done")
    assert time.monotonic() - began < 0.75


def test_a_slow_tracker_loses_lines_with_one_warning_and_keeps_their_order(
    monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(background, "QUEUE_LINES", 5)
    train(made(seconds=0.01), steps=50)
    steps = [call[1] for call in CALLS if call[0] == "log"]
    assert 5 <= len(steps) < 50
    assert steps == sorted(steps)
    assert CALLS[-1] == ("finish", "done")
    warnings = capfd.readouterr().err.splitlines()
    assert len(warnings) == 1
    assert warnings[0].startswith("warning: tracker 'recording' is too slow: lines are dropped from step ")


def test_without_trackers_nothing_is_started() -> None:
    before = threading.active_count()
    train(BackgroundTrackers(Track().to))
    assert threading.active_count() == before


def refused(to: Any) -> str:
    with pytest.raises(ConfigError) as error:
        check_options(Track, {"to": to}, "config.yaml")
    return str(error.value)


def test_options_of_trackers_are_checked_by_name() -> None:
    assert Track().to == {}
    track = Track.model_validate({"to": {"recording": None, "other": {"seconds": 1}}})
    assert track.model_dump()["to"]["other"] == {"name": "other", "raises_in": "", "hangs_in": "", "seconds": 1.0}
    assert Track.model_validate(json.loads(track.model_dump_json())) == track
    assert refused({"recoding": {}}) == (
        "config.yaml: to: recoding: unknown tracker 'recoding'; did you mean 'recording'?"
    )
    assert refused({"recording": {"second": 1}}) == (
        "config.yaml: to: recording: unknown key 'second'; did you mean 'seconds'?"
    )
    assert refused(["recording"]) == "config.yaml: to: expected a mapping of names, got ['recording']"


def test_a_tracker_is_no_part_of_the_identity_of_a_run() -> None:
    tree: dict[str, Any] = {name: {} for name in TrainOptions.model_fields} | {"train": {"steps": 1}}
    options = [TrainOptions.model_validate(tree | {"track": {"to": to}}) for to in ({}, {"recording": None})]
    one, other = (identity(chosen, None) for chosen in options)
    assert one == other
    del tree["track"]
    assert TrainOptions.model_validate(tree) == options[0], "options stored before there were trackers"
    gone = {**options[0].model_dump(mode="json"), "track": {"to": {"of_a_package_that_is_gone": None}}}
    stored = {"options": gone, "identity": {"init_from": None, "weights_format": WEIGHTS_FORMAT}}
    assert changed_keys(stored, one, "state.json") == {}


@pytest.mark.parametrize("make", [ConsoleTracker, lambda: JsonlTracker(Path("x"))])
def test_the_trackers_that_are_always_on_meet_the_contract(
    make: Callable[[], Tracker], tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    tracker = make()
    tracker.start({"steps": 20}, 10)
    line = {"loss": 0.5, "lr": 1e-3, "cells_per_s": 10.0, "data_wait_frac": 0.25, "left_s": 75.4}
    tracker.log(20, line)
    tracker.log(20, {"val_loss": 0.25})
    tracker.finish("done")
    if isinstance(tracker, ConsoleTracker):
        assert capsys.readouterr().out.splitlines() == [
            "step 20/20  loss 0.5000  lr 1.00e-03  10 cells/s  waiting for data 25%  left 1:15",
            "step 20/20  validation loss 0.2500",
        ]
    else:
        lines = [json.loads(text) for text in (tmp_path / "x").read_text().splitlines()]
        assert lines == [{"step": 20} | line, {"step": 20, "val_loss": 0.25}]
