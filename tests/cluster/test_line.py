"""The whole line through `snakemake --profile slurm`: stages as jobs of the executor plugin,
training through the launcher on two nodes of two processes; and a stage that can never start.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.launched import cellmill
from tests.cluster.rig import Rig
from tests.distributed.command import wait_for
from tests.workflow.conftest import REPOSITORY, Project, make_project
from tests.workflow.test_published import EXAMPLE, KINDS, check_run, make_example, products

SECRET = "planted-key-of-a-tracker"


@pytest.fixture(scope="module")
def trained(rig: Rig, cells: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, str]:
    """A project that was run through SLURM to the end of its training, and Snakemake's output. The
    folder's name has a space; with a quote the plugin's jobs fail.
    """
    project = make_project(tmp_path_factory.mktemp("line") / "the line", cells)
    write_profile(project.folder / "profiles" / "slurm", rig)
    return project, run(project, rig, "results/runs/tiny/train/status.json")


@pytest.fixture(scope="module")
def line(trained: tuple[Project, str], rig: Rig) -> tuple[Project, str]:
    """The same project after its other stages."""
    project, printed = trained
    return project, printed + run(project, rig)


def run(project: Project, rig: Rig, *targets: str) -> str:
    """What Snakemake prints, with the stages as jobs."""
    done = subprocess.run(
        project.command(*targets, profile=str(project.folder / "profiles" / "slurm")),
        cwd=project.folder,
        env=os.environ | rig.environment | {"OMP_NUM_THREADS": "1", "WANDB_API_KEY": SECRET},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,  # a limit for hangs: the example took 220 s and, on a busy machine, 480
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def write_profile(folder: Path, rig: Rig) -> None:
    """profiles/slurm as shipped, filled in for the test cluster: its partitions, small memory,
    quick polls.
    """
    profile: dict[str, Any] = yaml.safe_load(
        (REPOSITORY / "profiles" / "slurm" / "config.yaml").read_text()
    )
    profile |= {
        "latency-wait": 10,
        "retries": 0,
        "slurm-init-seconds-before-status-checks": 1,
        "seconds-between-status-checks": 1,
        "slurm-status-command": "sacct" if rig.accounting else "squeue",
        "default-resources": {"slurm_partition": "cpu", "mem_mb": 1500, "runtime": 10},
    }
    resources = profile["set-resources"]
    for stage in (
        "preprocess",
        "shard",
        "import",
        "embed",
        "embed_external",
        "predict",
        "evaluate",
    ):
        resources[stage] = {"mem_mb": 1500, "runtime": 10}
    resources["plan"] |= {"nodes": "2", "nproc_per_node": 2, "device": "cpu"}
    resources["train"] |= {
        "nodes": "2",
        "nproc_per_node": 2,
        "gpus_per_node": "a100:2",
        "device": "cpu",
        "slurm_partition": "gpu-a100",
        "mem_mb": 3000,
        "cpus_per_task": 4,
        "runtime": 10,
        "poll_s": 1,
    }
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(profile))


def test_stages_run_as_jobs_with_training_on_two_nodes(trained: tuple[Project, str]) -> None:
    project, printed = trained
    record = json.loads((project.folder / "results/runs/tiny/train/jobs/001/job.json").read_text())
    attempt = json.loads(
        (project.folder / "results/runs/tiny/train/jobs/001/attempt-000.json").read_text()
    )
    assert (attempt["hosts"], attempt["processes"], record["state"]) == (
        ["node1", "node2"],
        4,
        "COMPLETED",
    )
    for stage in ("preprocess", "vocabulary", "shard"):
        assert re.search(rf"SLURM jobid \d+ \(log: .*/rule_{stage}/", printed), printed


@pytest.mark.full
def test_every_stage_is_a_job(line: tuple[Project, str]) -> None:
    project, printed = line
    assert (project.folder / "results" / "report" / "index.html").exists()
    for stage in ("consolidate", "embed", "evaluate"):
        assert re.search(rf"SLURM jobid \d+ \(log: .*/rule_{stage}/", printed), printed


@pytest.mark.full
def test_the_loss_equals_four_processes_on_one_machine(
    line: tuple[Project, str], tmp_path: Path
) -> None:
    project, _ = line
    here = project.folder / "results" / "runs" / "tiny" / "train"
    recorded = json.loads((here / "run.json").read_text())
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "cellmill.cli",
                "train",
                "--options",
                json.dumps(recorded["options"]),
            ),
            *(
                "--manifest",
                recorded["manifest"],
                "--vocabulary",
                recorded["vocabulary"],
                "--out",
                str(tmp_path),
            ),
            *("--nodes", "2", "--nproc-per-node", "2"),
        ],
        cwd=project.folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    on_cluster, on_one = (
        json.loads((path / "status.json").read_text()) for path in (here, tmp_path)
    )
    assert on_cluster["world_size"] == on_one["world_size"] == 4
    for key in ("train_loss", "val_loss"):
        assert on_cluster[key] == pytest.approx(on_one[key], abs=1e-5)


@pytest.mark.full
def test_a_secret_in_the_environment_is_written_to_no_file(line: tuple[Project, str]) -> None:
    project, printed = line
    assert SECRET not in printed
    files = [path for path in project.folder.rglob("*") if path.is_file()]
    assert len(files) > 40
    assert [str(path) for path in files if SECRET.encode() in path.read_bytes()] == []


@pytest.mark.full
def test_the_same_command_finds_nothing_to_do_on_another_machine(line: tuple[Project, str]) -> None:
    project, _ = line
    assert (
        project.jobs(
            "--set-resources", "train:nproc_per_node=1", "train:runtime=7", profile="profiles/local"
        )
        == {}
    )


@pytest.mark.full
def test_a_published_folder_leads_to_predictions_by_jobs(rig: Rig, tmp_path: Path) -> None:
    """One of the two: test_published.py has both on one machine."""
    kind = KINDS[0]
    project, command = make_example(tmp_path / "example")
    write_profile(project.folder / "profiles" / "slurm", rig)
    checks = ("preflight", "--profile", "slurm", "--config", EXAMPLE, "--no-job")
    lines = cellmill(rig, *checks, cwd=project.folder).splitlines()
    for stage, cpus in (("import", 1), ("predict", 8)):
        assert f"ok  stage {stage}: fits cpu, 10 min, 1500 MB, {cpus} CPU" in "\n".join(lines), (
            lines
        )
    printed = run(project, rig, *command, *products(kind))
    for stage in ("import", "predict"):
        assert re.search(rf"SLURM jobid \d+ \(log: .*/rule_{stage}/", printed), printed
    check_run(project.folder, kind)
    job = project.folder / "results" / "runs" / kind / "train" / "jobs" / "001"
    attempt = json.loads((job / "attempt-000.json").read_text())
    assert (attempt["hosts"], attempt["processes"]) == (["node1", "node2"], 4)


@pytest.mark.full
def test_a_stage_says_why_it_can_never_start(rig: Rig, cells: Path, tmp_path: Path) -> None:
    project = make_project(tmp_path / "project", cells)
    write_profile(project.folder / "profiles" / "long", rig)
    file = project.folder / "profiles" / "long" / "config.yaml"
    profile = yaml.safe_load(file.read_text())
    profile["set-resources"]["preprocess"]["runtime"] = 90
    file.write_text(yaml.safe_dump(profile))
    lines = cellmill(
        rig, "preflight", "--profile", "long", "--no-job", cwd=project.folder
    ).splitlines()
    too_long = "partition cpu (scontrol) allows 60 min, requested: 90; set-resources: preprocess: runtime: 60"
    assert f"no  stage preprocess, time limit: {too_long}" in lines, lines
    assert "ok  stage shard: fits cpu, 10 min, 1500 MB, 4 CPUs" in lines, lines
    printed = project.folder / "printed"
    with open(printed, "w") as output:
        process = subprocess.Popen(
            project.command(profile=str(project.folder / "profiles" / "long")),
            cwd=project.folder,
            env=os.environ | rig.environment | {"OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        reason = (
            "PENDING (PartitionTimeLimit): limit 1:30:00 is more than the partition allows: "
            "lower it in the profile"
        )
        wait_for(lambda: reason in printed.read_text(), printed.read_text, within_s=120)
        (line,) = [line for line in printed.read_text().splitlines() if reason in line]
        (job,) = [each.split()[0] for each in rig.squeue()]
        assert line == f"cellmill: stage preprocess: job {job}: {reason}"
        assert (
            cellmill(rig, "status", cwd=project.folder).splitlines()[-1]
            == f"stage preprocess: job {job}: {reason}"
        )
    finally:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:  # seen once: Snakemake went on waiting for its job
            os.killpg(process.pid, signal.SIGKILL)
            for line in rig.squeue():
                rig.call("scancel", line.split()[0])
    wait_for(lambda: not rig.squeue(), lambda: str(rig.squeue()))
