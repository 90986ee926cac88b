"""`cellmill train --launcher slurm` on a real SLURM: whatever ends a job or the launcher, the loss curve is that of
an undisturbed run, and there are never two jobs of one run.
"""

import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cellmill.runs.progress import read_lines
from tests.cluster.launched import Launched, need_killable_nodes, on_slurm, run_options, wrapper
from tests.cluster.rig import Rig, inside
from tests.distributed.command import pids_with, wait_for, words

pytestmark = pytest.mark.full  # test_life.py has one run that meets most of it

STEPS = 80


@pytest.fixture(scope="module")
def alone(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The undisturbed curve of four processes on one machine."""
    train = tmp_path_factory.mktemp("alone") / "train"
    left = Launched.start(corpus, train, run_options(STEPS), {}, rest_s=0, nodes=2, nproc_per_node=2)
    assert left.end() == 0, left.printed
    return left.losses()


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


def same_curve(launched: Launched, alone: dict[int, float]) -> None:
    assert launched.losses() == pytest.approx(alone, abs=1e-5)


def test_a_run_longer_than_its_time_limit_is_a_chain_of_jobs_with_one_curve(
    rig: Rig, corpus: str, alone: dict[int, float], tmp_path: Path
) -> None:
    # the first job is signalled 20 to 50 s after its start, and has two minutes to save also on a busy machine
    folder = tmp_path / 'it\'s a "run" $(touch pwned); of mine' / "train"
    machine = on_slurm(runtime=3, save_within_s=160)
    run = Launched.start(corpus, folder, run_options(STEPS), rig.environment, rest_s=0.8, **machine)
    while run.process.poll() is None:  # one limit is enough
        for job_id in run.job_ids()[1:]:
            rig.call("scontrol", "update", f"jobid={job_id}", "timelimit=30", check=False)
        time.sleep(1)
    assert run.end() == 0, run.printed
    assert len(run.job_ids()) > 1, run.printed
    assert [record["state"] for record in run.records()] == ["COMPLETED"] * len(run.job_ids())
    assert "stopped and saved before its time limit or a preemption; going on from step" in run.printed
    same_curve(run, alone)


def test_another_user_on_another_node_neither_reads_nor_ends_a_run(
    rig: Rig, corpus: str, alone: dict[int, float], tmp_path: Path
) -> None:
    if not rig.namespaces:
        pytest.skip("all nodes share one network")
    train, machine = tmp_path / "run" / "train", on_slurm(runtime=60)
    run = Launched.start(corpus, train, run_options(STEPS), rig.environment, rest_s=1, **machine)
    run.wait_for_step(3)
    for node in ("node1", "node2"):
        listening = subprocess.check_output([*inside(node), "ss", "-Hltn"], text=True).splitlines()
        found = {line.split()[3].rpartition(":")[2] for line in listening}
        ports = sorted(found - {"16828"})  # slurmd's own
        assert ports, "processes of gloo and, on the first node, the entrance to the store"
        said = subprocess.run(
            [*inside("node3"), sys.executable, "-c", STRANGER, node, *ports], text=True, stdout=-1, stderr=-1
        )
        assert said.stdout.count("no store at") == 4 * len(ports), said.stdout + said.stderr
    assert run.step() < STEPS, "it came too late"
    assert run.end() == 0, run.printed
    same_curve(run, alone)
    assert len(run.job_ids()) == 1, run.printed


def test_a_preempted_run_saves_in_its_grace_time_and_goes_on_with_the_same_curve(
    rig: Rig, corpus: str, alone: dict[int, float], tmp_path: Path
) -> None:
    run = Launched.start(corpus, tmp_path / "run" / "train", run_options(STEPS), rig.environment, **on_slurm())
    run.wait_for_step(15)
    rig.call(
        "sbatch", "-p", "gpu-a100-high", "-N", "2", "--exclusive", "-t", "1", "-o", "/dev/null", "--wrap", "sleep 2"
    )
    run.wait_for_print("SIGUSR2: saving")
    at = run.step()
    assert run.end() == 0, run.printed
    again = [int(step) for step in re.findall(r"going on from step (\d+)$", run.printed, re.M)]
    assert again, run.printed
    assert again[0] >= at, "what was trained before the preemption was trained again"
    same_curve(run, alone)


def test_runs_whose_node_dies_go_on_with_what_is_left_or_when_it_is_back_with_the_same_curve(
    rig: Rig, corpus: str, alone: dict[int, float], tmp_path: Path
) -> None:
    need_killable_nodes(rig)
    for node in ("node1", "node2", "node3", "node4"):
        wait_for(lambda node=node: rig.node_state(node) == "idle")
    elastic = Launched.start(
        corpus, tmp_path / "elastic" / "train", run_options(STEPS), rig.environment, **on_slurm(nodes="1-2")
    )
    h100 = on_slurm(slurm_partition="gpu-h100", gpus_per_node="h100:2")
    fixed = Launched.start(corpus, tmp_path / "fixed" / "train", run_options(STEPS), rig.environment, **h100)
    elastic.wait_for_step(25)
    fixed.wait_for_step(25)
    rig.kill_node("node2")
    rig.kill_node("node4")
    try:
        rig.start_node("node4")
        assert elastic.end() == 0, elastic.printed
    finally:
        rig.start_node("node2")
    assert fixed.end() == 0, fixed.printed
    assert re.search(r"RUNNING on node\[1-2\]\n.*RUNNING on node1\n", elastic.printed, re.S), elastic.printed
    for run in (elastic, fixed):
        assert "going on from step" in run.printed
        same_curve(run, alone)


def test_a_run_that_lost_a_node_has_all_of_them_again_when_its_job_starts_again(
    rig: Rig, corpus: str, alone: dict[int, float], tmp_path: Path
) -> None:
    need_killable_nodes(rig)
    for node in ("node1", "node2"):
        wait_for(lambda node=node: rig.node_state(node) == "idle")
    train, machine = tmp_path / "run" / "train", on_slurm(nodes="1-2", runtime=30)
    # it must not be done on one node
    run = Launched.start(corpus, train, run_options(STEPS), rig.environment, rest_s=0.6, **machine)
    run.wait_for_step(12)
    rig.kill_node("node2")
    try:
        run.wait_for_print("RUNNING on node1\n")
        lost_at = run.step()
        run.wait_for_step(lost_at + 3)
    finally:
        rig.start_node("node2")
    wait_for(lambda: rig.node_state("node2") == "idle")
    assert run.step() < STEPS, run.printed
    job_id = next(line.split()[0] for line in rig.squeue() if "RUNNING" in line)
    rig.call("scontrol", "requeue", job_id)
    assert run.end() == 0, run.printed
    ran_on = re.findall(r"RUNNING on (\S+)$", run.printed, re.M)
    assert ran_on == ["node[1-2]", "node1", "node[1-2]"], run.printed
    same_curve(run, alone)


def test_a_launcher_that_was_killed_is_followed_by_one_that_attaches_and_takes_over(
    rig: Rig, corpus: str, alone: dict[int, float], tmp_path: Path
) -> None:
    train = tmp_path / "run" / "train"
    first = Launched.start(corpus, train, run_options(STEPS), rig.environment, **on_slurm())
    first.wait_for_step(5)
    first.process.kill()
    first.process.wait()
    assert len(rig.squeue()) == 1
    # a lost terminal loses no job
    closed = Launched.start(corpus, train, run_options(STEPS), rig.environment, **on_slurm())
    closed.wait_for_print("attached to job")
    os.killpg(closed.process.pid, signal.SIGHUP)
    assert closed.end() == 75
    assert "goes on without this process; run the same command to follow it again" in closed.last_line
    assert len(rig.squeue()) == 1
    # this one is what a workflow that was killed leaves behind, the next what its successor starts
    orphan = Launched.start(corpus, train, run_options(STEPS), rig.environment, **on_slurm())
    wait_for(lambda: orphan.printed.count("attached to job") == 2)
    other = Launched.start(corpus, train, run_options(STEPS, lr=2e-3), rig.environment, **on_slurm())
    assert (orphan.end(), other.end()) == (75, 2), other.printed
    assert re.search(
        r"job \d+ is training with another configuration \(train.lr 0.001 -> 0.002\); end it", other.printed
    )
    second = Launched.start(corpus, train, run_options(STEPS), rig.environment, **on_slurm())
    assert second.end() == 0, second.printed
    assert len(second.job_ids()) == 1, "a second job was submitted"
    same_curve(second, alone)


def test_a_job_that_was_submitted_and_not_recorded_is_adopted(rig: Rig, corpus: str, tmp_path: Path) -> None:
    # the launcher dies at the worst moment: sbatch has answered and nothing was written yet
    killer = wrapper(tmp_path / "bin", "sbatch", '"$REAL" "$@" > "$0.out"; kill -9 $PPID; cat "$0.out"')
    train, opts = tmp_path / "run" / "train", run_options(8)
    first = Launched.start(corpus, train, opts, rig.environment | killer, **on_slurm())
    assert first.end() == -signal.SIGKILL
    assert not first.records()
    assert len(rig.squeue()) == 1
    second = Launched.start(corpus, train, opts, rig.environment, **on_slurm())
    assert second.end() == 0, second.printed
    assert re.search(r"job \d+ was submitted but not recorded: adopted by its name", second.printed)
    assert second.job_ids() == []
    assert second.step() == 8


def test_of_two_jobs_of_one_run_one_trains_and_the_other_ends_in_one_line(
    rig: Rig, corpus: str, alone: dict[int, float], tmp_path: Path
) -> None:
    # sbatch accepts the job twice, as when its answer was lost and the controller only slow, and both start at once;
    # submitit names its pickle after the answer it knows
    accepts_twice = """echo "note: job 50 of yours is held"
first=$("$REAL" "$@"); second=$("$REAL" "$@"); echo "$second"
folder=$(dirname "${@: -1}")
pickle() { echo "$folder/${1##* }_submitted.pkl"; }
wait_and_link() { while [ ! -e "$2" ]; do sleep 0.1; done; ln "$2" "$1"; }
wait_and_link "$(pickle "$first")" "$(pickle "$second")" > /dev/null 2>&1 &"""
    twice = wrapper(tmp_path / "bin", "sbatch", accepts_twice)
    small = on_slurm(nproc_per_node=1, gpus_per_node="a100:1", mem_mb=1500, cpus_per_task=2)
    train = tmp_path / "run" / "train"
    run = Launched.start(corpus, train, run_options(STEPS), rig.environment | twice, **small)
    run.wait_for_step(5)
    wait_for(lambda: len(rig.squeue()) == 1)
    assert run.end() == 0, run.printed
    same_curve(run, alone)
    logs = [path.read_text() for path in (train / "jobs" / "001").glob("*_0_log.out")]
    refused = [
        found for log in logs if (found := re.search(r"^job (\d+) is training in .*; job (\d+) ends$", log, re.M))
    ]
    assert len(logs) == 2
    assert len(refused) == 1
    assert "Traceback" not in refused[0].string
    assert [path.name for path in (train / "jobs" / "001").glob("attempt-*.json")] == ["attempt-000.json"]


def test_a_signal_to_the_group_cancels_the_job_and_leaves_a_checkpoint_and_no_process(
    rig: Rig, corpus: str, tmp_path: Path
) -> None:
    runs = {
        signal.SIGINT: on_slurm(nproc_per_node=1),
        signal.SIGTERM: on_slurm(nproc_per_node=1, slurm_partition="gpu-h100", gpus_per_node="h100:2"),
    }
    started = {
        number: Launched.start(corpus, tmp_path / number.name / "train", run_options(5000), rig.environment, **machine)
        for number, machine in runs.items()
    }
    for run in started.values():
        run.wait_for_step(5)
    for number, run in started.items():
        os.killpg(run.process.pid, number)
    for run in started.values():
        assert run.end() == 75, run.printed
        cancelled = r"cellmill train: cancelled job \d+; saved at step (\d+); run the same command to resume"
        found = re.fullmatch(cancelled, run.last_line)
        assert found, run.printed
        assert (run.train / "checkpoints" / f"step-{int(found[1]):08}" / "manifest.json").exists()
        assert int(found[1]) >= 5
        wait_for(lambda run=run: not workers_of(run), lambda run=run: str(workers_of(run)))
    assert rig.squeue() == []


def test_the_queue_may_fail_for_a_while(rig: Rig, corpus: str, tmp_path: Path) -> None:
    # sbatch answers the second time, and its first answer was lost after the job was accepted: one job, not two
    lost = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    flaky = wrapper(
        tmp_path / "bin",
        "sbatch",
        f'if [ ! -e "$0.1" ]; then touch "$0.1"; echo "{lost}" >&2; exit 1; fi\n'
        f'if [ ! -e "$0.2" ]; then touch "$0.2"; "$REAL" "$@" >/dev/null; echo "{lost}" >&2; exit 1; fi\n'
        'touch "$0.3"; exec "$REAL" "$@"',
    )
    run = Launched.start(corpus, tmp_path / "run" / "train", run_options(STEPS), rig.environment | flaky, **on_slurm())
    run.wait_for_step(5)
    assert not (tmp_path / "bin" / "sbatch.3").exists(), "a second job was submitted"
    assert len(rig.squeue()) == 1
    rig.stop_controller()
    run.wait_for_print("warning: no usable answer from squeue (squeue: ")
    rig.start_controller()
    assert run.end() == 0, run.printed
    assert f"warning: sbatch: {lost.removeprefix('sbatch: error: ')}; trying again\n" in run.printed
    assert "squeue answers again\n" in run.printed
    assert "was submitted but not recorded: adopted by its name" in run.printed


def test_inside_an_allocation_the_nodes_of_the_allocation_are_used(rig: Rig, corpus: str, tmp_path: Path) -> None:
    train = tmp_path / "run" / "train"
    machine = {"launcher": "allocation", "nodes": 2, "nproc_per_node": 1, "mem_mb": 1000, "cpus_per_task": 2}
    inside = words(corpus, train, run_options(8), **machine)
    done = subprocess.run(
        ["salloc", "-p", "gpu-h100", "-N", "2", "--mem=3000", "-c", "4", "-t", "5", *inside],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | rig.environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 8/8" in done.stdout
    assert '"world_size": 2' in (train / "status.json").read_text()
    outside = subprocess.run(
        words(corpus, tmp_path / "other" / "train", run_options(8), **machine), capture_output=True, text=True
    )
    assert outside.stderr == (
        "cellmill train: launcher allocation: not inside a SLURM job; start it with salloc or sbatch\n"
    )


def test_the_allocation_of_a_launcher_that_was_killed_is_left_alone(rig: Rig, corpus: str, tmp_path: Path) -> None:
    train = tmp_path / "run" / "train"
    here = {"launcher": "allocation", "nproc_per_node": 1, "mem_mb": 1000, "cpus_per_task": 2}
    inside = words(corpus, train, run_options(5000), **here)
    ask = ("salloc", "-p", "gpu-h100", "--mem=3000", "-c", "4", "-t", "20")
    salloc = subprocess.Popen(
        [*ask, "bash", "-c", '"$@" & until [ -e "$0" ]; do sleep 1; done', str(tmp_path / "end"), *inside],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | rig.environment,
        start_new_session=True,
    )
    try:
        wait_for(lambda: any(line.get("step", 0) >= 3 for line in read_lines(train / "metrics.jsonl")))
        (allocation,) = rig.squeue()
        for pid in pids_with("cellmill.cli train", "--launcher=allocation", str(train)):
            if Path(f"/proc/{pid}/comm").read_text().startswith("python"):  # salloc and bash have the same words
                os.kill(pid, signal.SIGKILL)
        machine = on_slurm(nodes=1, nproc_per_node=1, gpus_per_node="a100:1")
        run = Launched.start(corpus, train, run_options(5000), rig.environment, **machine)
        run.wait_for_print("submitted job")
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.end() == 75, run.printed
        assert "attached to job" not in run.printed
        assert rig.squeue() == [allocation]
    finally:
        (tmp_path / "end").touch()
        salloc.wait(60)


def test_what_a_run_leaves_is_for_its_user_alone_and_holds_no_secret(rig: Rig, corpus: str, tmp_path: Path) -> None:
    run = Launched.start(
        corpus,
        tmp_path / "run" / "train",
        run_options(4),
        rig.environment | {"WANDB_API_KEY": "planted-secret"},
        **on_slurm(nodes=1, nproc_per_node=1, slurm_partition="gpu-h100", gpus_per_node="h100:1"),
    )
    assert run.end() == 0, run.printed
    for folder in (run.train, run.train / "jobs", run.train / "jobs" / "001"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = [path for path in run.train.parent.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in files if b"planted-secret" in path.read_bytes()]


def workers_of(run: Launched) -> list[int]:
    return pids_with(str(run.train), "cellmill.train.worker")
