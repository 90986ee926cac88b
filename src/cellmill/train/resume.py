"""State of a run between processes: the checkpoint it resumes from, and state.json and status.json."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cellmill.data.stream import CellStream
from cellmill.files import write_json
from cellmill.runs.folder import TrainFolder
from cellmill.runs.metrics import cut_back
from cellmill.runs.progress import status
from cellmill.train.checkpoint import Checkpoints
from cellmill.train.training_progress import Progress


def resume(
    folder: TrainFolder,
    checkpoints: Checkpoints,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    stream: CellStream,
) -> Progress:
    """Load the newest undamaged checkpoint, if any, and set stream and metrics back to its step.

    Collective: every rank.
    """
    checkpoint, damaged = checkpoints.newest_whole()
    if dist.get_rank() == 0:
        for line in damaged:
            print(f"warning: {line}; going on from the one before it", file=sys.stderr, flush=True)
        if damaged and checkpoint is not None:
            folder.set_damaged_aside(checkpoint.step)
    progress = Progress()
    if checkpoint is not None:
        checkpoints.load(checkpoint, model, optimizer)
        progress = Progress(**checkpoint.state()["progress"])
    epoch, step = divmod(progress.step, stream.steps_per_epoch)
    stream.load_state_dict(stream.state_dict() | {"epoch": epoch, "step": step})
    if dist.get_rank() == 0:
        cut_back(folder.metrics, progress.step)
        print(f"going on from step {progress.step}" if progress.step else "starting at step 0", flush=True)
    dist.barrier()
    return progress


def write_state(folder: TrainFolder, name: str, progress: Progress, saved_with: dict[str, Any]) -> None:
    """Write state.json on rank 0, and status.json when the run is done."""
    if dist.get_rank() == 0:
        value = status(name, {"progress": vars(progress), **saved_with})
        write_json(folder.path / "state.json", value)
        if name == "done":
            write_json(folder.path / "status.json", value)
