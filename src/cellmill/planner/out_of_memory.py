"""Advice for a training process that ran out of memory."""

import errno
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

from cellmill.config.load import stored_options
from cellmill.config.options import PlanOptions
from cellmill.data.shards.manifest import Manifest
from cellmill.data.stream.batch_tokenizer import count_detected_and_undetected
from cellmill.files import read_json
from cellmill.planner.hardware import Hardware
from cellmill.planner.memory import plan_memory
from cellmill.planner.output.format import format_bytes
from cellmill.planner.remedies import find_remedy
from cellmill.planner.step_counts import CorpusSize, count_detected_genes

TIMEOUT_S = 120  # seconds that advice may take
# Fraction of the planned memory that a run may need after a remedy: it was planned to fit and did not,
# so a fifth is left for what plans leave out, such as fragmentation.
REMEDY_FRAC = 0.8
OUT_OF_MEMORY = re.compile(
    # torch on a CPU; pinned host memory; cuBLAS, hipBLAS and cuDNN; NCCL and RCCL
    r"can't allocate memory|not enough memory|Cannot allocate memory|(CUDA|HIP) error: out of memory|"
    r"(CUBLAS|HIPBLAS|CUDNN)_STATUS_ALLOC_FAILED|(Cuda|HIP) failure (\d+ )?'?out of memory",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Recognise an out-of-memory error of Python, a device, its libraries, or torch on a CPU."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error)) is not None


def ask_for_advice(
    run_json: Path, world_size: int, nproc_per_node: int, device_name: str
) -> str | None:
    """Run `advise` in a new process, since sizes are measured without a process group.

    Return None if that process fails.
    """
    arguments = [str(run_json), str(world_size), str(nproc_per_node), device_name]
    command = [sys.executable, "-m", "cellmill.planner.out_of_memory", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def advise(run_json: Path, world_size: int, nproc_per_node: int, device_name: str = "cpu") -> str:
    """Name the planned memory of a process, and the first change with which it needs a fifth less.

    The plan counts every training cell of the shards once: `stream.train_frac` and
    `stream.weight_by` are not applied, so "the plan was" may differ from plan.json.
    """
    record = read_json(run_json)
    stored = dict(stored_options(record["options"], "run.json"))
    options = PlanOptions.model_validate(stored | {"plan": {}})
    manifest = Manifest.read(Path(record["manifest"]))
    kept_genes, undetected_genes = count_detected_and_undetected(
        options.tokens, count_detected_genes(manifest), manifest.n_genes
    )
    corpus = CorpusSize(
        kept_genes + undetected_genes,
        manifest.n_genes,
        levels=manifest.levels(options.obs_columns()),
        n_covariates=len(options.tokens.covariates),
    )
    hardware = Hardware(
        nodes=world_size // nproc_per_node,
        nproc_per_node=nproc_per_node,
        device_name=device_name,
        device_bytes=0,  # a remedy is measured against the plan, not the device
        usable_bytes=0,
    )
    memory = plan_memory(options, corpus, hardware)
    parts = ", ".join(f"{name} {format_bytes(n)}" for name, n in memory.list_parts())
    smaller = replace(hardware, usable_bytes=int(REMEDY_FRAC * memory.total))
    return (
        f"the plan was {format_bytes(memory.total)} per process ({parts}): "
        f"{find_remedy(options, corpus, smaller)}"
    )


if __name__ == "__main__":
    print(advise(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
