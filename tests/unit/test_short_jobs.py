"""A time limit that is far too short is told once, with the share of the time that was start-up."""

import json
from pathlib import Path

import pytest

from cellmill.config.machine import Machine
from cellmill.errors import UserError
from cellmill.launch.slurm import ShortJobs
from cellmill.runs.jobs import JobRecord


def record(folder: Path, elapsed_s: float) -> JobRecord:
    """A job of 10 min that ran so long."""
    folder.mkdir()
    attempt = {"started_at": 1000.0, "seen_at": 1001.0, "ended_at": 1000.0 + elapsed_s}
    (folder / "attempt-000.json").write_text(json.dumps(attempt))
    return JobRecord.of(Machine(launcher="slurm", runtime=10, save_within_s=60), folder, "7", "one")


class Run:
    """Jobs of one run; each gives the line of `ShortJobs` about it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.trained = folder, [0.0]
        self.short = ShortJobs(lambda: self.trained[-1])

    def line(self, elapsed_s: float, training_s: float, steps: int) -> str:
        self.short.begin()
        self.trained.append(self.trained[-1] + training_s)
        return self.short.line(record(self.folder / str(len(self.trained)), elapsed_s), steps, was_to_save=False)


def test_jobs_at_their_limit_that_mostly_started_are_named_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.line(540, 54, 3) == ""
    assert run.line(100, 10, 1) == "", "preempted: it did not reach its limit"
    assert run.line(540, 54, 3) == ""
    assert run.line(540, 162, 9) == (
        "warning: the last 2 jobs spent 80% of their time on starting and saving, and made 3 and 9 steps: raise "
        "runtime (10 min) in the profile"
    )
    assert run.line(540, 54, 3) == ""


def test_jobs_that_train_or_of_which_nothing_is_known_are_not_named(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert [run.line(540.0, training_s, 9) for training_s in (400.0, 54.0, 400.0)] == [""] * 3
    run.short.training_s = lambda: None
    assert [run.line(540.0, 0.0, 0) for _ in range(3)] == [""] * 3


def test_a_start_up_that_the_limit_cut_off_is_named_with_its_time(tmp_path: Path) -> None:
    trained = [0.0]
    short = ShortJobs(lambda: trained[-1])
    short.begin()
    announced = record(tmp_path / "a", 500)  # SLURM announced the limit, and the processes ended
    with pytest.raises(UserError) as error:
        short.line(announced, 0, was_to_save=True)
    assert str(error.value) == (
        "start-up took 500 s of the limit's 600 s, and no step was made: raise runtime to at least 18 (min) in the "
        f"profile (job 7, log: {announced.log})"
    )
    assert short.line(announced, 0, was_to_save=False) == "", "it did not reach its limit"
    assert short.line(record(tmp_path / "b", 100), 0, was_to_save=True) == "", "it was preempted"
    assert short.line(announced, 3, was_to_save=True) == ""
    trained.append(4.0)
    assert "made 3 and 0 steps" in short.line(announced, 0, was_to_save=True), "it made some that it did not save"
