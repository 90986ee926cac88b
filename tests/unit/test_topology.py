"""The launcher's arithmetic for 64 nodes of 8 GPUs, without starting a process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cellmill.config.machine import Machine
from cellmill.config.parallel import Layout, Parallel, layout
from cellmill.launch.job import Job
from cellmill.launch.node import NodeTask, StepNode

NODES, GPUS = 64, 8


def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The agent's command on each node, from what SLURM tells its tasks."""
    machine = Machine(launcher="slurm", nodes=str(NODES), nproc_per_node=GPUS, gpus_per_node="h100:8")
    task = NodeTask.of(Job("some.module", ["argument"], NODES, GPUS), machine, tmp_path)
    found = []
    for node in range(NODES):
        monkeypatch.setenv("SLURM_STEP_NODELIST", "gpu-[001-032],gpu-[101-132]")
        monkeypatch.setenv("SLURM_NODEID", str(node))
        found.append(task.command(StepNode.of_this_process()))
    return found


def test_every_node_has_its_rank_and_all_the_same_master_and_port(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = commands(monkeypatch, tmp_path)
    flags = [dict(word[2:].split("=", 1) for word in command if re.match(r"--[\w-]+=", word)) for command in found]
    assert [int(flag["node-rank"]) for flag in flags] == list(range(NODES))
    assert {flag["master-addr"] for flag in flags} == {"gpu-001"}
    assert {flag["nnodes"] for flag in flags} == {str(NODES)}
    assert {flag["nproc-per-node"] for flag in flags} == {str(GPUS)}
    (port,) = {int(flag["master-port"]) for flag in flags}
    assert 20_000 <= port < 32_000, "outside the ports Linux gives to outgoing connections"


def test_ports_of_jobs_differ(tmp_path: Path) -> None:
    machine = Machine(launcher="slurm")
    ports = {NodeTask.of(Job("m", [], 1, 1), machine, tmp_path).port for _ in range(100)}
    assert len(ports) > 90


def test_hybrid_shard_shards_inside_a_node_and_replicates_across() -> None:
    sizes = layout(Parallel(), NODES * GPUS, GPUS)
    assert sizes == Layout(dp_replicate=NODES, dp_shard=GPUS)
    # ranks are numbered node by node, so a row of the mesh is a node
    groups = [set(range(node * GPUS, (node + 1) * GPUS)) for node in range(NODES)]
    assert [{rank for rank in range(NODES * GPUS) if rank // sizes.dp_shard == row} for row in range(NODES)] == groups


def test_a_larger_shard_group_spans_whole_nodes() -> None:
    assert layout(Parallel(shard_size=32), NODES * GPUS, GPUS) == Layout(dp_replicate=16, dp_shard=32)
