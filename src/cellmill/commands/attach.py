"""attach: follows the log of a run's living job until it ends, beside a launcher that may be following too.

It takes no lock and changes no file. Ctrl-C ends the following, never the job.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from cellmill.commands.run_names import folder_of, holder_of, living_jobs, local_log, record_of
from cellmill.errors import Stopped, UserError
from cellmill.launch.queue import Line, Queue, QueueError
from cellmill.launch.tail import Tail
from cellmill.runs.folder import Holder, TrainFolder
from cellmill.runs.job_states import UNKNOWN
from cellmill.runs.jobs import Jobs
from cellmill.runs.metrics import TAIL_BYTES

TICK_S = 1.0
ASK_EVERY_S = 10.0  # of a job that is followed for long: the queue is everybody's
SETTLE_S = 10  # how long a shared folder may take to show what a node wrote
PATIENCE_S = 3600  # how long a queue that gives no answer is waited for


def run(*, run: str, results: Path) -> None:
    """Follows the job of `run`. Raises Stopped when it stopped with its state saved, UserError when it failed or when
    nothing lives."""
    train = folder_of(results, run)
    queue, holder = Queue(TICK_S), holder_of(train)
    here = holder is not None and not holder.follows  # then no job of this run lives
    try:
        line = None if here else next(iter(living_jobs(train, queue)), None)
    except QueueError as error:
        raise UserError(f"the queue gave no usable answer ({error}); try again") from None
    if line is None and not here:
        raise UserError(f"{run}: no job is queued or running, and no training runs on this machine")
    what = f"job {line.job_id}" if line is not None else "the training"
    try:
        if line is not None:
            how = _follow_job(train, line, queue)
        else:
            assert holder is not None
            how = _follow_local(train, holder, local_log(results, run))
    except KeyboardInterrupt:
        print(f"\nnot following any more; {what} goes on")
        return
    _say_end(train, what, how)


def follow(tail: Tail, lives: Callable[[], bool]) -> None:
    """Shows what is appended to a log as long as it `lives`, and what came with the end."""
    while lives():
        tail.copy()
        time.sleep(TICK_S)
    tail.copy()


def tail_of(log: Path) -> Tail:
    """The log from its last lines on."""
    tail = Tail(log)
    if log.exists() and log.stat().st_size > TAIL_BYTES:
        with open(log, "rb") as file:
            file.seek(-TAIL_BYTES, 2)
            file.readline()  # cut
            tail.position = file.tell()
    return tail


def _follow_job(train: Path, line: Line, queue: Queue) -> str:
    """Follows a job to its end; SLURM's word for it."""
    record = record_of(train, line)
    folder = record.path if record is not None else Jobs(train).unrecorded(line.name)
    if folder is None:
        raise UserError(f"job {line.job_id} is called {line.name}, and its folder is gone: there is no log to follow")
    log = folder / f"{line.job_id}_0_log.out"
    print(f"following job {line.job_id}, its log: {log}; Ctrl-C ends the following only", flush=True)
    lives = JobLives(line.job_id, queue)
    follow(tail_of(log), lives)
    return lives.word


class JobLives:
    """Whether a job lives; says each change of its state. SLURM is asked each second at first, then more rarely."""

    def __init__(self, job_id: str, queue: Queue) -> None:
        self.job_id, self.queue = job_id, queue
        self.word, self._shown, self._gone, self._silent_since = "", "", 0, 0.0
        self._began, self._ask_at = time.monotonic(), 0.0

    def __call__(self) -> bool:
        now = time.monotonic()
        if now < self._ask_at:
            return True
        self._ask_at = now + min(ASK_EVERY_S, (now - self._began) / 10)
        state = self.queue.state(self.job_id)
        if state.name == UNKNOWN:
            return self._silent()
        if self._silent_since:
            print("the queue answers again", flush=True)
        self._silent_since, self.word = 0.0, state.name
        text = f"{state.name}{f' ({state.reason})' if state.reason else ''}"
        if text != self._shown and state.alive:
            print(f"job {self.job_id}: {text}", flush=True)
        self._shown = text
        self._gone = 0 if state.alive or state.name != "GONE" else self._gone + 1
        return state.alive or self._gone == 1  # asked twice: a controller may just be starting

    def _silent(self) -> bool:
        if not self._silent_since:
            print(f"warning: no usable answer from the queue ({self.queue.trouble}); waiting for one", flush=True)
            self._silent_since = time.monotonic()
        if time.monotonic() - self._silent_since > PATIENCE_S:
            raise UserError(f"the queue gave no usable answer for an hour; job {self.job_id} may still run")
        return True


def _follow_local(train: Path, holder: Holder, log: Path) -> str:
    if not log.exists():
        raise UserError(f"it is trained by {holder.text} and prints where it was started: {log} does not exist")
    print(f"following {holder.text}, its log: {log}; Ctrl-C ends the following only", flush=True)
    follow(tail_of(log), lambda: holder_of(train) is not None)
    return ""


def _say_end(train: Path, what: str, how: str) -> None:
    """Says how it ended. Raises Stopped or UserError when the run is not done."""
    ended = f"{what} ended{f' with {how}' if how else ''}"
    folder = TrainFolder(train)
    newest = Jobs(train).newest()
    error = newest.error if how and newest is not None else None
    give_up = time.monotonic() + SETTLE_S
    while how == "COMPLETED" and folder.state() not in ("done", "stopped") and not error:
        if time.monotonic() > give_up:
            break
        os.listdir(train)  # makes a network file system look again
        time.sleep(TICK_S)
    if folder.state() == "done":
        print(f"{ended}: the training is done")
        return
    saved = folder.saved_step()
    if error:
        raise UserError(f"{ended}: {error}")
    if folder.state() == "stopped" or how in ("", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL"):
        raise Stopped(f"{ended}; saved at step {saved}")
    raise UserError(f"{ended}; saved at step {saved}; `cellmill logs {train.parent.name}` has what it printed")
