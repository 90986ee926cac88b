"""`cellmill train --launcher slurm` on a real SLURM: whatever ends a job or the launcher, the loss
curve is that of an undisturbed run, and there are never two jobs of one run.
"""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cluster.launched import Launched, on_slurm, run_options, wrapper
from tests.cluster.rig import Rig
from tests.distributed.command import wait_for, words

pytestmark = pytest.mark.full  # test_life.py has the faults that one run can meet

STEPS = 80


@pytest.fixture(scope="module")
def alone(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The undisturbed curve of four processes on one machine."""
    train = tmp_path_factory.mktemp("alone") / "train"
    left = Launched.start(
        corpus, train, run_options(STEPS), {}, rest_s=0, nodes=2, nproc_per_node=2
    )
    assert left.end() == 0, left.printed
    return left.losses()


def same_curve(launched: Launched, alone: dict[int, float]) -> None:
    assert launched.losses() == pytest.approx(alone, abs=1e-5)


def test_a_run_survives_the_loss_of_a_node(
    rig: Rig, corpus: str, alone: dict[int, float], tmp_path: Path
) -> None:
    for node in ("node1", "node2", "node3", "node4"):
        wait_for(lambda node=node: rig.node_state(node) == "idle")
    # slow enough that a node that was lost is back before the last step
    elastic = Launched.start(
        corpus,
        tmp_path / "elastic" / "train",
        run_options(STEPS),
        rig.environment,
        rest_s=1.0,
        **on_slurm(nodes="1-2", runtime=30),
    )
    h100 = on_slurm(slurm_partition="gpu-h100", gpus_per_node="h100:2", runtime=30)
    fixed = Launched.start(
        corpus, tmp_path / "fixed" / "train", run_options(STEPS), rig.environment, **h100
    )
    elastic.wait_for_step(12)
    fixed.wait_for_step(12)
    rig.kill_node("node2")
    rig.kill_node("node4")
    try:
        rig.start_node("node4")
        elastic.wait_for_print("RUNNING on node1\n")
        elastic.wait_for_step(elastic.step() + 3)
    finally:
        rig.start_node("node2")
    wait_for(lambda: rig.node_state("node2") == "idle")
    assert elastic.step() < STEPS, elastic.printed
    rig.call("scontrol", "requeue", elastic.records()[-1]["job_id"])
    for run in (elastic, fixed):
        assert run.end() == 0, run.printed
        assert "going on from step" in run.printed
        same_curve(run, alone)
    ran_on = re.findall(r"RUNNING on (\S+)$", elastic.printed, re.M)
    assert ran_on == ["node[1-2]", "node1", "node[1-2]"], elastic.printed
    assert re.findall(r"RUNNING on (\S+)$", fixed.printed, re.M)[-1] == "node[3-4]", fixed.printed


def test_a_new_launcher_takes_over_from_a_killed_one(
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
    assert (
        "goes on without this process; run the same command to follow it again" in closed.last_line
    )
    assert len(rig.squeue()) == 1
    # this one is what a workflow that was killed leaves behind, the next what its successor starts
    orphan = Launched.start(corpus, train, run_options(STEPS), rig.environment, **on_slurm())
    wait_for(lambda: orphan.printed.count("attached to job") == 2)
    other = Launched.start(
        corpus, train, run_options(STEPS, lr=2e-3), rig.environment, **on_slurm()
    )
    assert (orphan.end(), other.end()) == (75, 2), other.printed
    assert re.search(
        r"job \d+ is training with another configuration \(train.lr 0.001 -> 0.002\); end it",
        other.printed,
    )
    second = Launched.start(
        corpus, train, run_options(STEPS, keep_checkpoints=7), rig.environment, **on_slurm()
    )
    assert second.end() == 0, second.printed
    assert re.search(
        r"job \d+ was submitted with other options \(train.keep_checkpoints \d+ -> 7\), which hold from the next job",
        second.printed,
    )
    assert len(second.job_ids()) == 1, "a second job was submitted"
    same_curve(second, alone)


def test_only_one_of_two_jobs_trains_a_run(
    rig: Rig, corpus: str, alone: dict[int, float], tmp_path: Path
) -> None:
    # sbatch accepts the job twice, as when its answer was lost and the controller only slow, and
    # both start at once; submitit names its pickle after the answer it knows
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
        found
        for log in logs
        if (found := re.search(r"^job (\d+) is training in .*; job (\d+) ends$", log, re.M))
    ]
    assert len(logs) == 2
    assert len(refused) == 1
    assert "Traceback" not in refused[0].string
    assert [path.name for path in (train / "jobs" / "001").glob("attempt-*.json")] == [
        "attempt-000.json"
    ]


def test_the_queue_may_fail_for_a_while(rig: Rig, corpus: str, tmp_path: Path) -> None:
    # sbatch answers the second time, and its first answer was lost after the job was accepted: one
    # job, not two
    lost = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    flaky = wrapper(
        tmp_path / "bin",
        "sbatch",
        f'if [ ! -e "$0.1" ]; then touch "$0.1"; echo "{lost}" >&2; exit 1; fi\n'
        f'if [ ! -e "$0.2" ]; then touch "$0.2"; "$REAL" "$@" >/dev/null; echo "{lost}" >&2; exit 1; fi\n'
        'touch "$0.3"; exec "$REAL" "$@"',
    )
    run = Launched.start(
        corpus,
        tmp_path / "run" / "train",
        run_options(STEPS),
        rig.environment | flaky,
        **on_slurm(),
    )
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


def test_a_launcher_inside_an_allocation_uses_its_nodes(
    rig: Rig, corpus: str, tmp_path: Path
) -> None:
    train = tmp_path / "run" / "train"
    machine = {
        "launcher": "allocation",
        "nodes": 2,
        "nproc_per_node": 1,
        "mem_mb": 1000,
        "cpus_per_task": 2,
    }
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
        words(corpus, tmp_path / "other" / "train", run_options(8), **machine),
        capture_output=True,
        text=True,
    )
    assert outside.stderr == (
        "cellmill train: launcher allocation: not inside a SLURM job; start it with salloc or sbatch\n"
    )
