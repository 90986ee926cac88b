"""logs: the output of a run's latest training, from its job or on this machine."""

import os
import sys
from pathlib import Path

from cellmill.commands import attach
from cellmill.commands.results import train_folder, train_log
from cellmill.errors import UserError
from cellmill.launch.follow import TICK_S, JobFollower, Tail
from cellmill.launch.queue import Queue
from cellmill.runs.jobs import Jobs
from cellmill.runs.local_starts import read_local
from cellmill.runs.lock import holder_of


def run(*, run: str, results: Path, follow: bool) -> None:
    """Print the log of `run`; with `follow` also what is appended while it runs. Raises UserError without a log."""
    train, printed = train_folder(results, run), train_log(results, run)
    newest, local = Jobs(train).newest(), read_local(train)
    if newest is not None and local and local[-1]["started_at"] > newest.submitted_at:
        newest = None
    holder = holder_of(train)
    try:
        if follow and holder is not None and not holder.follows:
            attach.follow(Tail(printed), lambda: holder_of(train) is not None)
        elif follow and newest is not None:
            tail, rarely = Tail(newest.log), attach.SLOWEST_POLL_S
            follower = JobFollower(newest.job_id, newest.name, Queue(TICK_S), tail, slowest_poll_s=rarely)
            attach.follow(tail, follower.alive)
        elif newest is not None and newest.log.exists():
            Tail(newest.log).read()
        elif printed.exists():  # of a training here or in an allocation, or of the launcher of a waiting job
            Tail(printed).read()
        elif newest is not None:
            raise UserError(f"{run}: job {newest.job_id} ({newest.state}) has no log yet; it will be {newest.log}")
        else:
            raise UserError(f"{run}: no log: it has no job, and {printed} does not exist")
    except KeyboardInterrupt:
        return
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
