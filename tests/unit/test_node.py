"""The processes of a job: the task of a node as SLURM runs it, also on 64 of them, and agents on
this machine.
"""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cellmill.config.machine import Machine
from cellmill.launch.job import Job, Restarts, agent_environment, wait_for
from cellmill.launch.network import network_variables
from cellmill.launch.node import NodeTask, write_task
from cellmill.launch.queue import expand
from cellmill.launch.rendezvous import VARIABLE, Rendezvous
from cellmill.launch.signals import requests
from cellmill.runs.jobs import HANG
from cellmill.runs.lock import claim

DIES = """
import json, os, signal, sys
starts, state, saved, error = sys.argv[1:]
count = 1 + (len(open(starts).read()) if os.path.exists(starts) else 0)
open(starts, "a").write("x")
json.dump({"step": int(saved) * count}, open(state, "w"))
if error:
    open(error, "w").write("it says why")
if count < 3:
    os.kill(os.getpid(), signal.SIGKILL)
"""

WAITS = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
(folder / os.environ["RANK"]).touch()
while not (folder / "1").exists():
    time.sleep(0.1)
if os.environ["RANK"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    """A job's folder, two levels inside of its run's, which the first node claims: no other test
    has that run.
    """
    (folder := tmp_path / "submitit" / "7").mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("restarts", "saves", "says_why", "starts", "printed"),
    [
        (2, True, False, 3, "restart 2 of 2"),
        pytest.param(1, True, False, 2, "restart 1 of 1", marks=pytest.mark.full),
        (2, False, False, 2, "lost again without a new checkpoint after step 0: not started again"),
        pytest.param(2, True, True, 1, "", marks=pytest.mark.full),
    ],
)
def test_lost_processes_are_restarted_if_that_can_help(
    tmp_path: Path, restarts: int, saves: bool, says_why: bool, starts: int, printed: str
) -> None:
    (tmp_path / "dies.py").write_text(DIES)
    count = tmp_path / "starts"
    state = tmp_path / "state.json"
    error = str(tmp_path / "error.txt") if says_why else ""
    arguments = [str(count), str(state), "10" if saves else "0", error]
    write_task(Job("dies", arguments, 1, 1, restarts, state_file=str(state)), Machine(), tmp_path)
    task = start(tmp_path, node=0, nodes=1)
    printed_all, _ = task.communicate(timeout=500)
    assert len(count.read_text()) == starts, printed_all
    assert (task.returncode == 0) == (starts == 3)
    assert printed in printed_all
    assert ("starting all again" in printed_all) == (starts > 1)
    assert ("rank 0 on" in printed_all) == (not says_why), "its own line is enough"
    for noise in ("Traceback", "ChildFailedError", "master_addr", "client socket"):
        assert noise not in printed_all
    assert "SIGKILL" in (tmp_path / "node-0.log").read_text()
    assert json.loads((tmp_path / "attempt-000.json").read_text())["exit_code"] == (
        0 if starts == 3 else 1
    )


HUNG = "rank 1 on node2 does not respond; the other ranks have waited 600 s"


def test_a_hang_is_restarted_once_from_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = tmp_path / "error.txt"
    state = tmp_path / "state.json"
    restarts = Restarts(
        Job("trains", [], 1, 2, max_restarts=5, error_file=str(error), state_file=str(state))
    )

    def hang_at(step: int) -> bool:
        state.write_text(json.dumps({"step": step}))
        error.with_name(HANG).write_text(HUNG)
        return restarts.again(1)

    assert [hang_at(0), hang_at(10), hang_at(20)] == [True] * 3
    assert not error.with_name(HANG).exists()
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{HUNG}: starting all again from the last checkpoint, restart 1 of 5"
    assert not hang_at(20)
    assert (error.read_text(), error.with_name(HANG).exists()) == (HUNG, False)


def test_a_hang_without_restarts_is_the_error(tmp_path: Path) -> None:
    error = tmp_path / "error.txt"
    error.with_name(HANG).write_text(HUNG)
    assert not Restarts(Job("trains", [], 1, 2, error_file=str(error))).again(1)
    assert error.read_text() == HUNG


def test_a_node_that_never_comes_ends_the_job(tmp_path: Path) -> None:
    write_task(Job("waits", [str(tmp_path)], 2, 1, join_s=1.0), Machine(), tmp_path)
    printed, _ = (first := start(tmp_path, 0, nodes=2)).communicate(timeout=500)
    assert first.returncode == 1, printed
    assert (
        (tmp_path / "error.txt").read_text().startswith("1 of 2 nodes have not joined: 127.0.0.2; ")
    )
    assert "Traceback" not in printed


def test_a_node_without_the_interface_lists_its_interfaces(tmp_path: Path) -> None:
    write_task(Job("waits", [str(tmp_path)], 1, 1), Machine(interface="ib9"), tmp_path)
    printed, _ = (node := start(tmp_path, 0, nodes=1)).communicate(timeout=500)
    assert node.returncode == 1, printed
    here = ", ".join(name for _, name in socket.if_nameindex())
    line = f"{socket.gethostname()} has no ib9: it has {here}; change interface in the profile"
    assert ((tmp_path / "error.txt").read_text(), printed) == (line, f"{line}\n")


HERE = ["lo", "eth0", "bond0", "bond0.2973", "ib0", "ib1"]


@pytest.mark.parametrize(
    ("wanted", "gloo", "nccl"),
    [
        ("bond0", "bond0", "=bond0"),
        ("=ib1", "ib1", "=ib1"),
        ("hsn0,ib0", "ib0", "=ib0"),  # names that differ by node
        ("eth", "eth0", "=eth0"),
        ("ib", "ib1", "=ib0,ib1"),
        ("bond", "bond0", "=bond0,bond0.2973"),
        ("^bond,eth", "ib1", "^bond,eth"),
    ],
)
def test_an_interface_of_the_profile_is_named_exactly(
    monkeypatch: pytest.MonkeyPatch, wanted: str, gloo: str, nccl: str
) -> None:
    monkeypatch.setattr("cellmill.launch.network.routed_interface", lambda host: "ib1")
    variables = network_variables(wanted, HERE, "node2")
    assert variables == {"GLOO_SOCKET_IFNAME": gloo, "NCCL_SOCKET_IFNAME": nccl}


@pytest.mark.parametrize("wanted", ["ib9", "=ib", "=bond", "^lo,eth,bond,ib"])
def test_an_interface_that_no_name_fits_is_missing(wanted: str) -> None:
    assert network_variables(wanted, HERE, "node2") == {}


def test_a_node_ends_when_the_processes_of_another_are_lost(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    write_task(Job("waits", [str(tmp_path)], 2, 1, join_s=0.0), Machine(), tmp_path)
    tasks = [start(tmp_path, node, nodes=2) for node in range(2)]
    printed = [task.communicate(timeout=500)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [1, 1], printed
    assert "torchrun ended with exit code 1" in printed[0]
    assert "torchrun ended with exit code -9" in printed[1]


def test_a_node_goes_on_while_the_file_system_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_task(Job("waits", [], 1, 1), Machine(), tmp_path)
    monkeypatch.setenv("SLURM_NODEID", "0")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "127.0.0.1")
    agent = [sys.executable, "-c", "import time; time.sleep(2.5)"]
    monkeypatch.setattr(Job, "command", lambda job, signals: agent)
    task = NodeTask(tmp_path / "task.json")
    train = tmp_path.parents[1]
    task.claim = claim(train, "7")
    task.claim.renewed -= 60
    task.attempt["seen_at"] = 0.0

    def failing(method: Any) -> Any:
        def call(path: Path, *given: Any) -> Any:
            if train in path.parents:
                raise OSError(errno.ESTALE, "Stale file handle")
            return method(path, *given)

        return call

    for name in ("exists", "is_dir", "glob"):
        monkeypatch.setattr(Path, name, failing(getattr(Path, name)))
    assert task.run_agent(0, SimpleNamespace(received=None)) == 0


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("n1", ["n1"]),
        ("n1,n3", ["n1", "n3"]),
        ("gpu-[001-003,7],login", ["gpu-001", "gpu-002", "gpu-003", "gpu-7", "login"]),
        ("r[1-2]n[09-10].site", ["r1n09.site", "r1n10.site", "r2n09.site", "r2n10.site"]),
        ("127.0.0.1,127.0.0.2", ["127.0.0.1", "127.0.0.2"]),
        ("", []),
    ],
)
def test_a_node_list_is_expanded_in_its_order(nodelist: str, hosts: list[str]) -> None:
    assert expand(nodelist) == hosts


NODES = 64
GPUS = 8


def test_all_nodes_agree_on_the_first_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = Machine(
        launcher="slurm",
        nodes=str(NODES),
        nproc_per_node=GPUS,
        gpus_per_node="h100:8",
        interface="ib0",
        mem_mb_per_gpu=9000,
    )
    path = write_task(Job("some.module", ["argument"], NODES, GPUS), machine, tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"secret": "of the job"}))
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "ib0")])
    monkeypatch.setenv("SLURM_STEP_NODELIST", "gpu-[001-032],gpu-[101-132]")

    def place(node: int, restart: int = 0) -> Rendezvous:
        """What the agent of a node knows, by the variables that SLURM gives its task."""
        monkeypatch.setenv("SLURM_NODEID", str(node))
        environment = NodeTask(path).environment(restart)
        assert environment["GLOO_SOCKET_IFNAME"] == "ib0"
        assert environment["NCCL_SOCKET_IFNAME"] == "=ib0"
        monkeypatch.setenv(VARIABLE, environment[VARIABLE])
        return Rendezvous.from_environment()

    found = [place(node) for node in range(NODES)]
    assert [place.node for place in found] == list(range(NODES))
    assert {(place.host, place.nodes) for place in found} == {("gpu-001", NODES)}
    (secret,) = {place.secret for place in found}
    ports = found[0].ports
    assert all(20_000 <= port < 32_000 for port in ports), (
        "outside the ports Linux gives to outgoing connections"
    )
    assert {(len(place.hosts), place.hosts[-1], place.join_s) for place in found} == {
        (NODES, "gpu-132", 600.0)
    }
    again = place(0, restart=1)
    assert again.join_s == 0, "SLURM ends a job that has lost a node, and starts it again"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert len({secret, again.secret, place(0).secret, "of the job"}) == 4
    assert not set(again.ports) & set(ports), "nothing of an earlier start listens there"
    assert NodeTask(path).memory_key == "mem_mb_per_gpu"
    command = NodeTask(path).job.command()
    assert {f"--nnodes={NODES}", f"--nproc-per-node={GPUS}"} <= set(command)
    assert not any(
        text in word for word in command for text in ("of the job", secret, *map(str, ports))
    )


def start(folder: Path, node: int, nodes: int) -> subprocess.Popen[str]:
    """The task in `folder`, as SLURM starts it on a node."""
    hosts = ",".join(f"127.0.0.{number + 1}" for number in range(nodes))
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_NODEID": str(node),
        "SLURM_PROCID": str(node),
        "SLURM_LOCALID": "0",
    }
    slurm |= {"SLURM_NTASKS": str(nodes), "SLURM_STEP_NODELIST": hosts}
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", "cellmill.launch.node", str(folder / "task.json")],
        env=os.environ | slurm | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("victim", [0, 1])
def test_the_first_failed_agent_sets_the_exit_code(victim: int) -> None:
    agents = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    agents[victim].kill()
    assert wait_for(agents, lambda: None) == -signal.SIGKILL
    assert agents[1 - victim].returncode == -signal.SIGTERM


def test_processes_share_the_cores_reserved_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(16))
    assert [agent_environment(2, cores)["OMP_NUM_THREADS"] for cores in (0, 6, 1)] == [
        "8",
        "3",
        "1",
    ]
    assert agent_environment(2)["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert agent_environment(2)["OMP_WAIT_POLICY"] == "ACTIVE", "the user wants them to spin"


def test_compiled_kernels_are_cached_on_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "NUMBA_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    local = tmp_path / f"cellmill-{os.getuid()}"

    def caches() -> dict[str, str]:
        return {k: v for k, v in agent_environment(2).items() if k.endswith("_CACHE_DIR")}

    inductor = {"TORCHINDUCTOR_CACHE_DIR": str(local / "torchinductor")}
    assert caches() == inductor | {"TRITON_CACHE_DIR": str(local / "triton")}
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    assert caches() == inductor | {"TRITON_CACHE_DIR": "/mine"}
    local.chmod(0o777)  # others could plant code
    assert caches() == {"TRITON_CACHE_DIR": "/mine"}


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with requests() as received:
            os.kill(os.getpid(), signal.SIGHUP)
            assert received.first is None
            os.kill(os.getpid(), signal.SIGTERM)
            assert received.first == "detach"
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, earlier)
