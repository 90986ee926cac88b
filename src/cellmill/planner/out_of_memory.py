"""Message of a process that ran out of memory: its planned memory by part, and the first change that helps."""

import errno
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from cellmill.config.load import stored_options
from cellmill.config.options import PlanOptions, TrainOptions
from cellmill.data.cell_tokens import token_numbers
from cellmill.data.manifest import Manifest
from cellmill.files import read_json
from cellmill.planner.cost import Hardware, amount
from cellmill.planner.fit import memory_needed, remedy
from cellmill.planner.work import Cells, detected_genes

TIMEOUT_S = 120
LESS_FRAC = 0.8  # of the planned memory; a remedy must need less than this
ALLOCATORS = re.compile(  # of torch on a CPU; of pinned host memory, a second context, cuBLAS and cuDNN; of NCCL
    r"can't allocate memory|not enough memory|Cannot allocate memory|CUDA error: out of memory|"
    r"CU(BLAS|DNN)_STATUS_ALLOC_FAILED|Cuda failure (\d+ )?'?out of memory",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """True for out-of-memory errors of Python, of a device and its libraries, and of torch's CPU allocator."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and ALLOCATORS.search(str(error)) is not None


def ask(run_json: Path, world: int, nproc_per_node: int, device: str) -> str | None:
    """Return `advice` from a new process, since sizes are measured without a process group; None if that fails."""
    words = [str(run_json), str(world), str(nproc_per_node), device]
    command = [sys.executable, "-m", "cellmill.planner.out_of_memory", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def advice(record: dict[str, Any], options: TrainOptions, world: int, nproc_per_node: int, device: str = "cpu") -> str:
    """Return the planned memory of one process, and the first change after which it needs a fifth less.

    `record` is the content of run.json, `device` a type: a CPU has no other memory to offload to.
    """
    planned = PlanOptions.model_validate({**dict(options), "plan": {}})
    manifest = Manifest.read(Path(record["manifest"]))
    lengths = token_numbers(options.tokens, detected_genes(manifest), manifest.n_genes).all
    cells = Cells(lengths, manifest.n_genes, levels=manifest.levels(options.obs_columns()))
    hardware = Hardware(world // nproc_per_node, nproc_per_node, device, 0, 0)
    memory = memory_needed(planned, cells, hardware)
    parts = sorted(asdict(memory).items(), key=lambda part: -part[1])
    listed = ", ".join(f"{name} {amount(n)}" for name, n in parts if n)
    less = replace(hardware, usable_bytes=int(LESS_FRAC * memory.total))
    return (
        f"the plan was {amount(memory.total)} per process, most of it {parts[0][0]} ({listed}): "
        f"{remedy(planned, cells, less)}"
    )


if __name__ == "__main__":
    _record = read_json(Path(sys.argv[1]))
    _options = stored_options(_record["options"], "run.json")
    print(advice(_record, _options, int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
