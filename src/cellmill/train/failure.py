"""The one line that a failed rank leaves for the user, and the file for its tracebacks."""

import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from cellmill.errors import UserError
from cellmill.files import write_text
from cellmill.launch.job import NODE_LOG
from cellmill.launch.rendezvous import node_name
from cellmill.planner.out_of_memory import (
    UNLOCKED_MEMORY,
    ask_for_advice,
    find_exhausted_memory,
)
from cellmill.planner.remedies import REQUEST_MORE
from cellmill.runs.jobs import CONNECTION

PROGRAM_ERROR = re.compile(
    r"device-side assert|invalid (argument|configuration|device function|device ordinal|value|resource handle)|"
    r"no kernel image|not supported|insufficient driver|too many resources",
    re.IGNORECASE,
)
"""Errors of CUDA that another device would give too."""
LOST_PEER = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|broken pipe|tcpstore", re.IGNORECASE
)
LOWER_MEMORY = "lower train.token_budget, or set parallel.activation_checkpointing to full"


def error_line(error: BaseException, folder: Path) -> str | None:
    """Return one line that says what went wrong; None if another rank may have failed first."""
    if isinstance(error, UserError):
        return str(error)
    # std::bad_alloc of a backend that read garbage
    if isinstance(error, MemoryError) and _collective(error):
        return _process_group_line(error)
    if UNLOCKED_MEMORY.search(str(error)):
        return (
            f"{_process_group_line(error)}; the network card may not lock memory: have the limit of locked memory "
            "raised on the nodes (ulimit -l unlimited)"
        )
    memory = find_exhausted_memory(error)
    if memory is not None:
        return _out_of_memory_line(error, memory, folder)
    if isinstance(error, OSError) and not isinstance(error, ConnectionError):
        return f"{error.filename or folder}: {error.strerror or error}"
    if is_lost_peer(error) or _is_lost_device(error):
        return None  # a peer or its node is lost, and says why itself if it could
    text = _one_line(error)[:300]
    return f"{_who()}: {type(error).__name__}: {text}; its traceback is in {trace_name()}"


def is_lost_peer(error: BaseException) -> bool:
    """Return whether a collective failed, perhaps because another process ended."""
    if isinstance(error, ConnectionError | dist.DistError):
        return True
    return not isinstance(error, OSError) and LOST_PEER.search(_one_line(error)) is not None


def leave_reason(error_file: Path, error: BaseException, folder: Path) -> None:
    """Write the error's line for the launcher.

    What another rank may have caused goes to a file next to `error_file`.
    """
    connection_file = error_file.with_name(CONNECTION)
    line = error_line(error, folder)
    if line is not None:
        _leave_line(error_file, line)
    elif _is_lost_device(error):  # the cause of what other ranks may have written before
        first_line = str(error).partition("\n")[0][:200]  # CUDA's advice on debugging follows
        _leave_line(
            connection_file,
            f"{_who()}: its GPU {os.environ.get('LOCAL_RANK', '?')} failed ({first_line}); if it happens again on "
            "this node, leave it out (sbatch_options: exclude=NODE in the profile)",
        )
    elif not connection_file.exists():
        _leave_line(connection_file, _process_group_line(error))


@contextmanager
def trace_file() -> Iterator[TextIO]:
    """Open the file for this process's tracebacks.

    It is the node's log in a cluster job, where others would fill the job's log with what followed
    from the first failure; otherwise stderr.
    """
    try:
        file = open(os.environ[NODE_LOG], "a", encoding="utf-8")  # noqa: SIM115
    except (KeyError, OSError):  # none, or a full disk
        yield sys.stderr
        return
    with file:
        yield file


def trace_name() -> str:
    """Return the words for that file in a message."""
    node_log = os.environ.get(NODE_LOG)
    return f"{Path(node_log).name} beside the job's log" if node_log else "the log"


def give_up(error_file: Path, line: str) -> None:
    """End this process from a thread, while the main thread is in a call that does not return."""
    _leave_line(error_file, line)
    os._exit(1)


def _leave_line(error_file: Path, line: str) -> None:
    try:
        write_text(error_file, line)
    except OSError:  # the shared folder may be full; the log is left
        print(line, file=sys.stderr)
    sys.stderr.flush()


def _out_of_memory_line(error: BaseException, memory: str, folder: Path) -> str:
    # frames hold the model, its activations and the batch
    traceback.clear_frames(error.__traceback__)
    world = int(os.environ["WORLD_SIZE"])
    local_world = int(os.environ["LOCAL_WORLD_SIZE"])
    device = "cuda"
    planned_memory = "device" if memory == "device" else "host"
    # a plan counts the host memory of processes on CPUs as the device's
    if not torch.cuda.is_available():
        device = "cpu"
        planned_memory = "device"
    general = REQUEST_MORE if planned_memory == "host" else LOWER_MEMORY
    run_json = folder / "run.json"
    advice = ask_for_advice(run_json, world, local_world, device, planned_memory) or general
    reason = _one_line(error)[:120].rstrip(".") or type(error).__name__
    if memory == "either":
        advice += "; or another program fills the GPU: nvidia-smi or rocm-smi lists it"
    return f"{_who()}: out of memory ({reason}); {advice}"


def _is_lost_device(error: BaseException) -> bool:
    """True for failures of an accelerator itself.

    These are ECC errors, a driver's Xid, an illegal address, an unavailable device.
    """
    text = str(error)
    is_cuda_error = isinstance(error, RuntimeError) and "CUDA error: " in text
    if not (is_cuda_error or isinstance(error, torch.AcceleratorError)):
        return False
    return find_exhausted_memory(error) is None and PROGRAM_ERROR.search(text) is None


def _process_group_line(error: BaseException) -> str:
    """Return the line about a failed collective: rank, collective, message, network settings."""
    message = _one_line(error)[:200] or type(error).__name__
    names = sorted(name for name in os.environ if name.startswith(("NCCL_", "GLOO_")))
    settings = ", ".join(f"{name}={os.environ[name]}" for name in names)
    return (
        f"{_who()}: {_collective(error) or 'a collective'} failed: {message} "
        f"({settings or 'no setting of the network'})"
    )


def _collective(error: BaseException) -> str | None:
    """Return the name of the collective that raised the error; None for another error."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename == distributed_c10d.__file__:
            return frame.name
    return None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _who() -> str:
    return f"rank {os.environ.get('RANK', '?')} on {node_name()}"
