"""Running out of memory ends in a message with the planned memory and a remedy."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from cellmill.config.options import TrainOptions
from cellmill.planner.search import advice, is_out_of_memory
from cellmill.train.failure import error_line, leave_reason
from tests.distributed.conftest import options

CUDA = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1 GiB is free"


def test_the_message_lists_the_parts_and_the_first_change_for_the_options_of_the_run(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    line = str(error_line(MemoryError(), tmp_path))
    general = "lower train.token_budget, or set parallel.activation_checkpointing to full"
    assert line.endswith(f"out of memory (MemoryError); {general}"), "a run without a plan"

    def planned(**parallel: str) -> str:
        parsed = TrainOptions.model_validate(options(parallel))
        record = {"options": parsed.model_dump(mode="json"), "manifest": f"{corpus}/shards/manifest.json"}
        (tmp_path / "run.json").write_text(json.dumps(record))
        return advice(tmp_path / "run.json", 4, 2)

    line = planned()
    assert " per process, most of it activations (activations " in line
    assert line.endswith("): set parallel.activation_checkpointing to full")
    who = f"rank 3 on {os.uname().nodename}: out of memory ({CUDA[:120].rstrip('.')})"
    assert error_line(torch.OutOfMemoryError(CUDA), tmp_path) == f"{who}; {line}"
    assert planned(activation_checkpointing="full").endswith("): lower train.token_budget to 128")


def test_a_failed_collective_is_named_with_its_rank_and_the_network(
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
    assert (tmp_path / "jobs" / "connection.txt").read_text() == f"{where}gloo: Connection closed by peer {network}"
    assert not (tmp_path / "jobs" / "error.txt").exists()


def test_out_of_memory_errors_are_told_from_others() -> None:
    for allocate in (lambda: torch.empty(1 << 58, dtype=torch.uint8), lambda: np.empty(1 << 58, np.uint8)):
        with pytest.raises((RuntimeError, MemoryError)) as failed:
            allocate()
        assert is_out_of_memory(failed.value)
    for error in (
        torch.OutOfMemoryError(CUDA),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("CUDA error: out of memory"),
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be …"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        dist.DistBackendError("NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"),
        dist.DistBackendError("Last error:\nCuda failure 'out of memory'"),
    ):
        assert is_out_of_memory(error), error
    assert not is_out_of_memory(RuntimeError("a bug"))
    assert not is_out_of_memory(OSError(errno.ENOSPC, "No space left on device"))
