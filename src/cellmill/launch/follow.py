"""Following one SLURM job: its state by polling, its log as it grows, and its end after it was cancelled."""

import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cellmill.errors import Stopped, UserError
from cellmill.launch.queue import Queue, pending_hint
from cellmill.runs.jobs import GONE, UNKNOWN, UNLISTED, JobRecord, JobState
from cellmill.runs.lock import lives

PATIENCE_S = 3600  # how long to wait for a queue that gives no answer
GONE_S = 60  # how long SLURM has to know nothing of a job before it counts as ended
CANCEL_S = 60  # how long a cancelled job may take to end: it saves first
TICK_S = 1.0  # between two reads of a log
NOT_LAUNCHED = re.compile(
    r"^srun: error: (?:tasks? ([\d,-]+):? launch failed|task launch for \S+ failed on node (\S+)): (.*)$",
    re.IGNORECASE | re.MULTILINE,
)
BEGINS = "Starting with JobEnvironment"  # printed by submitit each time SLURM starts the job
OF_SUBMITIT = re.compile(r"^submitit (?:INFO|WARNING) .*\n", re.MULTILINE)
"""Lines that stay in the log and are not shown: they say nothing that the launcher does not say."""


class Tail:
    """Reads lines appended to the log of a job, and prints them if `echo`."""

    def __init__(self, path: Path, echo: bool = True) -> None:
        self.path, self.echo, self.position = path, echo, 0
        self._begun = False
        self.not_launched: re.Match[str] | None = None
        """srun's message about a task it could not launch in the present start: tasks, or node, and reason. The other
        tasks wait for it."""

    def read(self) -> None:
        """Read new text. A file that does not exist yet has none."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.position)
                new = file.read()
        except OSError:  # not there yet, or briefly unreachable
            return
        self.position += len(new)
        text = new.decode(errors="replace")
        if self.echo:
            sys.stdout.write(OF_SUBMITIT.sub("", text))
            sys.stdout.flush()
        for number, part in enumerate(text.split(BEGINS)):
            if number > 0:
                # srun's message may come before the first line of its own start
                self.not_launched, self._begun = None if self._begun else self.not_launched, True
            self.not_launched = NOT_LAUNCHED.search(part) or self.not_launched

    def reports_out_of_memory(self) -> bool:
        """True if SLURM reports in the log that the kernel killed a process for memory."""
        return re.search(rb"oom[-_]kill event|Out Of Memory", self._end()) is not None

    def refusal(self) -> str:
        """The line of a job that ended because another one has the run; empty for other jobs."""
        found = re.search(
            rb"^(an earlier start of )?job .* is training in .*; (job .*|this start) ends$", self._end(), re.MULTILINE
        )
        return found[0].decode(errors="replace") if found else ""

    def failed_setup(self) -> str:
        """The line of a command before srun that failed; empty if there is none."""
        found = re.search(
            rb"^cellmill: (`.*` failed on .*; change (?:modules|setup) in the profile)$", self._end(), re.M
        )
        return found[1].decode(errors="replace") if found else ""

    def failed_import(self) -> str:
        """The last line about a Python module that could not be imported; empty if there is none."""
        found = re.findall(
            rb"^((?:ModuleNotFound|Import)Error: .*|\S+: No module named .*)$", self._end(), re.MULTILINE
        )
        return found[-1].decode(errors="replace") if found else ""

    def was_to_save(self) -> bool:
        """True if SLURM announced the end of the job, as it does before the time limit."""
        return re.search(rb"^SIGUSR2: saving$", self._end(), re.MULTILINE) is not None

    def _end(self) -> bytes:
        """What the last start left in the last 64 KiB of the log."""
        try:
            with open(self.path, "rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - 65536))
                return file.read().rsplit(BEGINS.encode(), 1)[-1]
        except OSError:
            return b""


@dataclass
class JobFollower:
    """Polls a job, prints each change of its state, and reads its log."""

    job_id: str
    name: str
    """A job of the same id and another name is not followed, and never cancelled."""
    queue: Queue
    tail: Tail
    record: JobRecord | None = None
    """Updated with every state; None to change no file."""
    patience_s: float = PATIENCE_S
    """How long the queue may give no answer."""
    slowest_poll_s: float = 0.0
    """The longer the job is followed, the less often the queue is asked, down to once in this time. 0: ask at every
    call of `alive`, as often as `queue` allows."""
    state: JobState = field(default=JobState(""), init=False)
    """The last state that SLURM reported."""
    nodes: str = field(default="", init=False)
    """The last nodes it ran on, as SLURM writes them: node[1-2]."""

    def __post_init__(self) -> None:
        self._printed, self._ended, self._gone_since, self._silent_since = "", False, 0.0, 0.0
        self._began, self._next_poll = time.monotonic(), 0.0

    def alive(self) -> bool:
        """Poll the job if it is time, and read its log; return False once it has ended.

        Raises Stopped if the queue has given no usable answer for `patience_s`.
        """
        now = time.monotonic()
        if now >= self._next_poll:
            self._next_poll = now + min(self.slowest_poll_s, (now - self._began) / 10)
            self._poll()
        self.tail.read()
        return not self._ended

    def cancel(self, wait: Callable[[float], None] = time.sleep, impatient: Callable[[], bool] = lambda: False) -> None:
        """Cancel the job, wait until it has ended, and record that. Raises UserError if it does not end in time."""
        self.state = cancel_job(self.job_id, self.name, wait, impatient)
        self.note(self.state, ended=True)

    def save_and_cancel(self, wait: Callable[[float], None], impatient: Callable[[], bool]) -> None:
        """Cancel the job after it was signalled to save; see `save_job`."""
        assert self.record is not None
        save_job(self.job_id, self.name, self.record.save_within_s, wait, impatient)
        self.state = cancel_job(self.job_id, self.name, wait)
        self.note(self.state, ended=True)

    def note(self, state: JobState, ended: bool) -> None:
        if self.record is not None and self.record.path.is_dir():  # a deleted run is not made again
            self.record = self.record.now(state.name, state.reason, ended)

    def _poll(self) -> None:
        state = self.queue.state(self.job_id, self.name)
        if state.name == UNKNOWN:
            self._wait_for_answer(state.reason)
            return
        if self._silent_since:
            say("squeue answers again")
            self._silent_since = 0.0
        if state.name != GONE and state.reason != UNLISTED:
            self._gone_since = 0.0
        elif self._is_gone():
            if state.reason == UNLISTED:
                say(
                    f"job {self.job_id}: squeue no longer lists it and it gives no sign of life, though sacct says "
                    f"{state.name}: taken for ended (`sacctmgr show runawayjobs` lets an administrator correct sacct)"
                )
            state = JobState(GONE)
        elif state.name == GONE:
            return
        self.state, self.nodes, self._ended = state, state.nodes or self.nodes, not state.alive
        text = self._description(state)
        if text == self._printed:
            return
        if self._ended:
            self.tail.read()  # the job's last lines come before its end
        say(text)
        self._printed = text
        self.note(state, self._ended)

    def _is_gone(self) -> bool:
        """False while a job that SLURM does not list may live: a controller in trouble answers with an empty list.

        Also if its claim is released: a job that was requeued waits in the queue without one.
        """
        self._gone_since = self._gone_since or time.monotonic()
        alive = None if self.record is None else lives(self.record.path.parents[1], self.job_id)
        return not alive and time.monotonic() - self._gone_since >= GONE_S

    def _wait_for_answer(self, trouble: str) -> None:
        now = time.monotonic()
        if not self._silent_since:
            say(f"warning: no usable answer from squeue ({trouble}); waiting for one")
            self._silent_since = now
        elif now - self._silent_since > self.patience_s:
            raise Stopped(
                f"no usable answer from squeue for {self.patience_s:.0f} s ({trouble}); job {self.job_id} "
                f"may still run: run the same command to follow it again, or end it with `scancel {self.job_id}`"
            )

    def _description(self, state: JobState) -> str:
        where = f" on {state.nodes}" if state.nodes and state.name in ("RUNNING", "COMPLETING") else ""
        if not state.reason or state.name != "PENDING":
            return f"job {self.job_id}: {state.name}{where}"
        if self.record is None:
            return f"job {self.job_id}: {state.text}"
        request = {"runtime": f"runtime {self.record.runtime} min", "nodes": self.record.nodes}
        hint = pending_hint(state.reason, **request, job_id=self.job_id)
        return f"job {self.job_id}: {state.text}{f': {hint}' if hint else ''}"


def save_job(
    job_id: str,
    name: str,
    within_s: float,
    wait: Callable[[float], None] = time.sleep,
    impatient: Callable[[], bool] = lambda: False,
) -> None:
    """Ask a running job to save and to end, and wait until it has, for at most `within_s` seconds.

    What scancel leaves it is SLURM's KillWait, 30 s by default, which may be too short for a checkpoint.
    """
    queue = Queue(TICK_S)
    if queue.state(job_id, name).name not in ("RUNNING", UNKNOWN) or queue.cancel(job_id, name, signal="USR2"):
        return
    say(f"job {job_id} may save for {within_s:g} s; interrupt again to end it at once")
    deadline = time.monotonic() + within_s
    while (state := queue.state(job_id, name)).alive or state.name == UNKNOWN:
        if time.monotonic() > deadline or impatient():
            return
        wait(TICK_S)


def cancel_job(
    job_id: str, name: str, wait: Callable[[float], None] = time.sleep, impatient: Callable[[], bool] = lambda: False
) -> JobState:
    """Cancel the job of this id and name and wait until it has ended: scancel only delivers the request.

    Returns its final state. Raises UserError if it has not ended within `CANCEL_S`.

    Parameters
    ----------
    wait
        Waits for a number of seconds, or less.
    impatient
        Returns True to stop waiting.
    """
    queue = Queue(TICK_S)
    complaint, deadline = queue.cancel(job_id, name), time.monotonic() + CANCEL_S
    while (state := queue.state(job_id, name)).alive or state.name == UNKNOWN:
        if time.monotonic() > deadline or impatient():
            raise UserError(
                f"job {job_id} was cancelled but has not ended ({complaint or state.name}); `scancel {job_id}` "
                "asks again"
            )
        if complaint:
            complaint = queue.cancel(job_id, name)
        wait(TICK_S)
    return state


def settle(shown: Callable[[], bool], folder: Path, within_s: float, wait: Callable[[float], None]) -> None:
    """Wait until a shared folder shows what a node wrote to it, or for `within_s`."""
    deadline = time.monotonic() + within_s
    while not shown() and time.monotonic() <= deadline:
        os.listdir(folder)  # makes a network file system look again
        wait(TICK_S)


def say(text: str) -> None:
    print(text, flush=True)
