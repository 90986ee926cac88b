"""A job that is run once, against scripted SLURM commands: it is never left behind."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cellmill.errors import UserError
from cellmill.launch import submit as module
from cellmill.launch.job import Job
from cellmill.launch.submit import End, StillQueued, run_once
from cellmill.runs.jobs import Jobs
from tests.unit.test_slurm_launcher import NONE, Answer, Scripted, leaving, listed, submitted

# a job that scancel was called for is listed as cancelled from then on
NOTE = "(folder / f'cancelled-{sys.argv[-1]}').touch()"
SHOW = """if (folder / f"cancelled-{out.split('|')[0]}").exists():
    out = out.replace('PENDING', 'CANCELLED').replace('RUNNING', 'CANCELLED')"""
WAITS = listed("PENDING", "Resources")
RUNS = listed("RUNNING")


class Once(Scripted):
    """The same commands for `run_once`."""

    def run_once(self, *after: Answer, wait_s: float = 60.0, **answers: list[Answer]) -> End:
        """Run a job with these answers of squeue, the last for all that follow, after its
        submission.
        """
        self.answers(
            **(
                {"squeue": [NONE, NONE, *after], "sbatch": [submitted()], "scancel": [NONE]}
                | answers
            )
        )
        with open(self.fake / "held", "w") as lock:
            job = lambda path: Job("no.module", [str(path)], 1, 1)  # noqa: E731
            return run_once(job, self.machine, self.train, lock.fileno(), wait_s)

    @property
    def recorded(self) -> str:
        """State of the last job on record."""
        return Jobs(self.train).all()[-1].state

    @property
    def cancelled(self) -> list[str]:
        """Ids of the jobs that were cancelled, each by its name too."""
        calls = [line.split() for line in self.calls("scancel")]
        assert all(len(words) == 3 and words[1].startswith("--name=") for words in calls)
        return [job_id for *_, job_id in calls]


@pytest.fixture
def slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Once:
    once = Once(tmp_path, monkeypatch, capsys)
    once.hook("scancel", NOTE)
    once.hook("squeue", SHOW)
    return once


def test_a_job_is_followed_to_its_end(slurm: Once) -> None:
    running, ended = (
        [0, answer[1].replace("node1", "n[1-2]"), ""] for answer in (RUNS, listed("COMPLETED"))
    )
    end = slurm.run_once(WAITS, running, ended)
    assert (end.state, end.job_id, end.nodes, end.error) == ("COMPLETED", "7", "n[1-2]", None)
    assert end.queued_s > 0
    assert slurm.capsys.readouterr().out.splitlines() == [
        f"submitted job 7; its log: {end.log}",
        "job 7: PENDING (Resources): it starts as soon as enough nodes are free",
        "job 7: RUNNING on n[1-2]",
        "job 7: COMPLETED",
    ]
    assert slurm.recorded == "COMPLETED"
    assert slurm.cancelled == []


def test_a_job_that_waits_too_long_is_cancelled(slurm: Once) -> None:
    with pytest.raises(StillQueued) as error:
        slurm.run_once(WAITS, wait_s=0.6)
    assert (
        str(error.value)
        == "job 7 was still PENDING (Resources) after 0.01 min in the queue and was cancelled"
    )
    assert (slurm.cancelled, slurm.recorded) == (["7"], "CANCELLED")


@pytest.mark.parametrize(
    ("line", "lost"),
    [
        ("srun: error: task 1 launch failed: Slurmd could not connect IO", ("1", "Slurmd could not connect IO")),
        ("srun: error: tasks 0-1,3: launch failed: Invalid node name", ("0-1,3", "Invalid node name")),
        ("srun: error: Task launch for StepId=7.0 failed on node n2: Communication connection failure",
         ("n2", "Communication connection failure")),
    ],
)  # fmt: skip
def test_a_job_whose_task_cannot_be_launched_is_not_waited_for(
    slurm: Once, line: str, lost: tuple[str, str]
) -> None:
    leaving(slurm, "7_0_log.out", f"loading\n{line}\nsubmitit\n")
    end = slurm.run_once(RUNS)
    assert (end.state, end.lost) == ("LAUNCH_FAILED", lost)
    assert slurm.cancelled == ["7"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_cancels_the_job(slurm: Once, number: int) -> None:
    slurm.hook("squeue", f"if 'RUNNING' in out:\n    os.kill(os.getppid(), {int(number)})")
    before = signal.signal(number, signal.SIG_DFL)  # under nohup SIGHUP is ignored, and stays so
    try:
        with pytest.raises(KeyboardInterrupt):
            slurm.run_once(RUNS)
    finally:
        signal.signal(number, before)
    assert (slurm.cancelled, slurm.recorded) == (["7"], "CANCELLED")


def test_a_job_left_by_a_killed_process_is_cancelled_first(slurm: Once) -> None:
    _, name = Jobs(slurm.train).new()
    (slurm.fake / "name").write_text(name)
    later = listed("PENDING", "Resources", job=8)
    with pytest.raises(StillQueued):
        slurm.run_once(wait_s=0.1, squeue=[WAITS, WAITS, NONE, later], sbatch=[submitted(8)])
    assert (
        slurm.capsys.readouterr().out.splitlines()[0]
        == "cancelling job 7, left by an earlier process"
    )
    assert slurm.cancelled == ["7", "8"]


def test_a_queue_without_a_usable_answer_is_given_up(
    slurm: Once, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ONCE_PATIENCE_S", 1)
    with pytest.raises(UserError) as error:
        slurm.run_once(WAITS, [0, "Hello\n", ""])
    assert str(error.value) == (
        "no usable answer from squeue for 1 s (squeue answered 'Hello'); job 7 may still run: run the same command to "
        "follow it again, or end it with `scancel 7`"
    )
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        UserError, match=r"^no usable answer from squeue within 1 s \(squeue: .*not on PATH\)$"
    ):
        slurm.run_once()


def test_on_this_machine_the_job_is_its_processes(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from cellmill.config.machine import Machine
from cellmill.launch.job import Job
from cellmill.launch.submit import run_once
with open({str(tmp_path / "lock")!r}, "w") as lock:
    job = Job(sys.argv[1], [], 1, 1)
    end = run_once(lambda path: job, Machine(), Path({str(tmp_path / "one")!r}), lock.fileno(), 1)
print(end.state, end.path.name, end.job_id == end.nodes == "")
"""
    for name, said in (("this", "COMPLETED 001 True"), ("no_such_module", "FAILED 002 True")):
        done = subprocess.run(
            [sys.executable, "-c", code, name], capture_output=True, text=True, timeout=500
        )
        assert done.stdout.splitlines()[-1] == said, done.stdout + done.stderr
