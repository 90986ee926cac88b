"""Records of submissions: their owner, and damage to them."""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cellmill.errors import DataError
from cellmill.runs.jobs import JobRecord, Jobs, folder_id, make_folder_id


def record(train: Path, job_id: str) -> JobRecord:
    jobs = Jobs(train)
    path, name = jobs.new()
    return JobRecord(path, job_id, name, 1.0, "2", 4, 4, 8, "gpu", 60).write()


def test_records_are_read_back_in_order(tmp_path: Path) -> None:
    written = [record(tmp_path / "a" / "train", str(number)) for number in range(11)]
    assert Jobs(tmp_path / "a" / "train").all() == written


def test_a_job_belongs_to_its_run_alone_and_squeue_shows_the_run_s_name(tmp_path: Path) -> None:
    runs = ("x", "x-y", "x.001", "x y", "X")
    names = [Jobs(tmp_path / run / "train").new()[1] for run in runs]
    assert [name.split(".")[0] for name in names] == ["x", "x-y", "x001", "xy", "X"]
    for place, run in enumerate(runs):
        assert [Jobs(tmp_path / run / "train").owns(name) for name in names] == [n == place for n in range(len(runs))]


def test_a_folder_is_itself_by_every_path_and_a_copy_is_another(tmp_path: Path) -> None:
    original = record(tmp_path / "a" / "train", "7")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert Jobs(tmp_path / "link" / "train").owns(original.name)
    (tmp_path / "a").rename(tmp_path / "moved")
    assert Jobs(tmp_path / "moved" / "train").owns(original.name)
    shutil.copytree(tmp_path / "moved", tmp_path / "b")
    assert Jobs(tmp_path / "b" / "train").newest() is None
    assert not Jobs(tmp_path / "b" / "train").owns(Jobs(tmp_path / "moved" / "train").new()[1])
    assert not Jobs(tmp_path / "moved" / "train").owns(Jobs(tmp_path / "b" / "train").new()[1])


def test_processes_that_ask_at_once_get_one_identity(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(lambda _: make_folder_id(tmp_path), range(64)))
    assert set(found) == {folder_id(tmp_path)}
    assert [path.name for path in tmp_path.iterdir()] == ["id.json"]


@pytest.mark.parametrize("text", ["", "garbage", "[]", '{"job_id": 5}', "null"])
def test_a_damaged_record_says_that_it_may_be_removed(tmp_path: Path, text: str) -> None:
    damaged = record(tmp_path / "train", "7").path / "job.json"
    damaged.write_text(text)
    expected = f"{damaged}: not a job record; remove the file: a job that is still alive is then found by its name"
    with pytest.raises(DataError, match=re.escape(expected)):
        Jobs(tmp_path / "train").newest()
    damaged.unlink()
    assert Jobs(tmp_path / "train").folder(Jobs(tmp_path / "train").name("001")) == damaged.parent


def test_only_numbered_folders_count(tmp_path: Path) -> None:
    for odd in ("001.bak", "notes", ".hidden", "-1"):
        (tmp_path / "train" / "jobs" / odd).mkdir(parents=True)
    assert Jobs(tmp_path / "train").all() == []
    assert Jobs(tmp_path / "train").new()[0].name == "001"
