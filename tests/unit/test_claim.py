"""The claim of a running job on its folder."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cellmill.runs import lock as module
from cellmill.runs.lock import Claim, Claimed, claim, living


def age(own: Claim, seconds: float) -> None:
    """Make the claim as old as if it had been renewed `seconds` ago."""
    then = own.file.stat().st_mtime - seconds
    os.utime(own.file, (then, then))


def never(seconds: float) -> None:
    raise AssertionError("nothing is waited for")


def test_of_many_jobs_at_once_one_has_the_folder(tmp_path: Path) -> None:
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
        f"job {own.job} is training in {tmp_path}; job {job} ends" for job in range(16) if str(job) != own.job
    )


def test_a_job_that_ended_leaves_the_folder_at_once(tmp_path: Path) -> None:
    claim(tmp_path, "1").release()
    assert claim(tmp_path, "2", wait=never).job == "2"


def test_a_number_that_newer_claims_have_passed_is_not_taken_again(tmp_path: Path) -> None:
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


def test_a_requeued_job_whose_first_start_still_trains_is_refused(tmp_path: Path) -> None:
    own = claim(tmp_path, "1")
    assert living(tmp_path) == "1"
    with pytest.raises(Claimed, match=rf"^an earlier start of job 1 is training in {tmp_path}; this start ends$"):
        claim(tmp_path, "1", wait=lambda seconds: os.utime(own.file))
    own.release()
    assert living(tmp_path) == ""


def test_a_job_that_was_killed_is_waited_for_until_its_lease_ends(tmp_path: Path) -> None:
    own = claim(tmp_path, "1")
    waits: list[float] = []

    with pytest.MonkeyPatch.context() as patch:  # time passes, and nobody renews
        patch.setattr(module, "_last_sign", lambda file: (1, 20.0 * len(waits)))
        assert claim(tmp_path, "2", wait=waits.append).job == "2"
    assert own.file.name == "00000001.json"
    assert len(waits) == 3


def test_a_job_that_was_silent_for_too_long_learns_that_another_has_its_run(tmp_path: Path) -> None:
    own = claim(tmp_path, "1")
    age(own, module.LEASE_S)
    assert living(tmp_path) == ""
    other = claim(tmp_path, "2", wait=never)
    own.renewed -= module.RENEW_S
    with pytest.raises(Claimed, match="job 2 has taken over from job 1, which was silent for too long"):
        own.renew()
    other.renewed -= module.RENEW_S
    other.renew()
    assert living(tmp_path) == "2"


def test_a_requeued_job_takes_its_folder_back(tmp_path: Path) -> None:
    claim(tmp_path, "1").release()
    assert claim(tmp_path, "1", wait=never).file.name == "00000002.json"
