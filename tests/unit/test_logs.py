"""logs, attach and cancel on files and real processes; a real SLURM is in
tests/cluster/test_commands.py.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from cellmill.launch.follow import JobFollower, Tail
from cellmill.launch.queue import Queue, QueuedJob
from cellmill.runs.jobs import JobRecord
from cellmill.runs.slurm import ClusterJob, JobState
from tests.distributed.command import wait_for
from tests.unit.test_status import (
    RUNNING,
    Cli,
    Hold,
    checkpoint,
    cli,
    command,
    hold,
    job,
    results,
    run_of,
    squeue,
)

__all__ = ["cli", "hold", "results"]


class Command:
    """A command as a user starts it, with the PATH of the test; its output goes to a file."""

    def __init__(self, results: Path, *words: str) -> None:
        self.file = results.parent / f"printed-{'-'.join(words)}"
        with open(self.file, "w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cellmill.cli", *words, "--results", str(results)],
                stdout=file,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"TMPDIR": str(results.parent / "tmp")},
                start_new_session=True,
                # a shell makes background processes, such as the tests, ignore Ctrl-C
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def wait_for(self, text: str) -> None:
        wait_for(lambda: text in self.file.read_text(), self.file.read_text)

    def end(self) -> tuple[int, str, str]:
        """Exit code, output and error."""
        error = self.process.communicate(timeout=300)[1]
        return self.process.returncode, self.file.read_text(), error


class Listing:
    """A squeue that lists one job, whose state can be changed while commands run."""

    def __init__(self, results: Path, record: JobRecord, state: str) -> None:
        self.file = results.parent / "answer"
        self.record = record
        command(results, "squeue", f"/bin/cat {self.file}")
        self.shows(state)

    def shows(self, state: str) -> None:
        self.file.write_text(self.line(state) + "\n")

    def line(self, state: str) -> str:
        reason = "Priority" if state == "PENDING" else "None"
        return f"{self.record.job_id}|{state}|{reason}|node1|10:00|{self.record.name}"


def attach(results: Path, state: str) -> tuple[JobRecord, Listing, Command]:
    """A job in this state, with a checkpoint of step 100, its squeue, and the command that follows
    it.
    """
    train = run_of(results, "one", state=RUNNING)
    checkpoint(train, 100)
    record = job(train)
    queue = Listing(results, record, state)
    attached = Command(results, "attach", "one")
    attached.wait_for(f"job 41: {state}")
    return record, queue, attached


def local_log(results: Path, text: str) -> Path:
    path = results.parent / "logs" / "train" / "one.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_log_belongs_to_the_newest_training(results: Path, cli: Cli) -> None:
    def logs() -> str:
        return "".join(cli("logs", "one")[1:])

    train = run_of(results, "one")
    beside = results.parent / "logs/train/one.log"
    assert logs() == f"cellmill logs: one: no log: it has no job, and {beside} does not exist\n"
    record = job(train)
    assert logs() == (
        f"cellmill logs: one: job 41 (PENDING) has no log yet; it will be {record.path}/41_0_log.out\n"
    )
    local_log(results, "job 41: PENDING (Resources)\n")
    assert logs() == "job 41: PENDING (Resources)\n"
    record.log.write_text("of the first job\n")
    assert logs() == "of the first job\n"
    job(train, 2).log.write_text("of the second job\n")
    assert logs() == "of the second job\n"
    (train / "local.json").write_text(
        json.dumps([{"started_at": time.time(), "ended_at": None, "how": None}])
    )
    assert logs() == "job 41: PENDING (Resources)\n"


def test_a_closed_pipe_is_ignored(results: Path) -> None:
    run_of(results, "one")
    local_log(results, "a line\n" * 100_000)
    words = [sys.executable, "-m", "cellmill.cli", "logs", "one", "--results", str(results)]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as reading:
        assert reading.stdout.readline() == "a line\n"
        reading.stdout.close()
        assert (reading.wait(200), reading.stderr.read()) == (0, "")


def test_a_local_training_is_followed_until_its_lock_is_free(results: Path, hold: Hold) -> None:
    train = run_of(results, "one", state=RUNNING)
    log = local_log(results, "step 100/600\n")
    process = hold(train)
    checkpoint(train, 100)
    following = [Command(results, "logs", "one", "--follow"), Command(results, "attach", "one")]
    for line in ("step 100/600\n", "step 200/600\n"):
        for each in following:
            each.wait_for(line)
        with open(log, "a") as file:
            file.write("step 200/600\n" if line == "step 100/600\n" else "the end\n")
    process.kill()
    assert following[0].end() == (0, "step 100/600\nstep 200/600\nthe end\n", "")
    code, attached, told = following[1].end()
    first, rest = attached.split("\n", 1)
    assert re.fullmatch(
        rf"following process {process.pid} of \S+ on \S+, its log: {log}; Ctrl-C ends only .*",
        first,
    )
    assert rest == "step 100/600\nstep 200/600\nthe end\n"
    assert (code, told) == (75, "cellmill attach: the training ended; saved at step 100\n")


def test_a_job_is_followed_to_its_end(results: Path) -> None:
    record, queue, attached = attach(results, "PENDING")
    queue.shows("RUNNING")
    record.log.write_text("step 1/2\nstep 2/2\n")
    before = (record.path / "job.json").read_bytes()
    attached.wait_for("step 2/2")
    (record.path.parents[1] / "state.json").write_text(json.dumps(RUNNING | {"state": "done"}))
    queue.shows("COMPLETED")
    code, printed, told = attached.end()
    assert printed == (
        f"following job 41, its log: {record.log}; Ctrl-C ends only the following\njob 41: PENDING (Priority)\n"
        "job 41: RUNNING on node1\nstep 1/2\nstep 2/2\njob 41: COMPLETED\n"
        "job 41 ended with COMPLETED: the training is done\n"
    )
    assert (code, told) == (0, "")
    assert (record.path / "job.json").read_bytes() == before, "attach changes no file"
    assert not (record.path.parents[1] / "lock").exists()


@pytest.mark.parametrize(
    ("word", "error", "code", "line"),
    [
        ("FAILED", "node1: out of memory", 2, "job 41 ended with FAILED: node1: out of memory"),
        (
            "FAILED",
            "",
            2,
            "job 41 ended with FAILED; saved at step 100; `cellmill logs one` shows its output",
        ),
        ("TIMEOUT", "", 75, "job 41 ended with TIMEOUT; saved at step 100"),
    ],
)
def test_the_end_of_a_failed_job_is_one_line(
    results: Path, word: str, error: str, code: int, line: str
) -> None:
    record, queue, attached = attach(results, "RUNNING")
    if error:
        (record.path / "error.txt").write_text(error)
    queue.shows(word)
    ended, _, told = attached.end()
    assert (ended, told) == (code, f"cellmill attach: {line}\n")


@pytest.mark.parametrize(
    ("state", "slowest_poll_s", "longest_s"), [("RUNNING", 10, 10), ("PENDING", 0, 60)]
)
def test_slurm_is_called_less_often_over_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, slowest_poll_s: int, longest_s: int
) -> None:
    now = [0]
    asked = list[int]()

    class Listed(Queue):
        def state(self, job: ClusterJob, max_age_s: float = 0) -> JobState:
            asked.append(now[0])
            return JobState(state)

    monkeypatch.setattr("cellmill.launch.follow.time", SimpleNamespace(monotonic=lambda: now[0]))
    job = QueuedJob("41", JobState(state), "a")
    follower = JobFollower(job, Listed(0), Tail(tmp_path / "log"), slowest_poll_s=slowest_poll_s)
    for now[0] in range(1500):
        assert follower.alive()
    pauses = [after - before for before, after in pairwise(asked)]
    assert pauses == sorted(pauses)
    assert (pauses[0], {*pauses[-10:]}) == (1, {longest_s})
    if state == "PENDING":
        assert [pause for time, pause in zip(asked, pauses) if time >= 120] == [60] * 22


def test_ctrl_c_ends_only_the_following(results: Path) -> None:
    command(results, "scancel", "echo no >&2; exit 1")
    _, _, attached = attach(results, "RUNNING")
    os.killpg(attached.process.pid, signal.SIGINT)
    code, printed, told = attached.end()
    assert (code, told) == (0, "")
    assert printed.endswith("\nno longer following; job 41 goes on\n")


@pytest.mark.parametrize("stage", ["attach", "cancel"])
def test_a_run_without_a_job_is_refused_in_one_line(results: Path, cli: Cli, stage: str) -> None:
    record = job(run_of(results, "one"), ended_at=time.time(), state="FAILED")
    (record.path / "error.txt").write_text("rank 1 on node2: no")
    squeue(results, f"41|FAILED|None|||{record.name}")
    line = "one: no job is queued or running, and no training runs on this machine"
    # nothing left to cancel is success; nothing to attach to is an error
    how = "its state is failed, saved at step 0: rank 1 on node2: no"
    expected = (
        (0, f"{line}\n", "") if stage == "cancel" else (2, "", f"cellmill attach: {line}; {how}\n")
    )
    assert cli(stage, "one") == expected
    command(results, "squeue", "echo down >&2; exit 1")
    silent = f"cellmill {stage}: no usable answer from squeue (squeue: down); try again\n"
    assert cli(stage, "one") == (2, "", silent)


def test_a_cancelled_job_is_waited_for(results: Path, cli: Cli) -> None:
    train = run_of(results, "one", state=RUNNING)
    checkpoint(train, 100)
    record = job(train, state="RUNNING")
    queue = Listing(results, record, "RUNNING")
    ending = f"(/bin/sleep 1.5; echo '{queue.line('CANCELLED')}' > {queue.file}) > /dev/null 2>&1 &"
    command(results, "scancel", f'echo "$@" >> {results.parent}/scancelled; {ending}')
    printed = (
        "cancelling job 41\njob 41 may save for 120 s; interrupt again to end it at once\n"
        "cancelled job 41; saved at step 100; train resumes from there\n"
    )
    assert cli("cancel", "one") == (0, printed, "")
    assert (results.parent / "scancelled").read_text() == (
        f"--name={record.name} --signal=USR2 41\n--name={record.name} 41\n"
    )
    written = json.loads((record.path / "job.json").read_text())
    assert (written["state"], written["ended_at"] is not None) == ("CANCELLED", True)


def test_a_job_that_was_not_recorded_is_cancelled_too(results: Path, cli: Cli) -> None:
    record = job(run_of(results, "one"))
    (record.path / "job.json").unlink()
    command(results, "scancel", f": > {Listing(results, record, 'PENDING').file}")
    assert "cancelled job 41; saved at step 0" in cli("cancel", "one")[1]
    assert not (record.path / "job.json").exists()


def test_a_local_training_is_stopped_by_a_signal(results: Path, hold: Hold, cli: Cli) -> None:
    train = run_of(results, "one", state=RUNNING)
    job(train, ended_at=1.0, state="TIMEOUT")  # of a cluster that no longer exists: not asked
    process = hold(train)
    code, printed, _ = cli("cancel", "one")
    assert (code, process.wait(100)) == (0, -signal.SIGTERM)
    assert re.fullmatch(
        rf"asking process {process.pid} of \S+ on \S+ to save and end\n"
        rf"ended process {process.pid}; saved at step 0; train resumes from there\n",
        printed,
    )


def test_a_training_on_another_host_is_not_signalled(results: Path, hold: Hold, cli: Cli) -> None:
    train = run_of(results, "one", state=RUNNING)
    process = hold(train)
    holder = json.loads((train / "lock").read_text())
    with open(train / "lock", "r+") as file:  # the same file: another would not be locked
        file.truncate()
        json.dump(holder | {"host": "login7"}, file)
    refused = (
        f"cellmill cancel: {train}: trained by process {process.pid} of {holder['user']} on login7: run cellmill "
        "cancel on login7\n"
    )
    assert cli("cancel", "one") == (2, "", refused)
    assert process.poll() is None


def test_a_log_that_begins_again_is_shown_from_its_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    tail = Tail(log)
    for text in ("step 1\nstep 2\n", "step 3\n"):
        log.unlink(missing_ok=True)
        log.write_text(text)
        tail.read()
    assert capsys.readouterr().out == "step 1\nstep 2\nstep 3\n"
