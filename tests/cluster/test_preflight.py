"""`cellmill preflight` on a real SLURM: its lines are true of the cluster, and its job is never left behind."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.cluster.rig import Rig
from tests.distributed.command import wait_for

CONFIG = {
    "corpora": {"sim": {"table": "datasets.tsv"}},
    "train": {"steps": 4},
    "runs": {"tiny": {"corpus": "sim"}},
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The working folder, with a configuration."""
    (tmp_path / "datasets.tsv").write_text("dataset\tpath\nsim\tnone.h5ad\n")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    return tmp_path


def start(rig: Rig, project: Path, train: dict[str, Any], *more: str, inside: list[str] | None = None) -> Any:
    """Start a preflight of a profile with that machine, in a process group of its own."""
    same = {key: train[key] for key in ("nodes", "nproc_per_node") if key in train}
    folder = project / "profiles" / "one"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"set-resources": {"plan": same, "train": train}}))
    words = [sys.executable, "-m", "cellmill.cli", "preflight", "--profile", "profiles/one", "--config", "config.yaml"]
    return launched([*(inside or []), *words, *more], rig, project)


def launched(command: list[str], rig: Rig, project: Path) -> Any:
    """Start a command in the project, in a process group of its own."""
    return subprocess.Popen(
        command,
        cwd=project,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | rig.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def lines_of(process: Any, code: int) -> list[str]:
    """Its output; it must end with that exit code."""
    printed, _ = process.communicate(timeout=500)
    assert process.returncode == code, printed
    return str(printed).splitlines()


def on_two_nodes(**changes: Any) -> dict[str, Any]:
    machine = {"launcher": "slurm", "nodes": 2, "nproc_per_node": 2, "slurm_partition": "gpu-a100", "runtime": 30}
    return machine | {"mem_mb": 3000, "cpus_per_task": 4, "poll_s": 1} | changes


@contextmanager
def busy(rig: Rig, partition: str) -> Iterator[None]:
    """Both nodes of a partition are used by another job."""
    said = rig.call("sbatch", "-p", partition, "-N", "2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 300")
    job_id = said.split()[-1]
    wait_for(lambda: f"{job_id} RUNNING" in " ".join(rig.squeue()), lambda: str(rig.squeue()))
    try:
        yield
    finally:
        rig.call("scancel", job_id)
        wait_for(lambda: not rig.squeue(), lambda: str(rig.squeue()))


def test_an_available_machine_is_tried_on_its_nodes_and_is_go(rig: Rig, project: Path) -> None:
    lines = lines_of(start(rig, project, on_two_nodes(slurm_partition="gpu-h100", constraint="h100")), 0)
    log = "results/preflight/one/jobs/001/"
    addresses = r"node3, node4" if rig.namespaces else r"\S+, \S+|\S+"
    interface = "eth0" if rig.namespaces else r"\S+"
    wanted = [
        r"ok  profile: profiles/one/config\.yaml: launcher slurm, 2 x 2 processes",
        r"ok  commands: sbatch, srun, squeue, scancel",
        r"\?   accounting: none \(sacct: .*\): the cost of a run is computed from its own files",
        r"ok  partition: gpu-h100 is up",
        r"ok  time limit: partition gpu-h100 \(scontrol\) allows 60 min, requested: 30",
        r"ok  nodes: 2 of the 2 nodes of gpu-h100 are up, requested: 2",
        r"\?   GPUs: nodes of gpu-h100 have 2 x h100, but none is requested; set-resources: train: gpus_per_node: "
        r"h100:2, if the runs are to use them",
        r"ok  start: SLURM expects \d{4}-\d\d-\d\d \d\d:\d\d:\d\d on node\[3-4\]",
        r"ok  run tiny: fits 4 processes: 2 replicas of 2 shards, cells not counted yet",
        r"\?   genes of sim: none\.h5ad does not exist yet",
        rf"submitted job (\d+); its log: {log}\1_0_log\.out",
        r"ok  job: job \d+ ran on node\[3-4\] after \d+ s in the queue",
        rf"ok  shared folder: ({addresses}) and this machine read each other's files",
        r"(ok |\? )  ?write speed: [\d,]+ MB/s with fsync on \S+, the slowest.*",
        rf"ok  python: (\S+) on ({addresses}), \1 here",
        rf"ok  cellmill: (\S+) on ({addresses}), \1 here",
        rf"ok  torch: \S+ on ({addresses})",
        *([rf"ok  CUDA: \S+ on ({addresses})"] if torch.version.cuda else []),
        r"ok  GPUs: none requested and none visible: processes compute on CPU cores",
        rf"ok  clock: ({addresses}) within [\d.]+ s of this machine",
        r"ok  all-reduce in a node: [\d.]+ GB/s bus bandwidth on \S+, the slowest, 16 MB by gloo",
        rf"ok  all-reduce between nodes: [\d.e-]+ GB/s bus bandwidth over {interface}, 16 MB by gloo",
        r"go",
    ]
    checks = [line for line in lines if not re.match(r"job \d+: [A-Z]+", line)]
    assert [line for line in lines if re.fullmatch(r"job \d+: RUNNING on node\[3-4\]", line)], "\n".join(lines)
    assert len(checks) == len(wanted), "\n".join(lines)
    for line, pattern in zip(checks, wanted):
        assert re.fullmatch(pattern, line), f"{line!r} is not {pattern!r}"
    record = json.loads((project / "results" / "preflight" / "one.json").read_text())
    assert (record["go"], record["job"]["state"], len(record["nodes"])) == (True, "COMPLETED", 2)
    folder = project / "results" / "preflight" / "one"
    for path in (folder, folder / "jobs", folder / "jobs" / "001"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert not rig.squeue()


def test_a_request_the_cluster_cannot_meet_is_reported_without_queueing(rig: Rig, project: Path) -> None:
    too_much = on_two_nodes(nodes=4, runtime="5h", gpus_per_node="h100:2")
    lines = lines_of(start(rig, project, too_much), 2)
    refusals = [line for line in lines if line.startswith("no ")]
    assert refusals == [
        "no  time limit: partition gpu-a100 (scontrol) allows 60 min, requested: 300; set-resources: train: runtime: "
        "60",
        "no  nodes: 2 of the 2 nodes of gpu-a100 are up, requested: 4; set-resources: train: nodes: 2, or another "
        "slurm_partition",
    ]
    assert "?   job: not tried: the profile has to change first" in lines
    assert lines[-1] == "cellmill preflight: no go: 2 reasons"
    # the controller's own words
    for changes, refused in (
        (
            {"mem_mb": 9000},
            r"9000 MB, 4 CPUs: .*; set-resources: train: mem_mb: 8000 at most, cpus_per_task: 8 at most",
        ),
        ({"reservation": "nobodys"}, r"4 CPUs: .*[Rr]eservation.*; set-resources: train: reservation"),
    ):
        lines = lines_of(start(rig, project, on_two_nodes(**changes)), 2)
        pattern = rf"no  start: sbatch refuses gpu-a100, 2 nodes, 30 min, (3000 MB, )?{refused}"
        assert [line for line in lines if re.fullmatch(pattern, line)], "\n".join(lines)
    assert not rig.squeue()
    assert not (project / "results" / "preflight" / "one").exists()


@pytest.mark.full
def test_a_new_profile_is_go_and_has_the_partitions_figures(rig: Rig, project: Path) -> None:
    def cellmill(*words: str) -> list[str]:
        command = [sys.executable, "-m", "cellmill.cli", *words]
        return lines_of(launched(command, rig, project), 0)

    printed = cellmill("profiles", "new", "one", "--partition", "gpu-h100", "--gpus", "1")
    assert "            nodes 1, on each GPUs h100:1, 1 process, 4 CPU cores, 4000 MB; 60 min per job" in printed
    assert printed[3:5] == [
        "  stages    partition cpu: the default: all nodes that are up have GPUs (scontrol)",
        "  plan      device h100: type h100 of the nodes (scontrol)",
    ]
    # the rig's GPUs are files, so only their request can be checked
    lines = cellmill("preflight", "--profile", "one", "--config", "config.yaml", "--no-job")
    assert "ok  GPUs: nodes of gpu-h100 have 2 x h100, requested: 1 x h100 on each of 1: 2 have enough" in lines
    cellmill("profiles", "new", "two", "--gpus", "0")
    lines = cellmill("preflight", "--profile", "two", "--config", "config.yaml")
    assert "ok  partition: cpu is up" in lines
    assert lines[-1] == "go"


@pytest.mark.full
def test_a_node_that_does_not_see_the_folder_is_named(rig: Rig, project: Path) -> None:
    if not rig.namespaces:
        pytest.skip("all nodes are one without root: a folder cannot be hidden from one of them")
    results = project / "results"
    results.mkdir()
    slurmd = (rig.folder / "slurmd-node2.pid").read_text().strip()
    enter = ["nsenter", f"--target={slurmd}", "--mount"]
    subprocess.run([*enter, "mount", "-t", "tmpfs", "tmpfs", str(results)], check=True)
    try:
        lines = lines_of(start(rig, project, on_two_nodes()), 2)
    finally:
        subprocess.run([*enter, "umount", str(results)], check=True)
    refusals = [line for line in lines if line.startswith("no ")]
    folder = "results/preflight/one/jobs/001"
    assert len(refusals) == 1, "\n".join(lines)
    assert re.fullmatch(
        rf"no  shared folder: node2 could not start: Slurmd could not connect IO \(log: {folder}/\d+_0_log\.out\); "
        r"work in a folder that every node mounts, or set-resources: train: sbatch_options: exclude=node2",
        refusals[0],
    )
    wait_for(lambda: not rig.squeue(), lambda: str(rig.squeue()))


@pytest.mark.full
def test_a_job_that_waits_too_long_or_is_interrupted_or_left_behind_is_cancelled(rig: Rig, project: Path) -> None:
    with busy(rig, "gpu-a100"):
        before = rig.squeue()
        lines = lines_of(start(rig, project, on_two_nodes(), "--wait-min", "0.05"), 2)
        late = [line for line in lines if line.startswith("no ")]
        assert len(late) == 1
        assert re.fullmatch(
            r"no  job: job \d+ was still PENDING( \(\w+\))? after 0\.05 min in the queue and was cancelled; --wait-min "
            r"waits longer; set-resources: train: slurm_partition, qos or nodes may be served sooner",
            late[0],
        )
        assert rig.squeue() == before
        process = start(rig, project, on_two_nodes())
        wait_for(lambda: len(rig.squeue()) == len(before) + 1, lambda: str(rig.squeue()))
        process.send_signal(signal.SIGINT)
        lines = lines_of(process, 130)
        assert re.fullmatch(r"cancelling job \d+", lines[-2])
        assert lines[-1] == "cellmill preflight: interrupted"
        assert rig.squeue() == before
        # killed without a chance to clean up: the next one does
        process = start(rig, project, on_two_nodes())
        wait_for(lambda: len(rig.squeue()) == len(before) + 1, lambda: str(rig.squeue()))
        process.kill()
        process.communicate()
        lines = lines_of(start(rig, project, on_two_nodes(), "--wait-min", "0.02"), 2)
        assert [line for line in lines if re.fullmatch(r"cancelling job \d+, left by an earlier process", line)]
        assert rig.squeue() == before


@pytest.mark.full
def test_inside_an_allocation_its_own_nodes_are_tried(rig: Rig, project: Path) -> None:
    machine = {"launcher": "allocation", "nodes": 2, "nproc_per_node": 1, "mem_mb": 1000, "cpus_per_task": 2}
    salloc = ["salloc", "-p", "gpu-h100", "-N", "2", "--mem=3000", "-c", "4", "-t", "5"]
    lines = lines_of(start(rig, project, machine, inside=salloc), 0)
    assert [
        line for line in lines if re.fullmatch(r"ok  launcher: allocation: job \d+ has 2 nodes, requested: 2", line)
    ]
    assert "ok  job: its processes ran" in lines
    assert [line for line in lines if line.startswith("ok  all-reduce between nodes: ")]
    assert "go" in lines


@pytest.mark.full
def test_accounts_and_accounting_are_those_of_slurmdbd(rig_with_accounting: Rig, project: Path) -> None:
    rig = rig_with_accounting
    lines = lines_of(start(rig, project, on_two_nodes(slurm_account="lab", qos="normal"), "--no-job"), 0)
    assert "ok  accounting: sacct answers" in lines
    assert [line for line in lines if line.startswith("ok  start: SLURM expects ")]
    # nobody enforces associations here: sbatch takes any name
    lines_of(start(rig, project, on_two_nodes(slurm_account="lba", qos="gold"), "--no-job"), 0)
