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
NOISE = ("Traceback", "ChildFailedError", "master_addr", "client socket", "submitit ERROR")


def test_a_start_that_cannot_succeed_takes_one_job_and_its_reason_is_the_last_line(
    rig: Rig, corpus: str, tmp_path: Path
) -> None:
    for name, file, text in (
        ("broken", "torch/__init__.py", "raise ImportError('libcudart.so.99: cannot open shared object file')"),
        ("slow", "sitecustomize.py", SLOW),
    ):
        (tmp_path / name / file).parent.mkdir(parents=True)
        (tmp_path / name / file).write_text(text)
    machine = on_slurm(nodes=1, nproc_per_node=1, gpus_per_node="a100:1", mem_mb=1500, cpus_per_task=2)
    environments = {
        "broken": {"PYTHONPATH": str(tmp_path / "broken")},
        "slow": {"PYTHONPATH": str(tmp_path / "slow")},
        "srun": {"SLURM_NTASKS": "64", "SLURM_NNODES": "9", "SLURM_NTASKS_PER_NODE": "32"},
    }
    runs = {
        name: Launched.start(
            corpus,
            tmp_path / name / "train",
            run_options(4),
            rig.environment | more,
            **machine | ({"runtime": 1, "save_within_s": 5} if name == "slow" else {}),
        )
        for name, more in environments.items()
    }
    assert runs["srun"].end() == 0, runs["srun"].printed
    for name, line in {
        "broken": rf"node\d: {re.escape(sys.executable)} cannot import torch: ImportError: libcudart.so.99: .*",
        "slow": r"start-up took \d+ s of the limit's 60 s, and no step was made: raise runtime to at least \d .*",
    }.items():
        assert runs[name].end() == 2, runs[name].printed
        assert len(runs[name].job_ids()) == 1
        assert re.fullmatch(rf"cellmill train: {line} \(job \d+, log: \S+\)", runs[name].last_line), runs[name].printed
    for run in runs.values():
        assert not [noise for noise in NOISE if noise in run.printed], run.printed


def test_a_node_cut_off_from_the_controller_trains_on_and_one_job_follows_it(
    rig: Rig, corpus: str, tmp_path: Path
) -> None:
    machine = on_slurm(nodes=1, nproc_per_node=1, gpus_per_node="a100:1", mem_mb=1500, cpus_per_task=2)
    train = tmp_path / "run" / "train"
    run = Launched.start(corpus, train, run_options(5000), rig.environment, rest_s=0.3, **machine)
    run.wait_for_step(3)
    nodes = re.findall(r"RUNNING on (node\d)", run.printed)
    slurmd = int((rig.folder / f"slurmd-{nodes[0]}.pid").read_text())
    os.kill(slurmd, signal.SIGSTOP)
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
        os.kill(slurmd, signal.SIGCONT)
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.end() == 75, run.printed
    assert len(run.job_ids()) == 2
