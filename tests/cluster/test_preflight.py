"""`cellmill preflight` on a real SLURM: its lines are true of the cluster."""

import json
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.cluster.launched import cellmill
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


def preflight(rig: Rig, project: Path, train: dict[str, Any], code: int, *more: str) -> list[str]:
    """Lines of a preflight of a profile with that machine."""
    same = {key: train[key] for key in ("nodes", "nproc_per_node") if key in train}
    folder = project / "profiles" / "one"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"set-resources": {"plan": same, "train": train}})
    )
    words = ("preflight", "--profile", "profiles/one", "--config", "config.yaml", *more)
    return cellmill(rig, *words, cwd=project, code=code).splitlines()


def on_two_nodes(**changes: Any) -> dict[str, Any]:
    machine = {
        "launcher": "slurm",
        "nodes": 2,
        "nproc_per_node": 2,
        "slurm_partition": "gpu-a100",
        "runtime": 30,
    }
    return machine | {"mem_mb": 3000, "cpus_per_task": 4, "poll_s": 1} | changes


def test_an_available_machine_is_tried_on_its_nodes(rig: Rig, project: Path) -> None:
    lines = preflight(rig, project, on_two_nodes(slurm_partition="gpu-h100", constraint="h100"), 0)
    log = "results/preflight/one/jobs/001/"
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
        r"ok  shared folder: node3, node4 and this machine read each other's files",
        r"(ok |\? )  ?write speed: [\d,]+ MB/s with fsync on \S+, the slowest.*",
        r"ok  python: (\S+) on node3, node4, \1 here",
        r"ok  cellmill: (\S+) on node3, node4, \1 here",
        r"ok  torch: \S+ on node3, node4",
        *([r"ok  CUDA: \S+ on node3, node4"] if torch.version.cuda else []),
        r"ok  GPUs: none requested and none visible: processes compute on CPU cores",
        r"ok  clock: node3, node4 within [\d.]+ s of this machine",
        r"ok  all-reduce in a node: [\d.]+ GB/s bus bandwidth on \S+, the slowest, 16 MiB by gloo",
        r"ok  all-reduce between nodes: [\d.e-]+ GB/s bus bandwidth over eth0, 16 MiB by gloo",
        r"go",
    ]
    checks = [line for line in lines if not re.match(r"job \d+: [A-Z]+", line)]
    assert [line for line in lines if re.fullmatch(r"job \d+: RUNNING on node\[3-4\]", line)], (
        "\n".join(lines)
    )
    assert len(checks) == len(wanted), "\n".join(lines)
    for line, pattern in zip(checks, wanted):
        assert re.fullmatch(pattern, line), f"{line!r} is not {pattern!r}"
    record = json.loads((project / "results" / "preflight" / "one.json").read_text())
    assert (record["go"], record["job"]["state"], len(record["nodes"])) == (True, "COMPLETED", 2)
    folder = project / "results" / "preflight" / "one"
    for path in (folder, folder / "jobs", folder / "jobs" / "001"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert not rig.squeue()


def test_an_impossible_request_is_reported_without_queueing(rig: Rig, project: Path) -> None:
    # the controller's own words
    for changes, refused in (
        (
            {"mem_mb": 9000},
            r"9000 MB, 4 CPUs: .*; set-resources: train: mem_mb: 8000 at most, cpus_per_task: 8 at most",
        ),
        (
            {"reservation": "nobodys"},
            r"4 CPUs: .*[Rr]eservation.*; set-resources: train: reservation",
        ),
    ):
        lines = preflight(rig, project, on_two_nodes(**changes), 2)
        pattern = rf"no  start: sbatch refuses gpu-a100, 2 nodes, 30 min, (3000 MB, )?{refused}"
        assert [line for line in lines if re.fullmatch(pattern, line)], "\n".join(lines)
    assert not rig.squeue()
    assert not (project / "results" / "preflight" / "one").exists()


@pytest.mark.full
def test_a_new_profile_describes_its_partition(rig: Rig, project: Path) -> None:
    def lines_of(*words: str) -> list[str]:
        return cellmill(rig, *words, cwd=project, code=0).splitlines()

    printed = lines_of("profiles", "new", "one", "--partition", "gpu-h100", "--gpus", "1")
    assert (
        "            nodes 1, on each GPUs h100:1, 1 process, 4 CPU cores, 4000 MB; 60 min per job"
        in printed
    )
    assert printed[3:5] == [
        "  stages    partition cpu: the default: all nodes that are up have GPUs (scontrol)",
        "  plan      device h100: type h100 of the nodes (scontrol)",
    ]
    # the rig's GPUs are files, so only their request can be checked
    lines = lines_of("preflight", "--profile", "one", "--config", "config.yaml", "--no-job")
    assert (
        "ok  GPUs: nodes of gpu-h100 have 2 x h100, requested: 1 x h100 on each of 1: 2 have enough"
        in lines
    )
    lines_of("profiles", "new", "two", "--gpus", "0")
    lines = lines_of("preflight", "--profile", "two", "--config", "config.yaml")
    assert "ok  partition: cpu is up" in lines
    assert lines[-1] == "go"


@pytest.mark.full
def test_a_node_that_does_not_see_the_folder_is_named(rig: Rig, project: Path) -> None:
    results = project / "results"
    results.mkdir()
    rig.hide_folder("node2", results)
    try:
        lines = preflight(rig, project, on_two_nodes(), 2)
    finally:
        rig.show_folder("node2", results)
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
def test_accounts_come_from_slurmdbd(rig_with_accounting: Rig, project: Path) -> None:
    rig = rig_with_accounting
    lines = preflight(rig, project, on_two_nodes(slurm_account="lab", qos="normal"), 0, "--no-job")
    assert "ok  accounting: sacct answers" in lines
    assert [line for line in lines if line.startswith("ok  start: SLURM expects ")]
    # nobody enforces associations here: sbatch takes any name
    preflight(rig, project, on_two_nodes(slurm_account="lba", qos="gold"), 0, "--no-job")
