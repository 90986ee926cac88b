"""squeue is asked once for all launchers of a user, and none waits for one that is stopped."""

import fcntl
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cellmill.files import private_folder
from cellmill.launch.follow import JobFollower, Tail
from cellmill.launch.queue import Queue, QueuedJob
from cellmill.launch.shared_answer import shared_answer
from cellmill.runs.slurm import JobState
from tests.distributed.command import wait_for
from tests.unit.test_slurm_launcher import Scripted, scripted

__all__ = ["scripted"]

COMMAND = ["squeue", "-h"]
ASK = """
import sys
from cellmill.launch.shared_answer import shared_answer
sys.stdin.readline()
print(shared_answer(["squeue", "-h"], 5).text, end="", flush=True)
"""


class Clock:
    """Seconds that pass only when they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)


@pytest.mark.parametrize(
    ("n_launchers", "state", "most"), [(10, "PENDING", 2), (60, "PENDING", 2), (10, "RUNNING", 6)]
)
def test_the_calls_of_many_launchers_are_those_of_one(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, n_launchers: int, state: str, most: int
) -> None:
    """Launchers that begin one after another in the first minute."""
    lines = [f"{number}|{state}|None|||run.{number}" for number in range(n_launchers)]
    scripted.answers(squeue=[[0, "\n".join(lines), ""]])
    clock = Clock(monkeypatch)
    followers = list[JobFollower]()
    calls = scripted.fake / "calls"
    by_minute = list[int]()
    for second in range(0, 420, 2):
        clock.now += 2
        for _ in range(2):
            number = len(followers)
            if number < n_launchers:
                job = QueuedJob(str(number), JobState(""), f"run.{number}")
                tail = Tail(scripted.fake / "log", echo=False)
                followers.append(JobFollower(job, Queue(10), tail))
        assert all(follower.alive() for follower in followers)
        if second % 60 == 58:
            by_minute.append(len(calls.read_text().splitlines()) - sum(by_minute))
    assert {follower.state.name for follower in followers} == {state}
    assert {line.split()[0] for line in calls.read_text().splitlines()} == {"squeue"}
    assert 1 <= max(by_minute[4:]) <= most
    assert max(by_minute) <= 7


def ask_in_processes(number: int) -> list[subprocess.Popen[str]]:
    """Processes that ask when they are sent a line."""
    return [
        subprocess.Popen(
            [sys.executable, "-c", ASK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(number)
    ]


def test_processes_that_ask_at_once_share_one_call(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(scripted.fake))
    scripted.answers(squeue=[[{"sleep": 1}, "first\n", ""], [0, "second\n", ""]])
    processes = ask_in_processes(3)
    time.sleep(1)  # they import cellmill
    for process in processes:
        process.stdin.write("now\n")
        process.stdin.flush()
    assert [process.communicate(timeout=60)[0] for process in processes] == ["first\n"] * 3
    assert len(scripted.calls("squeue")) == 1


def test_a_stopped_process_is_waited_for_briefly(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(scripted.fake))
    monkeypatch.setattr("tempfile.tempdir", str(scripted.fake))
    scripted.answers(squeue=[[{"sleep": 60}, "late\n", ""], [0, "now\n", ""]])
    [process] = ask_in_processes(1)
    try:
        process.stdin.write("now\n")
        process.stdin.flush()
        wait_for((scripted.fake / "calls").exists)
        with open(scripted.fake / "lock") as lock:  # the first answer is then taken
            fcntl.flock(lock, fcntl.LOCK_EX)
        process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        assert shared_answer(COMMAND, 5).text == "now\n"
        assert time.monotonic() - began < 20
        assert shared_answer(COMMAND, 60).text == "now\n"  # the next one need not ask
    finally:
        process.kill()
        process.wait()
    assert len(scripted.calls("squeue")) == 2


@pytest.mark.parametrize("folder", ["full", "another's", "missing"])
def test_without_a_private_folder_each_process_asks(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    temporary = scripted.fake / "tmp"
    if folder != "missing":
        temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    if folder == "another's":
        private_folder().chmod(0o777)
    if folder == "full":
        monkeypatch.setattr("cellmill.files.fsync", no_space)
    scripted.answers(squeue=[[0, "first\n", ""], [0, "second\n", ""]])
    assert [shared_answer(COMMAND, 60).text for _ in range(2)] == ["first\n", "second\n"]
    assert not [*temporary.glob("*/*.json")]


def no_space(path: Path) -> None:
    raise OSError(28, "No space left on device")


def test_an_answer_is_private_and_of_one_configuration(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(scripted.fake))
    scripted.answers(
        squeue=[[0, "first\n", ""], [1, "", "squeue: error: no\n"], [0, "third\n", ""]]
    )
    assert shared_answer(COMMAND, 60).text == "first\n"
    monkeypatch.setenv("SLURM_CONF", "/etc/other.conf")
    assert [shared_answer(COMMAND, 60).error for _ in range(2)] == ["squeue: no"] * 2
    [damaged, _] = private_folder().glob("*.json")
    assert stat.S_IMODE(private_folder().stat().st_mode) == 0o700
    damaged.write_text("{")
    newest = {shared_answer(COMMAND, 60).text}
    monkeypatch.delenv("SLURM_CONF")
    newest.add(shared_answer(COMMAND, 60).text)
    assert "third\n" in newest
