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
from cellmill.launch.submit import StillQueued, run_once

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


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A function that puts the commands on PATH; returns the folder in which they record their calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def make(answer: str = "Submitted batch job NUMBER", code: int = 0, first: str = "PENDING") -> Path:
        head = f"#!{sys.executable} -S\nimport re, sys\nfrom pathlib import Path\nfolder = Path({str(folder)!r})\n"
        given = f"answer, code, first = {answer!r}, {code}, {first!r}\n"
        for name, body in (("sbatch", given + SBATCH), ("squeue", SQUEUE), ("scancel", SCANCEL), ("srun", "")):
            (folder / name).write_text(head + body)
            (folder / name).chmod(0o755)
        return folder

    return make


def run(tmp_path: Path, wait_s: float = 60.0) -> run_once.End:
    machine = Machine(launcher="slurm", poll_s=0.05, runtime=10)
    with open(tmp_path / "lock", "w") as lock:
        return run_once(
            lambda path: Job("no.module", [str(path)], 1, 1), machine, tmp_path / "one", lock.fileno(), wait_s
        )


def job_json(tmp_path: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((tmp_path / "one" / "jobs" / "001" / "job.json").read_text())
    return found


def cancelled(folder: Path) -> list[str]:
    """Ids of the jobs that were cancelled, each by its name too."""
    calls = [line.split() for line in (folder / "cancelled").read_text().splitlines()]
    assert all(len(words) == 2 and words[0].startswith("--name=") for words in calls)
    return [job_id for _, job_id in calls]


def when(tmp_path: Path, state: str, what: Callable[[], object]) -> None:
    """Do something once the record has a state, and the reason that squeue gave."""

    def wait() -> None:
        while not recorded(tmp_path).startswith(state):
            time.sleep(0.02)
        what()

    threading.Thread(target=wait, daemon=True).start()


def recorded(tmp_path: Path) -> str:
    """State and reason in job.json; empty without one."""
    try:
        job = job_json(tmp_path)
        return f"{job['state']} {job['reason']}".strip()
    except (OSError, ValueError):
        return ""


def replace(queue: Path, old: str, new: str) -> None:
    """Change the queue atomically, so that squeue never reads half of it."""
    changed = queue.with_suffix(".new")
    changed.write_text(queue.read_text().replace(old, new))
    changed.replace(queue)


def test_a_job_is_followed_to_its_end(
    tmp_path: Path, cluster: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = cluster()
    queue = folder / "queue"
    when(tmp_path, "PENDING Resources", lambda: replace(queue, "PENDING|Resources|", "RUNNING|None|n[1-2]"))
    when(tmp_path, "RUNNING", lambda: replace(queue, "RUNNING", "COMPLETED"))
    end = run(tmp_path)
    assert (end.state, end.job_id, end.nodes, end.error) == ("COMPLETED", "7", "n[1-2]", None)
    assert end.queued_s > 0
    assert capsys.readouterr().out.splitlines() == [
        f"submitted job 7; its log: {end.log}",
        "job 7: PENDING (Resources)",
        "job 7: RUNNING on n[1-2]",
        "job 7: COMPLETED",
    ]
    assert job_json(tmp_path)["state"] == "COMPLETED"
    assert not (folder / "cancelled").exists()


def test_a_job_that_waits_too_long_is_cancelled(tmp_path: Path, cluster: Callable[..., Path]) -> None:
    folder = cluster()
    with pytest.raises(StillQueued) as error:
        run(tmp_path, wait_s=0.6)
    assert str(error.value) == "job 7 was still PENDING (Resources) after 0.01 min in the queue and was cancelled"
    assert cancelled(folder) == ["7"]
    assert job_json(tmp_path)["state"] == "CANCELLED"


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
    tmp_path: Path, cluster: Callable[..., Path], line: str, lost: tuple[str, str]
) -> None:
    folder = cluster(first="RUNNING")
    log = tmp_path / "one" / "jobs" / "001" / "7_0_log.out"
    when(tmp_path, "RUNNING", lambda: log.write_text(f"loading\n{line}\nsubmitit\n"))
    end = run(tmp_path)
    assert (end.state, end.lost) == ("LAUNCH_FAILED", lost)
    assert cancelled(folder) == ["7"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_cancels_the_job(tmp_path: Path, cluster: Callable[..., Path], number: int) -> None:
    folder = cluster(first="RUNNING")
    when(tmp_path, "RUNNING", lambda: os.kill(os.getpid(), number))
    before = signal.signal(number, signal.SIG_DFL)  # under nohup SIGHUP is ignored, and stays so
    try:
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path)
    finally:
        signal.signal(number, before)
    assert cancelled(folder) == ["7"]
    assert job_json(tmp_path)["state"] == "CANCELLED"


def test_a_refusal_quotes_slurm(tmp_path: Path, cluster: Callable[..., Path]) -> None:
    cluster("sbatch: error: Batch job submission failed: Invalid qos specification", code=1)
    with pytest.raises(UserError, match=r"sbatch refused the job: .*Invalid qos specification"):
        run(tmp_path)


def test_a_job_whose_id_was_lost_is_found_by_its_name(tmp_path: Path, cluster: Callable[..., Path]) -> None:
    cluster("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", code=1)
    with pytest.raises(StillQueued, match=r"^job 7 was still PENDING"):
        run(tmp_path, wait_s=0.3)


def test_a_job_left_by_a_killed_process_is_cancelled_first(
    tmp_path: Path, cluster: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = cluster()
    with pytest.raises(StillQueued):
        run(tmp_path, wait_s=0.1)
    (folder / "queue").write_text((folder / "queue").read_text().replace("CANCELLED", "PENDING"))
    capsys.readouterr()
    with pytest.raises(StillQueued):
        run(tmp_path, wait_s=0.1)
    assert capsys.readouterr().out.splitlines()[0] == "cancelling job 7, left by an earlier process"
    assert cancelled(folder) == ["7", "7", "8"]


def test_a_queue_without_a_usable_answer_is_given_up(
    tmp_path: Path, cluster: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ONCE_PATIENCE_S", 1)
    folder = cluster()
    when(tmp_path, "PENDING Resources", lambda: (folder / "queue").write_text("Hello\n"))
    with pytest.raises(UserError) as error:
        run(tmp_path)
    assert str(error.value) == (
        "no usable answer from squeue for 1 s (squeue answered 'Hello'); job 7 may still run: run the same command to "
        "follow it again, or end it with `scancel 7`"
    )
    (folder / "squeue").unlink()
    with pytest.raises(UserError, match=r"^no usable answer from squeue within 1 s \(squeue: .*not on PATH\)$"):
        run(tmp_path)


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
