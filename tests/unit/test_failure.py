"""What a failed process leaves for the launcher, also out of memory, and the hung rank, found from
all positions.
"""

import errno
import json
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from small_corpus import write_corpus
from torch.distributed import distributed_c10d

from cellmill.config.options import TrainOptions
from cellmill.data.shards.manifest import Manifest
from cellmill.planner.out_of_memory import advise, find_exhausted_memory
from cellmill.runs.jobs import CONNECTION
from cellmill.train.failure import error_line, leave_reason
from cellmill.train.hang_watch import HangWatch, Position, hang_line
from tests.distributed.conftest import options
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
    # a peer may notice first
    reason.write_text("rank 0 on n0: all_reduce failed: connection closed")
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
    """Positions of ranks that have passed so many, are at `what`, and respond or not, so many ticks
    after the first.
    """
    placed = [None if at is None else (at[0], at[1], tick if at[2] else 0) for at in where]
    return [
        None if at is None else Position(*at, host=f"node{rank // 2}")
        for rank, at in enumerate(placed)
    ]


GRADIENTS = "the gradient reduction of step 2"
LOADING = "data loading of step 2"
NORM = "the gradient norm of step 2"


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
def test_the_line_names_the_slow_rank(where: list[tuple[int, str, bool] | None], line: str) -> None:
    assert (
        hang_line(positions(*where, tick=0), positions(*where, tick=4), "600 s (train.timeout_s)")
        == line
    )


ALONE = """
import sys
from pathlib import Path
from cellmill.train import hang_watch, worker
hang_watch.JOIN_S = float(sys.argv[2])
worker.main(Path(sys.argv[1]), Path(sys.argv[1], "error.txt"), "cpu")
"""


@pytest.mark.parametrize(
    ("node", "join_s", "named", "waited"),
    [
        ("node6", "0", "rank 1 on node6 and 2 more (ranks 2, 3) do not", "2 s (train.timeout_s)"),
        (None, "2.4", "rank 1 and 2 more (ranks 2, 3) do not", "2.4 s (the least time to join)"),
    ],
)
def test_ranks_that_never_join_are_named_in_time(
    tmp_path: Path, node: str | None, join_s: str, named: str, waited: str
) -> None:
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if node is not None:
        agent.set("nodes/0", node)
    given = train_options(train={"steps": 1, "timeout_s": 2}).model_dump(mode="json")
    (tmp_path / "run.json").write_text(json.dumps({"options": given}))
    places = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": agent.port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    places |= {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}
    places |= {"CELLMILL_NODE_LOG": tmp_path / "node-0.log"}
    environment = os.environ | {name: str(value) for name, value in places.items()}
    subprocess.run(
        [sys.executable, "-c", ALONE, tmp_path, join_s],
        env=environment,
        capture_output=True,
        check=False,
    )
    expected = f"{named} respond; the other ranks have waited {waited} at joining the process group"
    assert (tmp_path / "error.txt").read_text() == expected
    assert "most recent call first" in (tmp_path / "node-0.log").read_text(), (
        "the stack of a rank that waits"
    )


def test_waiting_for_a_checkpoint_has_no_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    process = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    for name, value in (process | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": agent.port}).items():
        monkeypatch.setenv(name, str(value))
    watch = HangWatch()
    ended = threading.Event()
    store = dist.PrefixStore("watch", agent)
    watch.reach("the start")
    watch.warm = True

    def other(saving: bool) -> None:
        store.set(
            "1", json.dumps(asdict(Position(5, "the checkpoint of step 2", 1, "node1", saving)))
        )

    other(saving=True)
    watch.start(0.1, lambda line: ended.set())
    time.sleep(1)
    assert not ended.is_set()
    other(saving=False)
    assert ended.wait(200)
    watch.close()


FULL = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1 GiB is free"


def recorded_run(folder: Path, manifest: Manifest, parallel: dict[str, str]) -> Path:
    """The run.json of a run on these shards."""
    parsed = TrainOptions.model_validate(options(parallel))
    record = {"options": parsed.model_dump(mode="json"), "manifest": str(manifest.path)}
    run_json = folder / "run.json"
    run_json.write_text(json.dumps(record))
    return run_json


def test_the_message_names_the_first_change_for_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    manifest = write_corpus(tmp_path, 240, n_vars=120)
    line = str(error_line(MemoryError(), tmp_path))
    general = "lower train.token_budget, or set parallel.activation_checkpointing to full"
    assert line.endswith(f"out of memory (MemoryError); {general}"), "a run without a plan"

    def planned(**parallel: str) -> str:
        return advise(recorded_run(tmp_path, manifest, parallel), 4, 2)

    line = planned()
    assert " per process (activations " in line
    assert line.endswith("): lower train.token_budget to 128")
    who = f"rank 3 on {os.uname().nodename}: out of memory ({FULL[:120].rstrip('.')})"
    assert error_line(torch.OutOfMemoryError(FULL), tmp_path) == f"{who}; {line}"
    assert planned(activation_checkpointing="full").endswith("): lower train.token_budget to 128")


def test_a_process_that_cannot_pin_is_advised_to_request_more(tmp_path: Path) -> None:
    manifest = write_corpus(tmp_path, 240, n_vars=120)
    run_json = recorded_run(tmp_path, manifest, {"cpu_offload": "optimizer"})
    line = advise(run_json, 4, 2, "cuda", "host")
    request = "request more memory per node (mem_mb, mem_mb_per_cpu or mem_mb_per_gpu)"
    assert re.fullmatch(
        rf"the plan was to hold [\d.]+ kB in host memory per node: {re.escape(request)}, or shard over "
        r"more nodes \(FULL_SHARD\)",
        line,
    )


def test_a_full_gpu_is_named_beside_memory_that_cannot_be_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    request = "request more memory per node (mem_mb, mem_mb_per_cpu or mem_mb_per_gpu)"
    full = "; or another program fills the GPU: nvidia-smi or rocm-smi lists it"
    line = str(error_line(torch.AcceleratorError("CUDA error: out of memory"), tmp_path))
    assert line.endswith(f"{request}{full}")
    line = str(error_line(OSError(errno.ENOMEM, "Cannot allocate memory"), tmp_path))
    assert line.endswith(request)


def test_a_failed_collective_is_named_with_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "3", "GLOO_SOCKET_IFNAME": "ib7", "NCCL_IB_DISABLE": "1"}.items():
        monkeypatch.setenv(name, value)

    class Backend:
        def __init__(self, error: Exception) -> None:
            self.error = error

        def size(self) -> int:
            raise self.error

    def failed(error: Exception) -> Exception:
        with pytest.raises(type(error)) as raised:
            distributed_c10d._get_group_size(Backend(error))
        return raised.value

    where = f"rank 3 on {os.uname().nodename}: _get_group_size failed: "
    network = "(GLOO_SOCKET_IFNAME=ib7, NCCL_IB_DISABLE=1)"
    leave_reason(tmp_path / "error.txt", failed(MemoryError("std::bad_alloc")), tmp_path)
    assert (tmp_path / "error.txt").read_text() == f"{where}std::bad_alloc {network}"
    for reason in ("gloo: Connection closed by peer", "NCCL error: later"):
        leave_reason(tmp_path / "jobs" / "error.txt", failed(RuntimeError(reason)), tmp_path)
    assert (
        tmp_path / "jobs" / "connection.txt"
    ).read_text() == f"{where}gloo: Connection closed by peer {network}"
    assert not (tmp_path / "jobs" / "error.txt").exists()


def test_a_card_that_may_not_lock_memory_does_not_lack_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    message = "Last error:\nCall to ibv_reg_mr failed with error Cannot allocate memory"
    error = dist.DistBackendError(f"NCCL error: unhandled system error\n{message}")
    assert find_exhausted_memory(error) is None
    line = error_line(error, tmp_path)
    assert line == (
        f"rank 3 on {os.uname().nodename}: a collective failed: NCCL error: unhandled system error Last error: Call to "
        "ibv_reg_mr failed with error Cannot allocate memory (no setting of the network); the network card may not "
        "lock memory: have the limit of locked memory raised on the nodes (ulimit -l unlimited)"
    )


def test_out_of_memory_errors_are_recognised() -> None:
    for allocate in (
        lambda: torch.empty(1 << 58, dtype=torch.uint8),
        lambda: np.empty(1 << 58, np.uint8),
    ):
        with pytest.raises((RuntimeError, MemoryError)) as failed:
            allocate()
        assert find_exhausted_memory(failed.value) == "host"
    no_memory = OSError(errno.ENOMEM, "Cannot allocate memory")
    assert find_exhausted_memory(no_memory) == "host"
    for error in (
        RuntimeError("CUDA error: out of memory"),
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be …"),
        RuntimeError("HIP error: out of memory"),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ):
        assert find_exhausted_memory(error) == "either", error
    for error in (
        torch.OutOfMemoryError(FULL),
        RuntimeError("HIP error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        dist.DistBackendError(
            "NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"
        ),
        dist.DistBackendError("Last error:\nCuda failure 'out of memory'"),
        dist.DistBackendError("Last error:\nHIP failure 'out of memory'"),
    ):
        assert find_exhausted_memory(error) == "device", error
    assert find_exhausted_memory(RuntimeError("a bug")) is None
    assert find_exhausted_memory(OSError(errno.ENOSPC, "No space left on device")) is None
