"""Advice for a training process that ran out of memory."""

import errno
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from cellmill.config.load import stored_options
from cellmill.config.options import PlanOptions
from cellmill.data.shards.manifest import Manifest
from cellmill.data.stream.batch_tokenizer import count_detected_and_undetected_tokens
from cellmill.files import read_json
from cellmill.planner.hardware import Hardware
from cellmill.planner.memory import estimate_host_bytes_per_node, estimate_memory
from cellmill.planner.output.format import format_bytes
from cellmill.planner.planned_model import PlannedModel
from cellmill.planner.remedies import REQUEST_MORE, find_remedy
from cellmill.planner.step_counts import CorpusSize, count_detected_genes

TIMEOUT_S = 120  # seconds that advice may take at most
# A run may need at most this fraction of its planned memory after a remedy. It was planned to fit but did
# not, so a fifth is left for what plans do not count, such as fragmentation.
REMEDY_FRAC = 0.8

# texts of errors, by the memory that a process ran out of
HOST_OUT_OF_MEMORY = re.compile(
    # errors of torch on a CPU
    r"can't allocate memory|not enough memory|Cannot allocate memory",
    re.IGNORECASE,
)
# An error of NCCL and RCCL with another cause: the limit of locked memory is too low for a network card.
UNLOCKED_MEMORY = re.compile(r"ibv_\w+ failed with error Cannot allocate memory")
EITHER_OUT_OF_MEMORY = re.compile(
    # The driver has one error for host memory that cannot be pinned, and for a GPU that another program
    # fills. Triton passes it on. Where torch itself allocates device memory, it raises OutOfMemoryError.
    r"(CUDA|HIP)( driver)? error: out of memory|Triton Error \[\w+\]: .*out of memory",
    re.IGNORECASE,
)
DEVICE_OUT_OF_MEMORY = re.compile(
    # errors of cuBLAS, hipBLAS and cuDNN, and of NCCL and RCCL
    r"(CUBLAS|HIPBLAS|CUDNN)_STATUS_ALLOC_FAILED|(Cuda|HIP) failure (\d+ )?'?out of memory",
    re.IGNORECASE,
)


def find_exhausted_memory(error: BaseException) -> Literal["device", "host", "either"] | None:
    """Find the memory that a process ran out of. None if `error` has another cause.

    "either" is mostly the host's memory: the driver has one error for both memories.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return "device"
    if isinstance(error, OSError):
        return "host" if error.errno == errno.ENOMEM else None
    text = str(error) if isinstance(error, RuntimeError) else ""
    if UNLOCKED_MEMORY.search(text):
        return None
    if isinstance(error, MemoryError) or HOST_OUT_OF_MEMORY.search(text):
        return "host"
    if EITHER_OUT_OF_MEMORY.search(text):
        return "either"
    return "device" if DEVICE_OUT_OF_MEMORY.search(text) else None


def ask_for_advice(
    run_json: Path, world_size: int, nproc_per_node: int, device_name: str, exhausted: str
) -> str | None:
    """Run `advise` in a new process, and return its text. Return None if the new process fails.

    This process has a process group, but the sizes of a model are measured without one.
    """
    arguments = [str(run_json), str(world_size), str(nproc_per_node), device_name, exhausted]
    command = [sys.executable, "-m", "cellmill.planner.out_of_memory", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def advise(
    run_json: Path,
    world_size: int,
    nproc_per_node: int,
    device_name: str = "cpu",
    exhausted: str = "device",
) -> str:
    """State the planned memory of a process, and the first change with which it needs a fifth less.

    If `exhausted` is "host", state the planned host memory of a node instead, and advise to request more.

    The stated plan may differ from plan.json. It counts every training cell of the shards once, so
    `stream.train_frac` and `stream.weight_by` are not applied.
    """
    # the run's options and its corpus
    record = read_json(run_json)
    stored = dict(stored_options(record["options"], "run.json"))
    options = PlanOptions.model_validate(stored | {"plan": {}})
    manifest = Manifest.read(Path(record["manifest"]))
    kept_genes, undetected_genes = count_detected_and_undetected_tokens(
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
        # a remedy has to need less than the plan, so the memory of the device is not used
        device_bytes=0,
        usable_bytes=0,
    )
    if exhausted == "host":
        needed = estimate_host_bytes_per_node(PlannedModel.measure(options, corpus, hardware))
        return (
            f"the plan was to hold {format_bytes(needed)} in host memory per node: {REQUEST_MORE}, "
            "or shard over more nodes (FULL_SHARD)"
        )

    planned = estimate_memory(options, corpus, hardware)
    parts = ", ".join(f"{name} {format_bytes(n)}" for name, n in planned.list_by_size())
    smaller = replace(hardware, usable_bytes=int(REMEDY_FRAC * planned.total))
    return (
        f"the plan was {format_bytes(planned.total)} per process ({parts}): "
        f"{find_remedy(options, corpus, smaller)}"
    )


if __name__ == "__main__":
    print(advise(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]))
