"""What a failed process leaves for the launcher: a line, or a lost node."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cellmill.planner.search import is_out_of_memory
from cellmill.runs.jobs import CONNECTION
from cellmill.train.failure import error_line, leave_reason

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


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: out of memory"),
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be …"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        dist.DistBackendError("NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"),
        dist.DistBackendError("Last error:\nCuda failure 'out of memory'"),
    ],
)
def test_memory_that_runs_out_outside_of_torchs_allocator_is_out_of_memory(error: Exception) -> None:
    assert is_out_of_memory(error)
