"""The one line that a failed rank leaves for the user, and how its process ends."""

import os
import re
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from cellmill.errors import UserError
from cellmill.files import write_text
from cellmill.launch.rendezvous import node_name
from cellmill.planner.out_of_memory import ask, is_out_of_memory
from cellmill.runs.jobs import CONNECTION

PROGRAM = re.compile(  # errors of CUDA that another device would give too
    r"device-side assert|invalid (argument|configuration|device function|device ordinal|value|resource handle)|"
    r"no kernel image|not supported|insufficient driver|too many resources",
    re.IGNORECASE,
)
LOST_PEER = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|tcpstore", re.IGNORECASE)


def error_line(error: BaseException, folder: Path) -> str | None:
    """Return one line that tells the user what went wrong; None when another rank may have failed first."""
    if isinstance(error, UserError):
        return str(error)
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) and _collective(error):  # std::bad_alloc of a backend that read garbage
        return process_group_line(error)
    if is_out_of_memory(error):
        return f"{_who()}: out of memory ({text[:120].rstrip('.') or type(error).__name__}); {_advice(error, folder)}"
    if isinstance(error, OSError) and not isinstance(error, ConnectionError):
        return f"{error.filename or folder}: {error.strerror or error}"
    if is_lost_device(error) or isinstance(error, ConnectionError | dist.DistError) or LOST_PEER.search(text):
        return None  # a peer or its node is lost, and says why itself if it could
    return f"{_who()}: {type(error).__name__}: {text[:300]}; its traceback is in the log"


def is_lost_device(error: BaseException) -> bool:
    """True for failures of an accelerator itself (ECC, a driver's Xid, illegal address, device unavailable)."""
    text = str(error)
    failed = isinstance(error, torch.AcceleratorError) or (isinstance(error, RuntimeError) and "CUDA error: " in text)
    return failed and not is_out_of_memory(error) and PROGRAM.search(text) is None


def device_line(error: BaseException) -> str:
    """Return the line about a lost device. CUDA's advice on debugging follows its first line."""
    text = str(error).partition("\n")[0][:200]
    rank = os.environ.get("LOCAL_RANK", "?")
    return (
        f"{_who()}: its GPU {rank} failed ({text}); if it happens again on this node, leave it out "
        "(sbatch_options: exclude=NODE in the profile)"
    )


def process_group_line(error: BaseException) -> str:
    """Return the line about a collective that failed: rank, collective, message and the settings of the network."""
    text = " ".join(str(error).split())[:200] or type(error).__name__
    names = sorted(name for name in os.environ if name.startswith(("NCCL_", "GLOO_")))
    settings = ", ".join(f"{name}={os.environ[name]}" for name in names)
    return (
        f"{_who()}: {_collective(error) or 'a collective'} failed: {text} ({settings or 'no setting of the network'})"
    )


def _collective(error: BaseException) -> str | None:
    """Return the name of torch.distributed's function that raised the error; None if none did."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.name for frame in reversed(frames) if frame.filename == distributed_c10d.__file__), None)


def leave_reason(error_file: Path, error: BaseException, folder: Path) -> None:
    """Write the error's line for the launcher.

    An error that the end of another rank may have caused goes to a file of its own, the first one alone: it counts if
    no rank says more.
    """
    line = error_line(error, folder)
    if line is not None:
        leave_line(error_file, line)
    elif is_lost_device(error):  # the cause of what other ranks may have written before
        leave_line(error_file.with_name(CONNECTION), device_line(error))
    elif not (connection := error_file.with_name(CONNECTION)).exists():
        leave_line(connection, process_group_line(error))


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
    return f"rank {os.environ.get('RANK', '?')} on {node_name()}"


def _advice(error: BaseException, folder: Path) -> str:
    """Return the plan's first remedy, or a general one where planning failed."""
    traceback.clear_frames(error.__traceback__)  # they hold the model, its activations and the batch
    device = "cuda" if torch.cuda.is_available() else "cpu"
    line = ask(folder / "run.json", int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"]), device)
    return line or "lower train.token_budget, or set parallel.activation_checkpointing to full"
