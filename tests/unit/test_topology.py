"""The launcher's arithmetic for 64 nodes of 8 GPUs, without starting a process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cellmill.config.machine import Machine
from cellmill.config.parallel import Layout, Parallel, layout
from cellmill.launch.job import Job
from cellmill.launch.node import NodeTask, StepNode
from cellmill.launch.rendezvous import VARIABLE, Rendezvous

NODES, GPUS = 64, 8


def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, task: NodeTask, restart: int = 0) -> list[Rendezvous]:
    """The place of each node's agent, from what SLURM tells its tasks."""
    found = []
    for node in range(NODES):
        monkeypatch.setenv("SLURM_STEP_NODELIST", "gpu-[001-032],gpu-[101-132]")
        monkeypatch.setenv("SLURM_NODEID", str(node))
        environment = task.environment(StepNode.of_this_process(), restart)
        monkeypatch.setenv(VARIABLE, environment[VARIABLE])
        found.append(Rendezvous.from_environment())
    return found


def test_every_node_has_its_rank_and_all_the_same_first_node_secret_and_ports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = Machine(launcher="slurm", nodes=str(NODES), nproc_per_node=GPUS, gpus_per_node="h100:8")
    task = NodeTask.of(Job("some.module", ["argument"], NODES, GPUS), machine, tmp_path)
    task = replace(task, secret="of the job")
    found = places(monkeypatch, tmp_path, task)
    assert [place.node for place in found] == list(range(NODES))
    assert {(place.host, place.nodes) for place in found} == {("gpu-001", NODES)}
    (secret,) = {place.secret for place in found}
    ports = found[0].ports
    assert all(20_000 <= port < 32_000 for port in ports), "outside the ports Linux gives to outgoing connections"
    again = places(monkeypatch, tmp_path, task, restart=1)[0]
    assert again.secret != secret
    assert not set(again.ports) & set(ports), "nothing of an earlier start listens there"
    command = task.job(StepNode.of_this_process()).command()
    assert {f"--nnodes={NODES}", f"--nproc-per-node={GPUS}"} <= set(command)
    assert not any(task.secret in word or secret in word or str(port) in word for word in command for port in ports)


def test_hybrid_shard_shards_inside_a_node_and_replicates_across() -> None:
    sizes = layout(Parallel(), NODES * GPUS, GPUS)
    assert sizes == Layout(dp_replicate=NODES, dp_shard=GPUS)
    # ranks are numbered node by node, so a row of the mesh is a node
    groups = [set(range(node * GPUS, (node + 1) * GPUS)) for node in range(NODES)]
    assert [{rank for rank in range(NODES * GPUS) if rank // sizes.dp_shard == row} for row in range(NODES)] == groups


def test_a_larger_shard_group_spans_whole_nodes() -> None:
    assert layout(Parallel(shard_size=32), NODES * GPUS, GPUS) == Layout(dp_replicate=16, dp_shard=32)
