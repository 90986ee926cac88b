"""cancel: ends a run wherever it runs, and waits until it has ended with its state saved."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from cellmill.commands.run_names import folder_of, holder_of, living_jobs, record_of
from cellmill.errors import UserError
from cellmill.launch.cancel_job import cancel_job
from cellmill.launch.queue import Line, Queue, QueueError
from cellmill.runs.folder import Holder, TrainFolder

LET_GO_S = 15  # how long a launcher may take to see that its job was cancelled
SAVE_S = 600  # how long a training on this machine may take to save
TICK_S = 0.2


def run(*, run: str, results: Path) -> None:
    """Cancels the job of `run`, or ends its training on this machine. Raises UserError when it cannot."""
    train = folder_of(results, run)
    holder = holder_of(train)
    if holder is not None and not holder.follows:  # then no job of this run lives
        ended = [_end_process(train, holder)]
    else:
        ended = _cancel_jobs(train)
        holder = holder_of(train)
        if holder is not None and not ended:  # a launcher that is about to submit
            ended = [_end_process(train, holder)]
    if not ended:
        print(f"{run}: no job is queued or running, and no training runs on this machine")
        return
    print(f"{' and '.join(ended)}; saved at step {TrainFolder(train).saved_step()}; train goes on from there")


def _cancel_jobs(train: Path) -> list[str]:
    """Ends the run's jobs; what was done."""
    done: list[str] = []
    while lines := _living(train):  # its launcher may just have submitted the next one
        for line in lines:
            print(f"cancelling job {line.job_id}", flush=True)
            state = cancel_job(line.job_id)
            if _let_go(train):  # else its launcher follows on, and records the end itself
                record = record_of(train, line)
                if record is not None and record.ended_at is None:
                    record.now(state.name, state.reason, ended=True)
            done.append(f"cancelled job {line.job_id}")
    return done


def _living(train: Path) -> list[Line]:
    try:
        return living_jobs(train, Queue(1.0))
    except QueueError as error:
        raise UserError(f"the queue gave no usable answer ({error}); try again") from None


def _let_go(train: Path) -> bool:
    """Whether no launcher holds the run, which is waited for: one that follows a cancelled job ends by itself."""
    give_up = time.monotonic() + LET_GO_S
    while holder_of(train) is not None:
        if time.monotonic() > give_up:
            return False
        time.sleep(TICK_S)
    return True


def _end_process(train: Path, holder: Holder) -> str:
    """Asks the lock's holder to save and end, and waits until it has; what was done."""
    if not holder.holds(train / "lock"):
        here = holder.host == os.uname().nodename
        where = "it has passed the lock on; end its processes" if here else f"run cellmill cancel on {holder.host}"
        raise UserError(f"{train}: is trained by {holder.text}: {where}")
    print(f"asking {holder.text} to save and end", flush=True)
    try:
        os.kill(holder.pid, signal.SIGTERM)
    except ProcessLookupError:
        pass
    except PermissionError:
        raise UserError(f"{train}: is trained by {holder.text}, whom you may not signal") from None
    give_up = time.monotonic() + SAVE_S
    while holder_of(train) is not None:
        if time.monotonic() > give_up:
            raise UserError(f"{holder.text} was asked to end {SAVE_S // 60} min ago and has not yet")
        time.sleep(TICK_S)
    return f"ended process {holder.pid}"
