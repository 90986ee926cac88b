"""Following one SLURM job: its state by polling, its log as it grows, and its end."""

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from cellmill.errors import Stopped, UserError
from cellmill.launch.queue import Queue, explained
from cellmill.runs.jobs import JobRecord, Jobs
from cellmill.runs.lock import claimant
from cellmill.runs.slurm import NOT_LISTED, UNKNOWN, UNLISTED, ClusterJob, JobState

# how long to wait for a queue that gives no answer: a night's work on the controller ends no training
PATIENCE_S = 24 * 3600
GONE_S = 60  # how long SLURM has to know nothing of a job before it counts as ended
CANCEL_S = 60  # how long a cancelled job may take to end: it saves first
PENDING_POLL_S = 60  # longest time between two looks at a waiting job
START_MIN = 5  # left to SLURM to start a job before a maintenance
TICK_S = 1.0  # between two reads of a log
say = partial(print, flush=True)
NOT_LAUNCHED = re.compile(
    r"^srun: error: (?:tasks? ([\d,-]+):? launch failed|task launch for \S+ failed on node (\S+)): (.*)$",
    re.IGNORECASE | re.MULTILINE,
)
BEGINS = "Starting with JobEnvironment"  # printed by submitit each time SLURM starts the job
NOT_SHOWN = re.compile(
    r"^(?:submitit (?:INFO|WARNING) |torchrun ended with exit code \d|srun: .*(?:Terminat|: Exited with )).*\n",
    re.MULTILINE,
)
"""Lines that stay in the log and are not shown: they say nothing that the launcher does not say."""


class Tail:
    """Reads lines appended to the log of a job, and prints them if `echo`.

    Its patterns are for `last`: lines near the log's end.
    """

    # SLURM's message about a process that the kernel killed for memory
    OUT_OF_MEMORY = "(oom[-_]kill event|Out Of Memory)"
    REFUSED = "^((?:an earlier start of )?job .* is training in .*; (?:job .*|this start) ends)$"
    # the batch script's message, before srun
    FAILED_SETUP = "^cellmill: (`.*` failed on .*; change (?:modules|setup) in the profile)$"
    SRUN_OPTIONS = r"^(srun: (?:unrecognized|invalid|unknown) option.*|srun: option .* requires an argument.*)$"
    FAILED_IMPORT = r"^((?:ModuleNotFound|Import)Error: .*|\S+: No module named .*)$"
    KILLED = r"^(rank \d+ on \S+ ended with signal \S+)$"  # the message of the agent that saw it
    # SLURM announced the end of the job, as it does before the time limit
    TO_SAVE = "^(SIGUSR2: saving)$"
    FAILED_LAUNCH = r"^(srun: error: [Tt]ask launch for \S+ failed on node \S+: .*)$"

    def __init__(self, path: Path, echo: bool = True) -> None:
        self.path = path
        self.echo = echo
        self.position = 0
        self._begun = False
        self.not_launched: re.Match[str] | None = None
        """srun's message about a task that it could not launch in the present start: tasks, or
        node, and reason.
        """

    def read(self) -> None:
        """Read new text. A file that does not exist yet has none."""
        new = b""
        # not there yet, or briefly unreachable
        with suppress(OSError), open(self.path, "rb") as file:
            if file.seek(0, os.SEEK_END) < self.position:
                self.position = 0  # the log was deleted, and begins again
            file.seek(self.position)
            new = file.read()
        self.position += len(new)
        text = new.decode(errors="replace")
        if self.echo:
            sys.stdout.write(NOT_SHOWN.sub("", text))
            sys.stdout.flush()
        for number, part in enumerate(text.split(BEGINS)):
            if number > 0:
                # srun's message may come before the first line of its own start
                self.not_launched = None if self._begun else self.not_launched
                self._begun = True
            self.not_launched = NOT_LAUNCHED.search(part) or self.not_launched

    def last(self, pattern: str) -> str:
        """The last match of the pattern's group in the last 64 KiB of the log's last start.

        Empty without one.
        """
        with suppress(OSError), open(self.path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
            end = file.read().decode(errors="replace").rsplit(BEGINS, 1)[-1]
            return (re.findall(pattern, end, re.MULTILINE) or [""])[-1]
        return ""


@dataclass
class JobFollower:
    """Polls a job, prints each change of its state, and reads its log."""

    job: ClusterJob  # one of the same id and another name is left alone
    queue: Queue
    tail: Tail
    record: JobRecord | None = None  # updated with every state; None to change no file
    patience_s: float = PATIENCE_S  # how long the queue may give no answer
    # the longer it is followed, the less often the queue is queried, down to once in this
    slowest_poll_s: float = 0.0
    state: JobState = field(default=JobState(""), init=False)  # the last state that SLURM reported
    # the last nodes it ran on, as SLURM writes them: node[1-2]
    nodes: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self._printed = ""
        self._ended = False
        self._gone_since = 0.0
        self._silent_since = 0.0
        self._began = time.monotonic()
        self._next_poll = 0.0
        self._was_released = False

    @classmethod
    def of(
        cls, record: JobRecord, queue: Queue, echo: bool = True, patience_s: float = PATIENCE_S
    ) -> "JobFollower":
        """A follower that updates the job's record."""
        queue = queue.for_cluster(record.cluster)
        return cls(record, queue, Tail(record.log, echo), record, patience_s)

    def states(self, wait: Callable[[float], None]) -> Iterator[JobState]:
        """The job's state after each look, until it has ended.

        `wait` waits for a number of seconds, or less. Cancels a job of which srun could not launch
        a task: the others would wait for it until the time limit.
        """
        while self.alive():
            lost = self.tail.not_launched
            if self.state.name == "RUNNING" and lost is not None:
                say(f"{lost[0]}: the other tasks would wait for it until the time limit")
                self.cancel(wait)
                self._note(JobState("LAUNCH_FAILED"), ended=True)
                break
            yield self.state
            wait(min(TICK_S, self.queue.poll_s))
        self.tail.read()

    def alive(self) -> bool:
        """Poll the job if it is time, and read its log; return False once it has ended.

        Raise Stopped if the queue has given no usable answer for `patience_s`.
        """
        now = time.monotonic()
        if now >= self._next_poll:
            followed_s = now - self._began
            interval_s = min(self.slowest_poll_s, followed_s / 10)
            if self.state.name == "PENDING":
                interval_s = min(PENDING_POLL_S, followed_s / 2)
            self._next_poll = now + interval_s
            self._poll(interval_s)
        self.tail.read()
        return not self._ended

    def cancel(self, wait: Callable[[float], None] = time.sleep) -> None:
        """Cancel the job, wait until it has ended, and record that.

        Raise UserError if it does not end in time.
        """
        self._note(cancel_job(self.job, wait), ended=True)

    def _note(self, state: JobState, ended: bool) -> None:
        self.state = state
        if self.record is not None:
            record = replace(self.record, limit_s=state.limit_s or self.record.limit_s)
            self.record = record.write_state(state.name, state.reason, ended)

    def _poll(self, max_age_s: float) -> None:
        state = self.queue.state(self.job, max_age_s)
        if state.name == UNKNOWN:
            self._wait_for_answer(state.reason)
            return
        if self._silent_since:
            say("squeue answers again")
            self._silent_since = 0.0
        if state.name != NOT_LISTED and state.reason != UNLISTED:
            self._gone_since = 0.0
        elif self._is_gone():
            if state.reason == UNLISTED:
                say(
                    f"job {self.job.job_id}: squeue no longer lists it and it gives no sign of life, though sacct says "
                    f"{state.name}: taken for ended (`sacctmgr show runawayjobs` lets an administrator correct "
                    "sacct)"
                )
            state = JobState(NOT_LISTED)
        elif state.name == NOT_LISTED:
            return
        self.state = state
        self.nodes = state.nodes or self.nodes
        self._ended = not state.alive
        text = state.name
        if state.name == "PENDING":
            # after a prolog that failed
            if state.reason.replace("_", " ") == "launch failed requeued held":
                self._release()
            text = state.text
            if self.record is not None:
                text = explained(state, **self.record.request)
        elif state.nodes and state.name in ("RUNNING", "COMPLETING"):
            text = f"{state.name} on {state.nodes}"
        if text != self._printed:
            if self._ended:
                self.tail.read()  # the job's last lines come before its end
            say(f"job {self.job.job_id}: {text}")
            self._printed = text
            self._note(state, self._ended)
            if state.name == "PENDING" and "aintenance" in state.reason and self.record:
                self._end_before_maintenance(self.record)

    def _wait_for_answer(self, reason: str) -> None:
        """Say once that squeue gives no usable answer; raise Stopped after `patience_s`."""
        now = time.monotonic()
        if not self._silent_since:
            say(f"warning: no usable answer from squeue ({reason}); waiting for one")
            self._silent_since = now
        elif now - self._silent_since > self.patience_s:
            raise Stopped(
                f"no usable answer from squeue for {self.patience_s:.0f} s ({reason}); job {self.job.job_id} may still "
                f"run: run the same command to follow it again, or end it with `scancel {self.job.argument}`"
            )

    def _is_gone(self) -> bool:
        """True if a job that squeue does not list has ended.

        It may live, as a controller in trouble answers with an empty list.
        """
        self._gone_since = self._gone_since or time.monotonic()
        # the time counts for a released claim too: a requeued job waits without one
        if self.record is not None and claimant(self.record.path.parents[1]) == self.job.job_id:
            return False
        if time.monotonic() - self._gone_since < GONE_S:
            return False
        if self.queue.controller_has(self.job):  # squeue's answers were old
            self._gone_since = 0.0
            return False
        return True

    def _end_before_maintenance(self, record: JobRecord) -> None:
        """Lower the time limit of a job that would only start after a maintenance, if it may train."""
        fewest = int(record.nodes.partition("-")[0])
        begins_at = self.queue.maintenance_at(record.slurm_partition, fewest)
        runtime = int(begins_at - time.time()) // 60 - START_MIN
        if not begins_at or 60 * runtime >= (record.limit_s or 60 * record.runtime):
            return
        line = f"maintenance begins at {time.strftime('%a %H:%M', time.localtime(begins_at))}"
        # enough to start, train and save
        if 60 * runtime >= 3 * record.save_within_s:
            change = (f"JobId={record.job_id}", f"TimeLimit={runtime}")
            complaint = self.queue.complaint("scontrol", "update", *change)
            line += f"; {complaint or f'its limit is now {runtime} min, so that it starts before'}"
            if not complaint:
                self.record = replace(record, limit_s=60.0 * runtime)
        say(f"job {record.job_id}: {line}")

    def _release(self) -> None:
        """Release, once, a job that SLURM holds because its start failed.

        SLURM has drained the node that failed.
        """
        if self._was_released:
            return
        self._was_released = True
        complaint = self.queue.complaint("scontrol", "release", self.job.job_id)
        if not complaint:
            say(
                f"job {self.job.job_id}: held after a failed start: released; SLURM does not use the failed node again"
            )


def lost_start(train: Path) -> str:
    """The job of a start that still trains in `train` although its newest job has ended; else empty.

    It may be on a node that SLURM has lost.
    """
    newest = Jobs(train).newest()
    if newest is None or newest.ended_at is None:
        return ""
    return claimant(train, (newest.path / "job.json").stat().st_mtime_ns)


def how_to_end(train: Path, job: str) -> str:
    """Where a start of job `job` that SLURM may have lost trains, and what ends it, in a line."""
    hosts = list[str]()
    argument = job
    for record in Jobs(train).all():
        if record.job_id == job:
            argument = record.argument
            for attempt in record.attempts()[-1:]:
                hosts += attempt["hosts"]
    return (
        f"job {job} still trains on {', '.join(hosts) or 'a node'}; `scancel {argument}` lets it save and end, "
        "unless SLURM has lost it: then end its processes there"
    )


def save_job(
    job: ClusterJob,
    within_s: float,
    wait: Callable[[float], None] = time.sleep,
    impatient: Callable[[], bool] = lambda: False,
) -> None:
    """Signal a running job to save and end, and wait until it has.

    The wait also ends if `impatient`, or after `within_s` seconds.

    Plain scancel gives a job only SLURM's KillWait, 30 s by default, between SIGTERM and SIGKILL:
    it may be too short for a checkpoint.
    """
    queue = Queue(TICK_S, job.cluster)
    if queue.state(job).name not in ("RUNNING", UNKNOWN) or queue.cancel(job, signal="USR2"):
        return
    say(f"job {job.job_id} may save for {within_s:g} s; interrupt again to end it at once")
    deadline = time.monotonic() + within_s
    while queue.state(job).may_be_alive:
        if time.monotonic() > deadline or impatient():
            return
        wait(TICK_S)


def cancel_job(job: ClusterJob, wait: Callable[[float], None] = time.sleep) -> JobState:
    """Cancel a job, wait until it has ended, and return its final state.

    scancel only delivers the request. Raise UserError if it has not ended within `CANCEL_S`. After
    that, a job that only completes counts as ended: it no longer trains, but SLURM may wait minutes
    for a broken node or an epilog.
    """
    queue = Queue(TICK_S, job.cluster)
    complaint = queue.cancel(job)
    deadline = time.monotonic() + CANCEL_S
    state = queue.state(job)
    while state.may_be_alive:
        if time.monotonic() > deadline:
            if state.name == "COMPLETING":
                return JobState("CANCELLED")
            raise UserError(
                f"job {job.job_id} was cancelled but has not ended ({complaint or state.name}); "
                f"`scancel {job.argument}` asks again"
            )
        if complaint:
            complaint = queue.cancel(job)
        wait(TICK_S)
        state = queue.state(job)
    return state


def settle(
    shown: Callable[[], bool], folder: Path, within_s: float, wait: Callable[[float], None]
) -> bool:
    """Wait until a shared folder shows what a node wrote to it, or for `within_s`.

    Return True if it does.
    """
    deadline = time.monotonic() + within_s
    while time.monotonic() <= deadline:
        if shown():
            return True
        with suppress(OSError):
            os.listdir(folder)  # makes a network file system look again
        wait(TICK_S)
    return shown()
