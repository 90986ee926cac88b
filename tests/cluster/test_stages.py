"""A stage that can never start says so: before it is queued, while it waits, and in the table of runs."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cluster.rig import Rig
from tests.cluster.test_line import write_profile
from tests.distributed.command import wait_for
from tests.workflow.conftest import make_project


@pytest.mark.full
def test_a_stage_that_can_never_start_says_why(rig: Rig, cells: Path, tmp_path: Path) -> None:
    if not Path("/etc/slurm/slurm.conf").exists():
        pytest.skip("the executor plugin's jobs look for the cluster in /etc/slurm, which this user cannot write")
    project = make_project(tmp_path / "project", cells)
    write_profile(project.folder / "profiles" / "long", rig)
    file = project.folder / "profiles" / "long" / "config.yaml"
    profile = yaml.safe_load(file.read_text())
    profile["set-resources"]["preprocess"]["runtime"] = 90
    file.write_text(yaml.safe_dump(profile))
    environment = os.environ | rig.environment | {"OMP_NUM_THREADS": "1"}

    def cellmill(*words: str) -> list[str]:
        command = [sys.executable, "-m", "cellmill.cli", *words]
        done = subprocess.run(command, cwd=project.folder, env=environment, capture_output=True, text=True, timeout=300)
        return done.stdout.splitlines()

    lines = cellmill("preflight", "--profile", "long", "--no-job")
    too_long = "partition cpu (scontrol) allows 60 min, requested: 90; set-resources: preprocess: runtime: 60"
    assert f"no  stage preprocess, time limit: {too_long}" in lines, lines
    assert "ok  stage shard: fits cpu, 10 min, 1500 MB, 4 CPUs" in lines, lines
    printed = project.folder / "printed"
    with open(printed, "w") as output:
        process = subprocess.Popen(
            project.command(profile=str(project.folder / "profiles" / "long")),
            cwd=project.folder,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        reason = (
            "PENDING (PartitionTimeLimit): limit 1:30:00 is more than the partition allows: lower it in the profile"
        )
        wait_for(lambda: reason in printed.read_text(), printed.read_text, within_s=120)
        (line,) = [line for line in printed.read_text().splitlines() if reason in line]
        (job,) = [each.split()[0] for each in rig.squeue()]
        assert line == f"cellmill: stage preprocess: job {job}: {reason}"
        assert cellmill("status")[-1] == f"stage preprocess: job {job}: {reason}"
    finally:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:  # seen once: Snakemake went on waiting for its job
            os.killpg(process.pid, signal.SIGKILL)
            for line in rig.squeue():
                rig.call("scancel", line.split()[0])
    wait_for(lambda: not rig.squeue(), lambda: str(rig.squeue()))
