"""Nodes that failed a training: which lines name them, and which jobs exclude them for how long."""

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from platform import python_version
from typing import Any

import pytest
import yaml

from cellmill import __version__
from cellmill.cli import main
from cellmill.config.machine import Machine
from cellmill.launch.bad_nodes import KEPT_S, BadNodes, blamed
from cellmill.runs.jobs import JobRecord
from tests.unit.test_slurm_launcher import (
    KILLED,
    NONE,
    Answer,
    Scripted,
    leaving,
    listed,
    recorded,
    scripted,
    submitted,
)

__all__ = ["scripted"]

HUNG = (
    "rank 2 on node2 and 1 more (ranks 3) do not respond; the other ranks have waited 9 s at step 3"
)
STUCK = "rank 3 on node2 is stuck at the forward pass; the other ranks have waited 9 s at step 3"
GPU = "rank 3 on node2: its GPU 1 failed (CUDA error: uncorrectable ECC error encountered); if it"
WRONG = "rank 3 on node2: its GPU 1 failed step 40, computed twice from the same state: the loss differs"
LATE = "1 of 2 nodes have not joined: node2; their logs may say why"
LAUNCH = "srun: error: Task launch for StepId=7.0 failed on node node2: Invalid job credential"
ATTEMPT = {"hosts": ["node1", "node2"], "started_at": 1, "ended_at": 9, "seen_at": 9}


def sinfo(n_nodes: int = 8, **states: str) -> Answer:
    """sinfo's answer: nodes of the default partition, and one of another."""
    lines = ["CLUSTER: north", "other1|idle|other"]
    for number in range(1, n_nodes + 1):
        name = f"node{number}"
        lines.append(f"{name}|{states.get(name, 'mixed')}|cpu*")
    return [0, "\n".join([*lines, ""]), ""]


@pytest.fixture
def chain(scripted: Scripted) -> Scripted:
    """A launcher of jobs of two nodes, all of which fail; `scripts` keeps what was submitted."""
    scripted.machine = scripted.machine.model_copy(update={"nodes": "2"})
    code = "open(folder / 'scripts', 'a').write(script)\n"
    code += f"for job in Path({str(scripted.train / 'jobs')!r}).glob('*'):\n"
    code += f"    (job / 'attempt-000.json').write_text({json.dumps(ATTEMPT)!r})"
    scripted.hook("sbatch", code)
    return scripted


def excluded(scripted: Scripted) -> list[str]:
    """The nodes that each submitted job excludes."""
    scripts = (scripted.fake / "scripts").read_text().split("#!/bin/bash")[1:]
    return ["".join(re.findall(r"^#SBATCH --exclude=(.*)$", script, re.M)) for script in scripts]


SAID = (
    "excluding node2: failed in the last 3.0 days (see status); `cellmill preflight --profile PROFILE --node NODE` "
    "tests one and lifts this\n"
)


def test_later_jobs_exclude_the_node_that_is_named(chain: Scripted) -> None:
    leaving(chain, *KILLED)
    chain.refused(*[listed("FAILED"), NONE, NONE] * 3, sinfo=[sinfo()])
    assert excluded(chain) == ["", "node2", "node2"]
    assert chain.capsys.readouterr().out.count(SAID) == 2


def test_a_node_that_hangs_is_left_for_another_once(chain: Scripted) -> None:
    leaving(chain, "error.txt", HUNG)
    refused = chain.refused(*[listed("FAILED"), NONE, NONE] * 2, sinfo=[sinfo()])
    assert excluded(chain) == ["", "node2"]
    assert refused.startswith(f"{HUNG} (job 7")
    why = f"job 7 ended with FAILED: {HUNG}; going on from step 0 with another job\n{SAID}"
    assert why in chain.capsys.readouterr().out


def test_the_end_of_a_job_that_nobody_followed_counts(chain: Scripted) -> None:
    record = recorded(chain)
    (record.path / "7_0_log.out").write_text(KILLED[1])
    chain.answers(squeue=[listed("FAILED"), NONE], sinfo=[sinfo()])
    assert chain.launcher().living() is None
    assert [node.name for node in BadNodes(chain.train.parents[2]).all()] == ["node2"]


def test_a_hang_ends_the_run_if_no_node_may_be_excluded(chain: Scripted) -> None:
    leaving(chain, "error.txt", HUNG)
    assert chain.refused(listed("FAILED"), sinfo=[sinfo(3)]).startswith(f"{HUNG} (job 7")
    assert excluded(chain) == [""]


@pytest.mark.parametrize(
    ("file", "state", "nodes"),
    [
        (KILLED, "FAILED", ["node2"]),
        (("connection.txt", GPU), "FAILED", ["node2"]),
        (("late.txt", LATE), "TIMEOUT", ["node2"]),
        (("7_0_log.out", LAUNCH), "LAUNCH_FAILED", ["node2"]),
        (("error.txt", HUNG), "FAILED", ["node2"]),
        (("error.txt", STUCK), "FAILED", ["node2"]),
        (("error.txt", WRONG), "FAILED", ["node2"]),
        (("error.txt", WRONG.replace("GPU 1", "CPU")), "FAILED", ["node2"]),
        # these name only who noticed, the end that torch gives all, or every node
        (("connection.txt", "rank 3 on node2: all_reduce failed: closed"), "FAILED", []),
        (("7_1_log.out", KILLED[1].replace("KILL", "ABRT")), "FAILED", []),
        (("late.txt", LATE.replace("node2", "node2, node1")), "TIMEOUT", []),
        (("error.txt", "rank 3 on node2: ValueError: no"), "FAILED", []),
        (KILLED, "TIMEOUT", []),  # restarted in the same job, which went on
    ],
    ids="killed GPU late launch hung stuck wrong CPU peer abort all error restarted".split(),
)
def test_a_line_names_the_node_that_failed(
    tmp_path: Path, file: tuple[str, str], state: str, nodes: list[str]
) -> None:
    record = ended(tmp_path, state)
    (tmp_path / file[0]).write_text(file[1])
    assert blamed(record, dict) == dict.fromkeys(nodes, file[1])


@pytest.mark.parametrize(
    ("states", "hosts", "nodes"),
    [
        ({"node1": "mixed", "node2": "down*"}, ["node1", "node2"], ["node2"]),
        ({"node1": "idle", "node2": "idle"}, ["node1", "node2"], []),  # both are back
        ({}, ["node3"], ["node3"]),
    ],
    ids=["down", "unknown", "single"],
)
def test_a_node_that_slurm_lost_is_named(
    tmp_path: Path, states: dict[str, str], hosts: list[str], nodes: list[str]
) -> None:
    record = ended(tmp_path, "NODE_FAIL", hosts)
    assert blamed(record, lambda: states) == dict.fromkeys(nodes, "NODE_FAIL")


def ended(folder: Path, state: str, hosts: Sequence[str] = ("node1", "node2")) -> JobRecord:
    """The record of job 7, which has ended on these nodes."""
    (folder / "attempt-000.json").write_text(json.dumps(ATTEMPT | {"hosts": hosts}))
    record = JobRecord.of(Machine(launcher="slurm", nodes="2"), folder, "7", "a.0.001")
    return record.write_state(state, ended=True)


@pytest.mark.parametrize(
    ("n_nodes", "fewest", "expected"),
    [(12, 2, [3, 2, 1]), (8, 2, [3, 2]), (7, 2, [3]), (3, 1, []), (8, 8, []), (8, 7, [3])],
)
def test_at_most_a_quarter_of_the_partition_is_excluded(
    tmp_path: Path, n_nodes: int, fewest: int, expected: list[int]
) -> None:
    bad_nodes = BadNodes(tmp_path)
    for name in ("node1", "node2", "node3", "other1"):
        bad_nodes.add(name, "seen to fail")
        time.sleep(0.002)
    states = {f"node{number}": "idle" for number in range(1, n_nodes + 1)}
    assert bad_nodes.excluded(lambda: states, fewest) == [f"node{number}" for number in expected]


def test_nodes_that_are_down_are_not_counted_as_left(tmp_path: Path) -> None:
    bad_nodes = BadNodes(tmp_path)
    bad_nodes.add("node1", "seen to fail")
    states = {"node1": "idle", "node2": "idle", "node3": "drained", "node4": "down*"}
    assert bad_nodes.excluded(lambda: states, 2) == []
    assert bad_nodes.excluded(lambda: states, 1) == ["node1"]
    assert bad_nodes.excluded(lambda: states | {"node1": "down"}, 1) == ["node1"]


def test_an_entry_ages_out(tmp_path: Path) -> None:
    bad_nodes = BadNodes(tmp_path)
    for name, age_s in (("node1", KEPT_S + 60), ("node2", KEPT_S - 60)):
        bad_nodes.add(name, "seen to fail")
        file = bad_nodes.path / f"{name}.json"
        file.write_text(
            json.dumps(json.loads(file.read_text()) | {"failed_at": time.time() - age_s})
        )
    (bad_nodes.path / "node3.json").write_text("{")
    (bad_nodes.path / "-x --wrap=y.json").write_text((bad_nodes.path / "node2.json").read_text())
    assert [node.name for node in bad_nodes.all()] == ["node2"]


def test_nodes_that_the_profile_excludes_stay_excluded(chain: Scripted) -> None:
    BadNodes(chain.train.parents[2]).add("node2", "seen to fail")
    chain.machine = chain.machine.model_copy(update={"sbatch_options": "exclude=node[6-7]"})
    chain.states = ["done"]
    chain.run(listed("COMPLETED"), sinfo=[sinfo()])
    assert excluded(chain) == ["'node[6-7],node2'"]


def test_a_job_that_needs_the_node_is_submitted_with_it(chain: Scripted) -> None:
    BadNodes(chain.train.parents[2]).add("node2", "seen to fail")
    refused = [1, "", "sbatch: error: Requested node configuration is not available\n"]
    chain.states = ["done"]
    before = [NONE] * 3
    printed = chain.run(
        listed("COMPLETED"), before=before, sbatch=[refused, submitted()], sinfo=[sinfo()]
    )
    assert excluded(chain) == ["node2", ""]
    line = "sbatch: Requested node configuration is not available; trying again without excluding node2\n"
    assert line in printed


def test_status_says_which_nodes_are_excluded(chain: Scripted) -> None:
    results = chain.train.parents[2]
    BadNodes(results).add("node2", KILLED[1])
    assert main(["status", "--results", str(results)]) == 0
    *_, last = chain.capsys.readouterr().out.splitlines()
    assert last == f"excluded from new jobs: node2 (0 s ago: {KILLED[1]})"


REPORT = {
    "host": "node2",
    "python": "3.12.1",
    "cellmill": "0",
    "torch": "2",
    "cuda": "12",
    "nccl": "2",
    "driver": "5",
    "gpus": [],
    "interfaces": ["eth0"],
    "written_bytes": 64 << 20,
    "write_s": 0.1,
    "write_error": None,
    "token": None,
    "head_time": None,
    "time": 0,
}
# what the node's processes leave
PROBE = """
jobs = sorted(Path("results/preflight/one/jobs").glob("*"))
head = json.loads((jobs[-1] / "head.json").read_text())
report = REPORT | {"token": head["token"], "gpus": GPUS}
(jobs[-1] / "node-000.json").write_text(json.dumps(report))
found = {"backend": "gloo", "bytes": 1 << 20, "between": None, "interfaces": {}, "inside": []}
(jobs[-1] / "allreduce.json").write_text(json.dumps(found))
"""


def write_profile(**train: Any) -> list[str]:
    """Write a profile of a training under SLURM; return the words of a preflight with it."""
    machine = {"launcher": "slurm", "poll_s": 1} | train
    plan = {"device": "a100", "nodes": train["nodes"]}
    Path("profiles/one").mkdir(parents=True)
    text = yaml.safe_dump({"set-resources": {"plan": plan, "train": machine}})
    Path("profiles/one/config.yaml").write_text(text)
    Path("config.yaml").write_text("corpora: {}\n")
    Path("results").mkdir()
    return ["preflight", "--profile", "profiles/one", "--config", "config.yaml"]


@pytest.mark.parametrize("lost", ["node2", "node1 node2"])
def test_preflight_excludes_the_node_that_fails_alone(
    chain: Scripted, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """srun cannot launch its task; if no node can, the nodes are not the cause."""
    monkeypatch.chdir(chain.train.parents[2])
    words = write_profile(nodes=2)
    tasks = "1" if lost == "node2" else "0,1"
    line = f"srun: error: tasks {tasks} launch failed: Invalid job credential"
    code = "[*jobs] = Path('results/preflight/one/jobs').glob('*')\n"
    chain.hook("sbatch", f"{code}(jobs[0] / '7_0_log.out').write_text({line!r})")
    running = [0, "7|RUNNING|None|node[1-2]|10:00|{name}\n", ""]
    cancelled = listed("CANCELLED")
    answers = {"sbatch": [submitted()], "sinfo": [sinfo()], "scancel": [NONE]}
    chain.answers(squeue=[NONE, NONE, running, running, cancelled], **answers)
    assert main(words) == 2
    nodes = BadNodes(Path("results")).all()
    printed = chain.capsys.readouterr().out
    assert [node.name for node in nodes] == lost.split()[: lost == "node2"]
    assert ("excluding node2 from new jobs; `cellmill preflight" in printed) == bool(nodes)


@pytest.mark.parametrize("gpus", [0, 1])
def test_preflight_of_a_node_excludes_it_or_lifts_that(
    chain: Scripted, monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    monkeypatch.chdir(chain.train.parents[2])
    report = REPORT | {"python": python_version(), "cellmill": __version__}
    probe = PROBE.replace("REPORT", repr(report)).replace("GPUS", repr(["NVIDIA A100"] * gpus))
    chain.hook("sbatch", f"{probe}")
    words = [*write_profile(nodes=3, gpus_per_node="1"), "--node"]
    bad_nodes = BadNodes(Path("results"))
    bad_nodes.add("node2", "seen to fail")
    answers: dict[str, Any] = {"sbatch": [submitted()], "sinfo": [sinfo()]}
    chain.answers(squeue=[NONE, NONE, listed("COMPLETED")], **answers)
    code = main([*words, "node2"])
    captured = chain.capsys.readouterr()
    script = (chain.fake / "script.sh").read_text()
    assert "#SBATCH --nodelist=node2\n" in script
    assert "#SBATCH --nodes=1\n" in script
    assert "--exclude" not in script
    if gpus:
        assert (code, captured.out.splitlines()[-1]) == (0, "node2 passes: new jobs may use it")
        assert bad_nodes.all() == []
    else:
        assert (code, captured.err) == (
            2,
            "cellmill preflight: node2 fails: excluded from new jobs\n",
        )
        [node] = bad_nodes.all()
        assert node.why == "preflight: node2 shows 0 to 1 processes"
    assert main([*words, "node99"]) == 2
    line = "cellmill preflight: --node node99: profile one has no partition with this node\n"
    assert chain.capsys.readouterr().err == line
