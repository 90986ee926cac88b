"""What a failed process leaves for the launcher, and the hung rank, found from the positions of all ranks."""

import json
import os
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
    assert "device-side assert" in str(line)


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


ALONE = """
import sys
from pathlib import Path
from cellmill.train import failure, worker
failure.JOIN_S = float(sys.argv[2])
worker.main(Path(sys.argv[1]), Path(sys.argv[1], "error.txt"), "cpu")
"""


@pytest.mark.parametrize(
    ("node", "join_s", "named", "waited"),
    [
        ("node6", "0", "rank 1 on node6 and 2 more (ranks 2, 3) do not", "2 s (train.timeout_s)"),
        (None, "2.4", "rank 1 and 2 more (ranks 2, 3) do not", "2.4 s (the least time to join)"),
    ],
)
def test_a_start_that_ranks_never_join_ends_in_time_with_their_names(
    tmp_path: Path, node: str | None, join_s: str, named: str, waited: str
) -> None:
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if node is not None:
        agent.set("nodes/0", node)
    options = train_options(train={"steps": 1, "timeout_s": 2}).model_dump(mode="json")
    (tmp_path / "run.json").write_text(json.dumps({"options": options}))
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": agent.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    places |= {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}
    places |= {"CELLMILL_NODE_LOG": tmp_path / "node-0.log"}
    environment = os.environ | {name: str(value) for name, value in places.items()}
    subprocess.run([sys.executable, "-c", ALONE, tmp_path, join_s], env=environment, capture_output=True, check=False)
    expected = f"{named} respond; the other ranks have waited {waited} at joining the process group"
    assert (tmp_path / "error.txt").read_text() == expected
    assert "most recent call first" in (tmp_path / "node-0.log").read_text(), "the stack of a rank that waits"


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
