"""What a process that ran out of memory says: what was planned for it, part by part, and the first thing to change."""

from __future__ import annotations

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
from cellmill.config.run import Plan
from cellmill.data.manifest import Manifest
from cellmill.files import read_json
from cellmill.planner.fit import Hardware, Limit, amount, need, remedy
from cellmill.planner.work import Cells, detected_genes

ANSWER_S = 120
LESS_FRAC = 0.8  # of the memory planned: what the remedy must bring it down to
CPU_ALLOCATOR = re.compile(r"can't allocate memory|not enough memory|Cannot allocate memory", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory is what was missing: Python's, a device's, or that of torch's allocator on a CPU."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and CPU_ALLOCATOR.search(str(error)) is not None


def ask(run_json: Path, world: int, nproc_per_node: int, device: str) -> str | None:
    """Return `advice` from a process of its own, since sizes are measured where there is no process group; or None."""
    words = [str(run_json), str(world), str(nproc_per_node), device]
    command = [sys.executable, "-m", "cellmill.planner.out_of_memory", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def advice(record: dict[str, Any], options: TrainOptions, world: int, nproc_per_node: int, device: str = "cpu") -> str:
    """What the plan says of one process, and the first change after which it needs a fifth less.

    Parameters
    ----------
    record
        run.json.
    device
        Its type: that of a CPU has no other memory to put anything in.
    """
    planned = PlanOptions(
        plan=Plan.model_validate({}), **{name: getattr(options, name) for name in TrainOptions.model_fields}
    )
    manifest = Manifest.read(Path(record["manifest"]))
    lengths = detected_genes(manifest).clip(max=options.tokens.max_tokens)
    cells = Cells(lengths, manifest.n_genes)
    place = Hardware(world // nproc_per_node, nproc_per_node, device, Limit(0, 0))
    memory = need(planned, cells, place)
    parts = sorted(asdict(memory).items(), key=lambda part: -part[1])
    listed = ", ".join(f"{name} {amount(n)}" for name, n in parts if n)
    less = Limit(memory.total, int(LESS_FRAC * memory.total))
    return (
        f"{amount(memory.total)} were planned for each process, most of it {parts[0][0]} ({listed}): "
        f"{remedy(planned, cells, replace(place, limit=less))}"
    )


if __name__ == "__main__":
    _record = read_json(Path(sys.argv[1]))
    _options = stored_options(_record["options"], "run.json")
    print(advice(_record, _options, int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
