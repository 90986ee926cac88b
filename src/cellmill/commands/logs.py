"""logs: what the newest training of a run printed, from its job or on this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from cellmill.commands import attach
from cellmill.commands.run_names import folder_of, holder_of, local_log
from cellmill.errors import UserError
from cellmill.launch.queue import Queue
from cellmill.launch.tail import Tail
from cellmill.runs.cost import read_local
from cellmill.runs.jobs import Jobs


def run(*, run: str, results: Path, follow: bool) -> None:
    """Prints the log of `run`, and with `follow` what is appended as long as it runs. Raises UserError without one."""
    train, beside = folder_of(results, run), local_log(results, run)
    newest, local = Jobs(train).newest(), read_local(train)
    if newest is not None and local and local[-1]["started_at"] > newest.submitted_at:
        newest = None
    holder = holder_of(train)
    try:
        if follow and holder is not None and not holder.follows:
            attach.follow(Tail(beside), lambda: holder_of(train) is not None)
        elif follow and newest is not None:
            attach.follow(Tail(newest.log), attach.JobLives(newest.job_id, Queue(1.0)))
        elif newest is not None and newest.log.exists():
            Tail(newest.log).copy()
        elif beside.exists():  # of a training here or in an allocation, or of the launcher of a job that waits
            Tail(beside).copy()
        elif newest is not None:
            raise UserError(f"{run}: job {newest.job_id} ({newest.state}) has no log yet; it will be {newest.log}")
        else:
            raise UserError(f"{run}: no log: it has no job, and {beside} does not exist")
    except KeyboardInterrupt:
        return
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
