"""The one line that a failed rank leaves for the user, and how its process ends."""

import os
import re
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from cellmill.errors import UserError
from cellmill.files import write_text
from cellmill.planner.out_of_memory import ask, is_out_of_memory

LOST_PEER = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|tcpstore", re.IGNORECASE)


def error_line(error: BaseException, folder: Path) -> str | None:
    """Return one line that tells the user what went wrong; None when another rank failed first."""
    if isinstance(error, UserError):
        return str(error)
    text = " ".join(str(error).split())
    if is_out_of_memory(error):
        return f"{_who()}: out of memory ({text[:120].rstrip('.') or type(error).__name__}); {_advice(error, folder)}"
    if isinstance(error, OSError) and not isinstance(error, ConnectionError):
        return f"{error.filename or folder}: {error.strerror or error}"
    if isinstance(error, ConnectionError | dist.DistError) or LOST_PEER.search(text):
        return None  # a peer or its node is lost, and says why itself if it could
    return f"{_who()}: {type(error).__name__}: {text[:300]}; its traceback is in the log"


def give_up(error_file: Path, line: str) -> None:
    """End this process from a thread, while the main thread is in a call that does not return."""
    leave_line(error_file, line)
    os._exit(1)


def leave_line(error_file: Path, line: str) -> None:
    """Write the line for the launcher, or to stderr where that fails."""
    try:
        write_text(error_file, line)
    except OSError:  # the shared folder may be full; the log is left
        print(line, file=sys.stderr)
    sys.stderr.flush()


def _who() -> str:
    return f"rank {os.environ.get('RANK', '?')} on {os.uname().nodename}"


def _advice(error: BaseException, folder: Path) -> str:
    """Return the plan's first remedy, or a general one where planning failed."""
    traceback.clear_frames(error.__traceback__)  # they hold the model, its activations and the batch
    device = "cuda" if torch.cuda.is_available() else "cpu"
    line = ask(folder / "run.json", int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"]), device)
    return line or "lower train.token_budget, or set parallel.activation_checkpointing to full"
