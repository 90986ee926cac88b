"""A training that is stopped under Snakemake, and the same command again; jobs that SLURM refuses."""

import json
import os
import signal
import subprocess

import pytest
import yaml

from tests.distributed.command import wait_for
from tests.workflow.conftest import ENVIRONMENT, Project

pytestmark = pytest.mark.xdist_group("workflow")

STATUS = "results/runs/tiny/train/status.json"


def test_a_stopped_training_resumes_with_the_same_command(
    finished: Project,
) -> None:
    length = {
        "steps": 100,
        "checkpoint_every_steps": 10,
        "log_every_steps": 20,
        "val_every_steps": 100,
    }
    runs = {"tiny": {"corpus": "sim"}, "stopped": {"corpus": "sim", "train": length}}
    project = finished
    target = STATUS.replace("tiny", "stopped")
    project.write_config(runs=runs)
    folder = (project.folder / target).parent
    process = subprocess.Popen(
        project.command("--", target),
        cwd=project.folder,
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # as a terminal starts it
    )
    wait_for(lambda: list(folder.glob("checkpoints/step-*/manifest.json")))
    os.killpg(process.pid, signal.SIGINT)  # Ctrl-C
    seen, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    stopped = json.loads((folder / "state.json").read_text())
    assert stopped["state"] == "stopped"
    assert 0 < stopped["step"] < 100
    assert seen.splitlines()[-1] == (
        f"cellmill train: stopped at step {stopped['step']} of 100, saved; run the same command to resume"
    )
    assert not (project.folder / target).exists()

    again = project.ran("--", target)
    assert f"going on from step {stopped['step']}" in again
    assert json.loads((project.folder / target).read_text())["step"] == 100
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == sorted(set(steps))
    assert steps[-1] == 100


def test_a_locked_folder_points_to_the_runs_in_it(project: Project) -> None:
    lock = project.folder / ".snakemake" / "locks" / "0.output.lock"
    lock.parent.mkdir(parents=True)
    lock.write_text(f"{STATUS}\n")
    refused = project.snakemake("--", STATUS)
    assert refused.returncode != 0
    assert refused.stdout.splitlines()[-1] == (
        "cellmill: another snakemake works in this folder (`cellmill status` shows its runs); if it was killed, run "
        "snakemake --unlock with the same --profile first"
    )


@pytest.mark.full
def test_a_changed_option_is_refused_until_a_restart(finished: Project) -> None:
    project = finished
    folder = (project.folder / STATUS).parent
    change = "train={lr: 5e-4}"
    refused = project.snakemake("--config", change, "--", STATUS)
    assert refused.returncode != 0
    assert "(train.lr 0.001 -> 0.0005); change it back, or" in refused.stdout
    assert not list(folder.glob("superseded-*"))
    unknown = project.snakemake("--config", change, "restart=tny", "--", STATUS)
    assert "cellmill: restart: no run 'tny'; there are: tiny" in unknown.stdout
    project.ran("--config", change, "restart=tiny", "--", STATUS)
    assert json.loads((folder / "run.json").read_text())["options"]["train"]["lr"] == 5e-4
    assert list(folder.glob("superseded-001/checkpoints/step-*/manifest.json"))
    assert project.jobs("--config", change, "restart=tiny", "--", STATUS) == {}
    assert project.jobs("--config", change, "--", STATUS) == {}
    longer = project.ran("--config", "train={lr: 5e-4, steps: 16}", "--", STATUS)
    assert "going on from step 12 of 12, now 16" in longer
    assert json.loads((project.folder / STATUS).read_text())["step"] == 16


def test_a_job_refused_by_sbatch_is_named_in_the_last_line(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = {
        "sbatch": "echo 'sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Job violates policy' >&2; exit 1",
        "squeue": "exit 0",
        "scontrol": "exit 1",
        "sinfo": "exit 1",
    }
    for name, script in programs.items():
        path = project.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{project.folder / 'bin'}:{os.environ['PATH']}")
    train = {"launcher": "slurm", "nodes": "1", "nproc_per_node": 1}
    profile = {"executor": "slurm", "jobs": 4, "retries": 1, "slurm-status-command": "squeue"}
    profile |= {"default-resources": {"slurm_partition": "cpu", "mem_mb": 1000, "runtime": 5}}
    profile |= {"slurm-no-account": True, "set-resources": {"train": train}}
    file = project.folder / "profiles" / "site" / "config.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(yaml.safe_dump(profile))
    log = project.folder / "logs" / "preprocess" / "sim.sim.log"
    log.parent.mkdir(parents=True)
    log.write_text("cellmill preprocess: of an earlier run\n")
    refused = project.snakemake(profile=str(file.parent))
    assert refused.returncode == 1, refused.stdout
    assert refused.stdout.splitlines()[-2:] == [
        "At least one job did not complete successfully.",
        "cellmill: stage preprocess: sbatch refused the job: QOSMaxSubmitJobPerUserLimit Job violates policy; run the "
        "same command again once others have ended, or with jobs in the profile below your quota",
    ]
