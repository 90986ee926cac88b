"""Records of submissions, and the claim of a running job on its folder."""

import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cellmill.errors import DataError
from cellmill.runs import lock as module
from cellmill.runs.jobs import JobRecord, Jobs, folder_id, make_folder_id
from cellmill.runs.lock import Claim, Claimed, claim, claimant


def record(train: Path, job_id: str) -> JobRecord:
    jobs = Jobs(train)
    path, name = jobs.new()
    return JobRecord(path, job_id, name, 1.0, "2", 4, 4, 8, "gpu", 60).write()


def test_records_are_read_back_in_order(tmp_path: Path) -> None:
    written = [record(tmp_path / "a" / "train", str(number)) for number in range(11)]
    assert Jobs(tmp_path / "a" / "train").all() == written


def test_a_job_belongs_only_to_its_run(tmp_path: Path) -> None:
    runs = ("x", "x-y", "x.001", "x y", "X")
    names = [Jobs(tmp_path / run / "train").new()[1] for run in runs]
    assert [name.split(".")[0] for name in names] == ["x", "x-y", "x001", "xy", "X"]
    for place, run in enumerate(runs):
        assert [Jobs(tmp_path / run / "train").owns(name) for name in names] == [
            n == place for n in range(len(runs))
        ]


def test_a_copied_folder_is_not_the_same_folder(tmp_path: Path) -> None:
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
def test_a_damaged_record_is_named_as_removable(tmp_path: Path, text: str) -> None:
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


def age(own: Claim, seconds: float) -> None:
    """Make the claim as old as if it had been renewed `seconds` ago."""
    then = own.file.stat().st_mtime - seconds
    os.utime(own.file, (then, then))


def never(seconds: float) -> None:
    raise AssertionError("nothing is waited for")


def test_only_one_of_many_jobs_gets_the_folder(tmp_path: Path) -> None:
    def attempt(job: int) -> Claim | str:
        try:
            return claim(tmp_path, str(job), wait=renewed)
        except Claimed as refused:
            return str(refused)

    def renewed(seconds: float) -> None:
        """The time in which the owner renews its claim."""
        os.utime(max((tmp_path / "claims").glob("[0-9]*.json")))

    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(attempt, range(16)))
    (own,) = [one for one in found if isinstance(one, Claim)]
    refused = [one for one in found if isinstance(one, str)]
    assert sorted(refused) == sorted(
        f"job {own.job} is training in {tmp_path}; job {job} ends"
        for job in range(16)
        if str(job) != own.job
    )


def test_a_claim_that_is_being_written_is_read_again(tmp_path: Path) -> None:
    own = claim(tmp_path, "1")
    written = own.file.read_text()
    own.file.write_text(written[:5])
    seconds = iter([lambda: own.file.write_text(written), lambda: os.utime(own.file)])
    with pytest.raises(Claimed, match=rf"^job 1 is training in {tmp_path}; job 2 ends$"):
        claim(tmp_path, "2", wait=lambda _: next(seconds)())


@pytest.mark.parametrize("job", ["2", "1"], ids=["another", "requeued"])
def test_a_job_that_ended_leaves_the_folder_at_once(tmp_path: Path, job: str) -> None:
    claim(tmp_path, "1").release()
    own = claim(tmp_path, job, wait=never)
    assert (own.job, own.file.name) == (job, "00000002.json")


def test_a_number_passed_by_newer_claims_is_never_reused(tmp_path: Path) -> None:
    first = claim(tmp_path, "1")

    def meanwhile(seconds: float) -> None:
        """Two other jobs claim the folder after job 2 has looked; the second trains."""
        if not first.file.with_name("00000002.json").exists():
            first.release()
            claim(tmp_path, "3", wait=never).release()
            claim(tmp_path, "4", wait=never)
        os.utime(max((tmp_path / "claims").glob("[0-9]*.json")))

    with pytest.raises(Claimed, match=r"job 4 is training in .*; job 2 ends"):
        claim(tmp_path, "2", wait=meanwhile)


def test_a_requeued_job_is_refused_while_its_first_start_trains(tmp_path: Path) -> None:
    own = claim(tmp_path, "1")
    assert claimant(tmp_path) == "1"
    with pytest.raises(
        Claimed, match=rf"^an earlier start of job 1 is training in {tmp_path}; this start ends$"
    ):
        claim(tmp_path, "1", wait=lambda seconds: os.utime(own.file))
    own.release()
    assert claimant(tmp_path) == ""


def test_a_killed_job_is_waited_for_until_its_lease_ends(tmp_path: Path) -> None:
    own = claim(tmp_path, "1")
    waits: list[float] = []

    with pytest.MonkeyPatch.context() as patch:  # time passes, and nobody renews
        patch.setattr(module, "_last_sign", lambda file: (1, 20.0 * len(waits)))
        assert claim(tmp_path, "2", wait=waits.append).job == "2"
    assert own.file.name == "00000001.json"
    assert len(waits) == 3


def test_a_job_silent_for_too_long_learns_that_it_was_replaced(tmp_path: Path) -> None:
    own = claim(tmp_path, "1")
    age(own, module.LEASE_S)
    assert claimant(tmp_path) == ""
    other = claim(tmp_path, "2", wait=never)
    own.renewed -= module.RENEW_S
    with pytest.raises(
        Claimed, match="job 2 has taken over from job 1, which was silent for too long"
    ):
        own.renew()
    other.renewed -= module.RENEW_S
    other.renew()
    assert claimant(tmp_path) == "2"
