"""Starts that cannot succeed on a real SLURM: each ends in one job and one line."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.cluster.launched import Launched, on_slurm, run_options
from tests.cluster.rig import Rig
from tests.distributed.command import pids_with, wait_for

pytestmark = pytest.mark.full

SLOW = """
import sys, time
if "cellmill.train.worker" in sys.orig_argv:
    time.sleep(150)
"""
MACHINE = on_slurm(nodes=1, nproc_per_node=1, gpus_per_node="a100:1", mem_mb=1500, cpus_per_task=2)
NOISE = ("Traceback", "ChildFailedError", "master_addr", "client socket", "submitit ERROR")


@pytest.fixture(scope="module")
def starts(rig: Rig, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Launched]:
    """Runs that start on gpu-h100 while the first test uses gpu-a100: one waits for its time limit."""
    folder = tmp_path_factory.mktemp("starts")
    for name, file, text in (
        (
            "broken",
            "torch/__init__.py",
            "raise ImportError('libcudart.so.99: cannot open shared object file')",
        ),
        ("slow", "sitecustomize.py", SLOW),
    ):
        (folder / name / file).parent.mkdir(parents=True)
        (folder / name / file).write_text(text)
    environments = {
        "broken": {"PYTHONPATH": str(folder / "broken")},
        "slow": {"PYTHONPATH": str(folder / "slow")},
        "srun": {"SLURM_NTASKS": "64", "SLURM_NNODES": "9", "SLURM_NTASKS_PER_NODE": "32"},
    }
    h100 = MACHINE | {"slurm_partition": "gpu-h100", "gpus_per_node": "h100:1"}
    return {
        name: Launched.start(
            corpus,
            folder / name / "train",
            run_options(4),
            rig.environment | more,
            **h100 | ({"runtime": 1, "save_within_s": 5} if name == "slow" else {}),
        )
        for name, more in environments.items()
    }


def test_one_job_follows_a_node_cut_off_from_the_controller(
    rig: Rig, corpus: str, tmp_path: Path, starts: dict[str, Launched]
) -> None:
    train = tmp_path / "run" / "train"
    run = Launched.start(corpus, train, run_options(5000), rig.environment, rest_s=0.3, **MACHINE)
    run.wait_for_step(3)
    nodes = re.findall(r"RUNNING on (node\d)", run.printed)
    rig.stop_slurmd(nodes[0])
    try:
        run.wait_for_print("still trains on")
        step = run.step()
        wait_for(lambda: run.step() > step + 20)  # it is waited for
        assert len(run.job_ids()) == 1, run.printed
        for pid in pids_with(str(train), "cellmill.train.worker"):
            os.kill(pid, signal.SIGTERM)
        wait_for(lambda: len(run.job_ids()) == 2, lambda: run.printed)
        run.wait_for_step(run.step() + 5)
        assert run.printed.count("still trains on") == 1
    finally:
        rig.continue_slurmd(nodes[0])
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.end() == 75, run.printed
    cancelled = rf"cellmill train: cancelled job {run.job_ids()[1]}; saved at step \d+; run the same command to resume"
    assert re.fullmatch(cancelled, run.last_line), run.printed
    wait_for(lambda: not pids_with(str(train), "cellmill.train.worker"))
    assert len(run.job_ids()) == 2


def test_a_start_that_cannot_succeed_takes_one_job(
    starts: dict[str, Launched],
) -> None:
    assert starts["srun"].end() == 0, starts["srun"].printed
    for name, line in {
        "broken": rf"node\d: {re.escape(sys.executable)} cannot import torch: ImportError: libcudart.so.99: .*",
        "slow": r"start-up took \d+ s of the limit's 60 s, and no step was made: raise runtime to at least \d .*",
    }.items():
        run = starts[name]
        assert run.end() == 2, run.printed
        assert len(run.job_ids()) == 1
        assert re.fullmatch(rf"cellmill train: {line} \(job \d+, log: \S+\)", run.last_line), (
            run.printed
        )
    for run in starts.values():
        assert not [noise for noise in NOISE if noise in run.printed], run.printed
