"""One life of a run on a real SLURM: each test does something to it, and at its end the loss curve
is that of an undisturbed run, with every step once.

The tests follow each other; after one that failed, the others fail too. `test_launcher.py` has what
needs a run of its own.
"""

import os
import re
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.launched import Launched, cellmill, on_slurm, run_options, wrapper
from tests.cluster.serve import ServedRig
from tests.distributed.command import pids_with, wait_for

STEPS = 100
OPTIONS = run_options(STEPS, lr=3e-4)
SECRET = "planted-secret"
MACHINE = on_slurm(nodes="1-2", nproc_per_node=1, runtime=30, save_within_s=100)


STRANGER = """
import os, secrets, socket, sys
address = socket.gethostbyname(sys.argv[1])
os.setuid(65534)
ping = bytes([0]) + (0x3C85F7CE).to_bytes(4, "little") + bytes([13]) + b"echo"  # of torch's store
for port in map(int, sys.argv[2:]):
    for said in (ping, secrets.token_bytes(64), secrets.token_bytes(100_000), b"GET / HTTP/1.1\\r\\n\\r\\n"):
        answer = b""
        try:
            with socket.create_connection((address, port), timeout=0.5) as connection:
                connection.sendall(said)
                answer = connection.recv(100)
        except OSError:
            pass
        print("a store" if answer == b"echo" else "no store", "at", port)
"""


class Life:
    """The run, its launchers one after the other, and what was seen of it."""

    def __init__(self, rig: ServedRig, corpus: str, folder: Path) -> None:
        self.rig = rig
        self.corpus = corpus
        self.folder = folder
        self.train = folder / "results" / "runs" / "life" / "train"
        self.launcher: Launched | None = None
        self.undisturbed: Launched | None = None

    def start(self, rest_s: float = 0.8, **environment: str) -> Launched:
        """The same command as always; its workers rest `rest_s` after each step."""
        given = self.rig.environment | {"WANDB_API_KEY": SECRET} | environment
        self.launcher = Launched.start(
            self.corpus, self.train, OPTIONS, given, rest_s=rest_s, **MACHINE
        )
        return self.launcher

    @property
    def now(self) -> Launched:
        assert self.launcher is not None, "an earlier test of this life failed"
        return self.launcher

    def job(self) -> str:
        """Id of the only job in the queue."""
        (line,) = self.rig.squeue()
        return line.split()[0]


@pytest.fixture(scope="module")
def life(rig: ServedRig, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Life]:
    found = Life(
        rig, corpus, tmp_path_factory.mktemp("a life") / 'it\'s a "run" $(touch pwned); of mine'
    )
    alone = tmp_path_factory.mktemp("alone") / "train"
    # it trains while others wait for the nodes
    found.undisturbed = Launched.start(corpus, alone, OPTIONS, {}, rest_s=0, nproc_per_node=1)
    yield found
    found.undisturbed.end()
    if found.launcher is not None and found.launcher.process.poll() is None:
        os.killpg(found.launcher.process.pid, signal.SIGINT)
        found.launcher.end()


def test_a_job_that_was_submitted_but_not_recorded_is_adopted(life: Life) -> None:
    # the launcher dies at the worst moment: sbatch has answered and nothing was written yet
    killer = wrapper(
        life.folder.parent / "bin", "sbatch", '"$REAL" "$@" > "$0.out"; kill -9 $PPID; cat "$0.out"'
    )
    first = life.start(**killer)
    assert first.end() == -signal.SIGKILL
    assert not first.records()
    job = life.job()
    second = life.start()
    second.wait_for_print(f"job {job} was submitted but not recorded: adopted by its name")
    second.wait_for_step(3)
    assert life.job() == job


def test_a_killed_launcher_is_followed_by_one_that_attaches(life: Life) -> None:
    job = life.job()
    life.now.process.kill()
    life.now.process.wait()
    printed = life.now.printed
    third = life.start()
    wait_for(
        lambda: f"attached to job {job}" in third.printed.removeprefix(printed),
        lambda: third.printed,
    )
    assert life.job() == job
    results = ("--results", str(life.folder / "results"))
    status = cellmill(life.rig, "status", *results)
    assert re.search(rf"^life  running  +\d+/{STEPS} .* {job} +RUNNING ", status, re.M), status
    assert f"step 1/{STEPS}" in cellmill(life.rig, "logs", "life", *results)


@pytest.mark.full
def test_another_user_cannot_read_or_end_a_run(life: Life) -> None:
    life.now.wait_for_step(3)
    job = life.job()
    for node in ("node1", "node2"):
        listening = life.rig.run_on_node(node, "ss", "-Hltn").splitlines()
        found = {line.split()[3].rpartition(":")[2] for line in listening}
        ports = sorted(found - {"16828"})  # slurmd's own
        assert ports, "processes of gloo and, on the first node, the entrance to the store"
        said = life.rig.run_on_node("node3", "/usr/bin/python3", "-c", STRANGER, node, *ports)
        assert said.count("no store at") == 4 * len(ports), said
    life.now.wait_for_step(life.now.step() + 1)
    assert life.job() == job


def test_a_preempted_run_saves_in_its_grace_time(life: Life) -> None:
    life.now.wait_for_step(6)
    high = ("-p", "gpu-a100-high", "-N", "2", "--exclusive", "-t", "1")
    life.rig.run_as_other("sbatch", *high, "-o", "/dev/null", "--wrap", "sleep 1")
    life.now.wait_for_print("SIGUSR2: saving")
    at = life.now.step()
    resumed = re.compile(r"going on from step (\d+)$", re.M)
    wait_for(lambda: resumed.search(life.now.printed), lambda: life.now.printed)
    assert int(resumed.findall(life.now.printed)[0]) >= at, (
        "steps before the preemption were trained again"
    )


def test_a_run_whose_node_dies_continues_on_the_other(life: Life) -> None:
    life.now.wait_for_step(life.now.step() + 3)
    starts = life.now.printed.count("RUNNING on ")
    life.rig.kill_node("node2")
    try:
        wait_for(lambda: life.now.printed.count("RUNNING on ") > starts, lambda: life.now.printed)
        at = life.now.step()
        life.now.wait_for_step(at + 3)
    finally:
        life.rig.start_node("node2")
    assert re.findall(r"RUNNING on (\S+)$", life.now.printed, re.M)[-1] == "node1"


def test_a_run_saves_before_its_time_limit(life: Life) -> None:
    job = life.job()
    elapsed = life.rig.call("squeue", "-h", "-j", job, "-o", "%M").strip().split(":")
    ran_s = 60 * int(elapsed[-2]) + int(elapsed[-1])
    # 50 to 110 s from now: SLURM sends the signal when it next looks within save_within_s
    life.rig.call("scontrol", "update", f"jobid={job}", f"timelimit={(ran_s + 50) // 60 + 1}")
    life.now.wait_for_print(
        f"job {job} stopped and saved before its time limit or a preemption; going on from step"
    )
    wait_for(
        lambda: [line.split()[0] != job for line in life.rig.squeue()] == [True],
        lambda: life.now.printed,
    )
    assert life.now.step() < STEPS, "it was done too early"
    assert [record["state"] for record in life.now.records() if record["job_id"] == job] == [
        "COMPLETED"
    ]


def test_an_interrupt_leaves_a_checkpoint(life: Life) -> None:
    job = life.job()
    wait_for(lambda: f"job {job}: RUNNING" in life.now.printed, lambda: life.now.printed)
    life.now.wait_for_step(life.now.step() + 2)
    os.killpg(life.now.process.pid, signal.SIGINT)
    assert life.now.end() == 75, life.now.printed
    cancelled = (
        rf"cellmill train: cancelled job {job}; saved at step (\d+); run the same command to resume"
    )
    found = re.fullmatch(cancelled, life.now.last_line)
    assert found, life.now.printed
    assert (life.train / "checkpoints" / f"step-{int(found[1]):08}" / "manifest.json").exists()
    workers: Any = lambda: pids_with(str(life.train), "cellmill.train.worker")  # noqa: E731
    wait_for(lambda: not workers(), lambda: str(workers()))
    assert life.rig.squeue() == []


def test_the_curve_equals_an_undisturbed_run(life: Life) -> None:
    assert life.now.process.poll() == 75, "an earlier test of this life failed"
    last = life.start(rest_s=0)
    assert life.undisturbed is not None
    assert life.undisturbed.end() == 0, life.undisturbed.printed
    assert last.end() == 0, last.printed
    assert last.losses() == pytest.approx(life.undisturbed.losses(), abs=1e-5)
    assert list(last.losses()) == list(range(1, STEPS + 1))


def test_files_are_private_to_the_user(life: Life) -> None:
    for folder in (life.train, life.train / "jobs", life.train / "jobs" / "001"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = [path for path in life.folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert not list(Path.cwd().glob("pwned"))
