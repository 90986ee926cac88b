"""A job that is run once, against scripted SLURM commands: it is never left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cellmill.config.machine import Machine
from cellmill.errors import UserError
from cellmill.launch import submit as module
from cellmill.launch.job import Job
from cellmill.launch.submit import End, StillQueued, run_once

# sbatch queues job 7, then 8, by the name in its script; scancel ends it; squeue lists it
SBATCH = """
script = open(sys.argv[-1]).read()
name = re.search(r"--job-name=(\\S+)", script)[1]
number = 7 + len(list(folder.glob("submitted-*")))
(folder / f"submitted-{number}").touch()
(folder / "queue").write_text(f"{number}|{first}|Resources||{name}\\n")
answer = answer.replace("NUMBER", str(number))
print(answer) if code == 0 else print(answer, file=sys.stderr)
sys.exit(code)
"""
SQUEUE = "print((folder / 'queue').read_text() if (folder / 'queue').exists() else '', end='')"
SCANCEL = """
with open(folder / "cancelled", "a") as file:
    print(*sys.argv[1:], file=file)
queue = folder / "queue"
queue.write_text(re.sub(r"\\|[A-Z]+\\|", "|CANCELLED|", queue.read_text(), count=1))
"""


class Cluster:
    """One job in a queue of its own."""

    def __init__(self, path: Path) -> None:
        self.path, self.bin, self.folder = path, path / "bin", path / "one" / "jobs" / "001"
        self.queue = self.bin / "queue"
        self.bin.mkdir()
        self.has()

    def has(self, answer: str = "Submitted batch job NUMBER", code: int = 0, first: str = "PENDING") -> None:
        """Give it an sbatch with this answer, and a state for new jobs."""
        head = f"#!{sys.executable} -S\nimport re, sys\nfrom pathlib import Path\nfolder = Path({str(self.bin)!r})\n"
        given = f"answer, code, first = {answer!r}, {code}, {first!r}\n"
        for name, body in (("sbatch", given + SBATCH), ("squeue", SQUEUE), ("scancel", SCANCEL), ("srun", "")):
            (self.bin / name).write_text(head + body)
            (self.bin / name).chmod(0o755)

    def run(self, wait_s: float = 60.0) -> End:
        machine = Machine(launcher="slurm", poll_s=0.05, runtime=10)
        with open(self.path / "lock", "w") as lock:
            job = lambda path: Job("no.module", [str(path)], 1, 1)  # noqa: E731
            return run_once(job, machine, self.path / "one", lock.fileno(), wait_s)

    @property
    def recorded(self) -> str:
        """State and reason in job.json; empty without one."""
        try:
            job = json.loads((self.folder / "job.json").read_text())
            return f"{job['state']} {job['reason']}".strip()
        except (OSError, ValueError):
            return ""

    @property
    def cancelled(self) -> list[str]:
        """Ids of the jobs that were cancelled, each by its name too."""
        calls = [line.split() for line in (self.bin / "cancelled").read_text().splitlines()]
        assert all(len(words) == 2 and words[0].startswith("--name=") for words in calls)
        return [job_id for _, job_id in calls]

    def when(self, state: str, what: Callable[[], object]) -> None:
        """Do something once the record has a state, and the reason that squeue gave."""

        def wait() -> None:
            while not self.recorded.startswith(state):
                time.sleep(0.02)
            what()

        threading.Thread(target=wait, daemon=True).start()

    def replace(self, old: str, new: str) -> None:
        """Change the queue atomically, so that squeue never reads half of it."""
        changed = self.queue.with_suffix(".new")
        changed.write_text(self.queue.read_text().replace(old, new))
        changed.replace(self.queue)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Commands of SLURM, alone on PATH."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return Cluster(tmp_path)


def test_a_job_is_followed_to_its_end(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.when("PENDING Resources", lambda: cluster.replace("PENDING|Resources|", "RUNNING|None|n[1-2]"))
    cluster.when("RUNNING", lambda: cluster.replace("RUNNING", "COMPLETED"))
    end = cluster.run()
    assert (end.state, end.job_id, end.nodes, end.error) == ("COMPLETED", "7", "n[1-2]", None)
    assert end.queued_s > 0
    assert capsys.readouterr().out.splitlines() == [
        f"submitted job 7; its log: {end.log}",
        "job 7: PENDING (Resources)",
        "job 7: RUNNING on n[1-2]",
        "job 7: COMPLETED",
    ]
    assert cluster.recorded == "COMPLETED"
    assert not (cluster.bin / "cancelled").exists()


def test_a_job_that_waits_too_long_is_cancelled(cluster: Cluster) -> None:
    with pytest.raises(StillQueued) as error:
        cluster.run(wait_s=0.6)
    assert str(error.value) == "job 7 was still PENDING (Resources) after 0.01 min in the queue and was cancelled"
    assert cluster.cancelled == ["7"]
    assert cluster.recorded.startswith("CANCELLED")


@pytest.mark.parametrize(
    ("line", "lost"),
    [
        ("srun: error: task 1 launch failed: Slurmd could not connect IO", ("1", "Slurmd could not connect IO")),
        ("srun: error: tasks 0-1,3: launch failed: Invalid node name", ("0-1,3", "Invalid node name")),
        (
            "srun: error: Task launch for StepId=7.0 failed on node n2: Communication connection failure",
            ("n2", "Communication connection failure"),
        ),
    ],
)
def test_a_job_whose_task_cannot_be_launched_is_not_waited_for(
    cluster: Cluster, line: str, lost: tuple[str, str]
) -> None:
    cluster.has(first="RUNNING")
    cluster.when("RUNNING", lambda: (cluster.folder / "7_0_log.out").write_text(f"loading\n{line}\nsubmitit\n"))
    end = cluster.run()
    assert (end.state, end.lost) == ("LAUNCH_FAILED", lost)
    assert cluster.cancelled == ["7"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_cancels_the_job(cluster: Cluster, number: int) -> None:
    cluster.has(first="RUNNING")
    cluster.when("RUNNING", lambda: os.kill(os.getpid(), number))
    before = signal.signal(number, signal.SIG_DFL)  # under nohup SIGHUP is ignored, and stays so
    try:
        with pytest.raises(KeyboardInterrupt):
            cluster.run()
    finally:
        signal.signal(number, before)
    assert cluster.cancelled == ["7"]
    assert cluster.recorded.startswith("CANCELLED")


def test_a_refusal_quotes_slurm_and_a_job_whose_id_was_lost_is_found_by_its_name(cluster: Cluster) -> None:
    failed = "sbatch: error: Batch job submission failed"
    cluster.has(f"{failed}: Socket timed out on send/recv operation", code=1)
    with pytest.raises(StillQueued, match=r"^job 7 was still PENDING"):
        cluster.run(wait_s=0.3)
    cluster.has(f"{failed}: Invalid qos specification", code=1)
    with pytest.raises(UserError, match=r"sbatch refused the job: .*Invalid qos specification"):
        cluster.run()


def test_a_job_left_by_a_killed_process_is_cancelled_first(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StillQueued):
        cluster.run(wait_s=0.1)
    cluster.replace("CANCELLED", "PENDING")
    capsys.readouterr()
    with pytest.raises(StillQueued):
        cluster.run(wait_s=0.1)
    assert capsys.readouterr().out.splitlines()[0] == "cancelling job 7, left by an earlier process"
    assert cluster.cancelled == ["7", "7", "8"]


def test_a_queue_without_a_usable_answer_is_given_up(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ONCE_PATIENCE_S", 1)
    cluster.when("PENDING Resources", lambda: cluster.queue.write_text("Hello\n"))
    with pytest.raises(UserError) as error:
        cluster.run()
    assert str(error.value) == (
        "no usable answer from squeue for 1 s (squeue answered 'Hello'); job 7 may still run: run the same command to "
        "follow it again, or end it with `scancel 7`"
    )
    (cluster.bin / "squeue").unlink()
    with pytest.raises(UserError, match=r"^no usable answer from squeue within 1 s \(squeue: .*not on PATH\)$"):
        cluster.run()


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
        done = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, timeout=500)
        assert done.stdout.splitlines()[-1] == said, done.stdout + done.stderr
