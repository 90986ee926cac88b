"""What a failed process leaves for the launcher, and the hung rank, found from the positions of all ranks."""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cellmill.runs.jobs import CONNECTION
from cellmill.train import failure
from cellmill.train.failure import HangWatch, Position, error_line, hang_line, leave_reason
from tests.models import train_options

ECC = "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously reported"


@pytest.mark.parametrize(
    "text",
    [
        ECC,
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: unspecified launch failure",
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
    ],
)
@pytest.mark.parametrize("kind", [RuntimeError, torch.AcceleratorError])
def test_a_failed_gpu_is_a_lost_node_that_is_named(
    text: str, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    reason = tmp_path / CONNECTION
    reason.write_text("rank 0 on n0: all_reduce failed: connection closed")  # a peer may notice first
    leave_reason(tmp_path / "error.txt", kind(text), tmp_path)
    assert not (tmp_path / "error.txt").exists()  # which would end the chain of jobs
    assert reason.read_text() == (
        f"rank 5 on {os.uname().nodename}: its GPU 1 failed ({text.splitlines()[0]}); if it happens again on this "
        "node, leave it out (sbatch_options: exclude=NODE in the profile)"
    )


def test_an_error_of_the_program_on_a_gpu_is_its_own(tmp_path: Path) -> None:
    line = error_line(RuntimeError("CUDA error: device-side assert triggered"), tmp_path)
    assert line is not None
    assert "device-side assert" in line


def positions(*where: tuple[int, str, bool] | None, tick: int) -> list[Position | None]:
    """Positions of ranks that have passed so many, are at `what`, and respond or not, so many ticks after the first."""
    placed = [None if at is None else (at[0], at[1], tick if at[2] else 0) for at in where]
    return [None if at is None else Position(*at, host=f"node{rank // 2}") for rank, at in enumerate(placed)]


GRADIENTS, LOADING, NORM = "the gradient reduction of step 2", "data loading of step 2", "the gradient norm of step 2"


@pytest.mark.parametrize(
    ("where", "line"),
    [
        ([(9, GRADIENTS, True), (8, LOADING, True)],
         "rank 1 on node0 is stuck at data loading of step 2; the other ranks have waited 600 s (train.timeout_s) at "
         "the gradient reduction of step 2"),
        ([(9, NORM, True), (9, NORM, False), (8, "x", True)],
         "rank 1 on node0 does not respond; the other ranks have waited 600 s (train.timeout_s) at the gradient norm "
         "of step 2"),
        ([(9, "the sum of losses of step 2", True), (1, "the start", False), None, (1, "the start", False)],
         "rank 1 on node0 and 2 more (ranks 2, 3) do not respond; the other ranks have waited 600 s (train.timeout_s) "
         "at the sum of losses of step 2"),
        ([(9, "the checkpoint of step 2", True)] * 2,
         "all ranks have waited 600 s (train.timeout_s) at the checkpoint of step 2 and none is behind: check the "
         "network between them"),
        ([(9, LOADING, True)],
         "rank 0 on node0 has been stuck at data loading of step 2 for 600 s (train.timeout_s); its stack is in "
         "the log"),
    ],
)  # fmt: skip
def test_the_line_names_the_rank_behind(where: list[tuple[int, str, bool] | None], line: str) -> None:
    assert hang_line(positions(*where, tick=0), positions(*where, tick=4), "600 s (train.timeout_s)") == line


def test_a_rank_that_never_joins_is_named_with_its_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(failure, "JOIN_S", 0.0)
    monkeypatch.setenv("CELLMILL_NODE_LOG", str(tmp_path / "node-0.log"))
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent.set("nodes/1", "node7")
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": agent.port, "RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}
    for name, value in places.items():
        monkeypatch.setenv(name, str(value))
    dist.PrefixStore("watch", agent).set("1", json.dumps(asdict(Position(0, "joining the process group", 1, "node0"))))
    lines: queue.Queue[str] = queue.Queue()

    def line() -> str:
        HangWatch().start(0.4, lines.put)
        return lines.get(timeout=200)

    # rank 1 publishes nothing more either; ranks 2 and 3 never published anything
    assert line() == (
        "rank 1 on node0 and 2 more (ranks 2, 3) do not respond; the other ranks have waited 0.4 s (train.timeout_s) "
        "at joining the process group"
    )
    assert "most recent call first" in (tmp_path / "node-0.log").read_text(), "the stack of a rank that waits"
    agent.delete_key("watch/1")
    assert "rank 1 and 2 more" in line()  # node 0 has not said its name
    agent.set("nodes/0", "node6")
    assert line().startswith("rank 1 on node6 and 2 more")
    monkeypatch.setattr(failure, "JOIN_S", 0.8)
    assert "waited 0.8 s (the least time to join) at" in line()


ALONE = """
import sys
from pathlib import Path
from cellmill.train import failure, worker
failure.JOIN_S = 0.0
worker.main(Path(sys.argv[1]), Path(sys.argv[1], "error.txt"), "cpu")
"""


def test_a_start_that_a_rank_never_joins_ends_after_timeout_s_with_its_name(tmp_path: Path) -> None:
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent.set("nodes/0", "node6")
    options = train_options(train={"steps": 1, "timeout_s": 2}).model_dump(mode="json")
    (tmp_path / "run.json").write_text(json.dumps({"options": options}))
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": agent.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    places |= {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    environment = os.environ | {name: str(value) for name, value in places.items()}
    subprocess.run([sys.executable, "-c", ALONE, tmp_path], env=environment, capture_output=True, check=False)
    assert (tmp_path / "error.txt").read_text() == (
        "rank 1 on node6 does not respond; the other ranks have waited 2 s (train.timeout_s) at joining the process "
        "group"
    )


def test_waiting_for_a_checkpoint_has_no_timeout() -> None:
    agent, watch, ended = dist.HashStore(), HangWatch(), threading.Event()
    store = dist.PrefixStore("watch", agent)
    watch.at("the start")
    watch.warm = True

    def other(saving: bool) -> None:
        store.set("1", json.dumps(asdict(Position(5, "the checkpoint of step 2", 1, "node1", saving))))

    other(saving=True)
    thread = threading.Thread(target=watch._run, args=(agent, 0, 2, 2, 0.1, lambda line: ended.set()), daemon=True)
    thread.start()
    time.sleep(1)
    assert not ended.is_set()
    other(saving=False)
    assert ended.wait(200)
    thread.join()
