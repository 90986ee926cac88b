"""A time limit that is far too short is told once, with the share of the time that was start-up."""

from __future__ import annotations

import json
from pathlib import Path

from cellmill.config.machine import Machine
from cellmill.launch.slurm import ShortJobs
from cellmill.runs.jobs import JobRecord


def record(folder: Path, elapsed_s: float) -> JobRecord:
    """A job of 10 min that ran so long."""
    folder.mkdir()
    attempt = {"started_at": 1000.0, "seen_at": 1001.0, "ended_at": 1000.0 + elapsed_s}
    (folder / "attempt-000.json").write_text(json.dumps(attempt))
    return JobRecord.of(Machine(launcher="slurm", runtime=10, save_within_s=60), folder, "7", "one")


def test_jobs_at_their_limit_that_mostly_started_are_named_once(tmp_path: Path) -> None:
    trained = [0.0]
    short = ShortJobs(lambda: trained[-1])

    def line(name: str, elapsed_s: float, training_s: float, steps: int) -> str:
        short.begin()
        trained.append(trained[-1] + training_s)
        return short.line(record(tmp_path / name, elapsed_s), steps)

    assert line("a", 540, 54, 3) == ""
    assert line("preempted", 100, 10, 1) == "", "it did not reach its limit"
    assert line("b", 540, 54, 3) == ""
    assert line("c", 540, 162, 9) == (
        "warning: the last 2 jobs spent 80% of their time on starting and saving, and made 3 and 9 steps: raise "
        "runtime (10 min) in the profile"
    )
    assert line("d", 540, 54, 3) == ""


def test_a_start_up_that_the_limit_cut_off_is_named_with_its_time(tmp_path: Path) -> None:
    trained = [0.0]
    short = ShortJobs(lambda: trained[-1])
    short.begin()
    announced = record(tmp_path / "a", 500)  # SLURM announced the limit, and the processes ended
    assert short.start_up(announced, 0, was_to_save=True) == (
        "start-up took 500 s of the limit's 600 s, and no step was made: raise runtime to at least 18 (min) in the "
        "profile"
    )
    assert short.start_up(announced, 0, was_to_save=False) == "", "it did not reach its limit"
    assert short.start_up(record(tmp_path / "b", 100), 0, was_to_save=True) == "", "it was preempted"
    assert short.start_up(announced, 3, was_to_save=True) == ""
    trained.append(4.0)
    assert short.start_up(announced, 0, was_to_save=True) == "", "it made steps"


def test_jobs_that_train_are_not_named(tmp_path: Path) -> None:
    trained = [0.0]
    short = ShortJobs(lambda: trained[-1])
    for name, training_s in (("a", 400.0), ("b", 54.0), ("c", 400.0)):
        short.begin()
        trained.append(trained[-1] + training_s)
        assert short.line(record(tmp_path / name, 540.0), 9) == ""
    unknown = ShortJobs(lambda: None)
    for name in ("d", "e", "f"):
        unknown.begin()
        assert unknown.line(record(tmp_path / name, 540.0), 0) == ""
