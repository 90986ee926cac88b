"""Records of submissions: their owner, and damage to them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from cellmill.errors import DataError
from cellmill.runs.jobs import JobRecord, Jobs


def record(train: Path, job_id: str) -> JobRecord:
    jobs = Jobs(train)
    path, name = jobs.new()
    return JobRecord(path, job_id, name, 1.0, "2", 4, 4, 8, "gpu", 60).write()


def test_records_are_read_back_in_order(tmp_path: Path) -> None:
    written = [record(tmp_path / "a" / "train", str(number)) for number in range(11)]
    assert Jobs(tmp_path / "a" / "train").all() == written


def test_no_job_name_of_a_run_is_a_prefix_of_another_run_s(tmp_path: Path) -> None:
    # the queue is searched for names that begin with the run's, a dot and a number
    names = [Jobs(tmp_path / run / "train").name + "." for run in ("x", "x-y", "x.001", "x y", "X")]
    assert len(set(names)) == len(names)
    assert not [(a, b) for a in names for b in names if a != b and b.startswith(a)]


def test_a_copied_run_does_not_take_the_job_of_the_original_for_its_own(tmp_path: Path) -> None:
    original = record(tmp_path / "a" / "train", "7")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert Jobs(tmp_path / "a" / "train").newest() == original
    assert Jobs(tmp_path / "b" / "train").newest() is None


@pytest.mark.parametrize("text", ["", "garbage", "[]", '{"job_id": 5}', "null"])
def test_a_damaged_record_says_that_it_may_be_removed(tmp_path: Path, text: str) -> None:
    damaged = record(tmp_path / "train", "7").path / "job.json"
    damaged.write_text(text)
    expected = f"{damaged}: not a job record; remove the file: a job that is still alive is then found by its name"
    with pytest.raises(DataError, match=re.escape(expected)):
        Jobs(tmp_path / "train").newest()
    name = Jobs(tmp_path / "train").name
    damaged.unlink()
    assert Jobs(tmp_path / "train").unrecorded(f"{name}.001") == damaged.parent


def test_only_numbered_folders_count(tmp_path: Path) -> None:
    for odd in ("001.bak", "notes", ".hidden", "-1"):
        (tmp_path / "train" / "jobs" / odd).mkdir(parents=True)
    assert Jobs(tmp_path / "train").all() == []
    assert Jobs(tmp_path / "train").new()[0].name == "001"
