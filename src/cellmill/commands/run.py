"""Commands on one run, wherever it trains: attach, cancel, follow (to a tracker) and logs.

attach takes no lock and changes no file, so a launcher may follow the job too. Ctrl-C ends attach,
not the training.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cellmill.commands.run_state import (
    RunState,
    find_living_jobs,
    find_train_folder,
    find_train_log,
    print_reason,
    until_interrupted,
)
from cellmill.config.load import stored_options
from cellmill.config.parts.trackers import TrackerConfig
from cellmill.config.plugin import by_name, in_one_line
from cellmill.errors import Stopped, UserError
from cellmill.files import read_json
from cellmill.launch.follow import (
    TICK_S,
    JobFollower,
    Tail,
    cancel_job,
    how_to_end,
    lost_start,
    save_job,
    say,
    settle,
)
from cellmill.launch.queue import Queue, QueuedJob
from cellmill.runs.cost import read_local
from cellmill.runs.folder import TAIL_BYTES, TrainFolder
from cellmill.runs.jobs import CANCELLED, Jobs
from cellmill.runs.lock import Holder, find_holder
from cellmill.runs.slurm import ClusterJob
from cellmill.track.follow import POLL_S, without_secrets
from cellmill.track.follower import Follower

SLOWEST_POLL_S = 10.0  # interval for a job that is followed for long, or sent to a tracker
SETTLE_S = 10  # how long a shared folder may take to show what a node wrote
LAUNCHER_S = 15  # how long a launcher may take to notice that its job was cancelled, and to end
SAVE_S = 600  # how long a training on this machine may take to save


def attach(*, run: str, results: Path) -> None:
    """Follow the training of `run`.

    Raise Stopped if it stopped with its state saved, UserError if it failed or if nothing is
    running.
    """
    train = find_train_folder(results, run)
    holder = find_holder(train)
    follower = None
    if holder is not None and not holder.follows:  # then no job of this run is alive
        trainer = holder.text
        what = "the training"
        log = find_train_log(results, run)
        if not log.exists():
            raise UserError(
                f"trained by {trainer}, which prints where it was started: {log} does not exist"
            )
        tail = Tail(log)
    else:
        job = _find_living_job(run, train)
        trainer = what = f"job {job.job_id}"
        folder = Jobs(train).folder(job.name)
        if folder is None:
            raise UserError(
                f"{trainer} has the name {job.name}, but its folder is missing: there is no log"
            )
        log = folder / f"{job.job_id}_0_log.out"
        tail = Tail(log)
        follower = _make_follower(job, tail)
    try:
        say(f"following {trainer}, its log: {log}; Ctrl-C ends only the following")
        if log.exists():
            tail.position = max(0, log.stat().st_size - TAIL_BYTES)
        follow_run(tail, follower.alive if follower else lambda: find_holder(train) is not None)
    except KeyboardInterrupt:
        print(f"\nno longer following; {what} goes on")
        return
    _report_end(train, what, "" if follower is None else follower.state.name)


def _find_living_job(run: str, train: Path) -> QueuedJob:
    """Find the job of the run in SLURM's queue. Raise UserError with the run's state if there is none."""
    living = find_living_jobs(train, Queue(TICK_S))
    if living:
        return living[0]
    run_state = RunState(train)
    failure = f": {run_state.failure}" if run_state.failure else ""
    raise UserError(
        f"{run}: no job is queued or running, and no training runs on this machine; its state is "
        f"{run_state.state}, saved at step {run_state.folder.saved_step()}{failure}"
    )


def _make_follower(job: ClusterJob, tail: Tail) -> JobFollower:
    """Make a follower that changes no file, and polls a job less often the longer it runs."""
    queue = Queue(TICK_S, job.cluster)
    return JobFollower(job, queue, tail, slowest_poll_s=SLOWEST_POLL_S)


def follow_run(tail: Tail, alive: Callable[[], bool]) -> None:
    """Print what is appended to a log while `alive` returns True, and what was appended last."""
    while alive():
        tail.read()
        time.sleep(TICK_S)
    tail.read()


def _report_end(train: Path, what: str, end_state: str) -> None:
    """Print how the training ended. Raise Stopped or UserError if the run is not done."""
    ended = f"{what} ended{f' with {end_state}' if end_state else ''}"
    folder = TrainFolder(train)
    newest = Jobs(train).newest()
    error = newest.error if end_state and newest is not None else None
    if end_state == "COMPLETED" and not error:
        settle(lambda: folder.state() in ("done", "stopped"), train, SETTLE_S, time.sleep)
    if folder.state() == "done":
        print(f"{ended}: the training is done")
        return
    if error:
        raise UserError(f"{ended}: {error}")
    saved = f"{ended}; saved at step {folder.saved_step()}"
    if folder.state() == "stopped" or end_state in (
        "",
        "CANCELLED",
        "TIMEOUT",
        "PREEMPTED",
        "NODE_FAIL",
    ):
        raise Stopped(saved)
    raise UserError(f"{saved}; `cellmill logs {train.parent.name}` shows its output")


def cancel(*, run: str, results: Path) -> None:
    """Cancel the job of `run`, or end its training on this machine. Raise UserError if it cannot."""
    train = find_train_folder(results, run)
    holder = find_holder(train)
    done = list[str]()
    if holder is None or holder.follows:  # otherwise no job of this run is alive
        done = _cancel_jobs(train)
        holder = find_holder(train)
    if holder is not None and not done:  # a training here, or a launcher that is about to submit
        done = [_end_process(train, holder)]
    lost_job = lost_start(train)
    if lost_job:
        raise UserError("; ".join([*done, how_to_end(train, lost_job)]))
    if not done:
        print(f"{run}: no job is queued or running, and no training runs on this machine")
        return
    saved = TrainFolder(train).saved_step()
    print(f"{' and '.join(done)}; saved at step {saved}; train resumes from there")


def _cancel_jobs(train: Path) -> list[str]:
    """Cancel the jobs of the run; return a line about each."""
    done = dict[str, str]()  # by name of the job, since SLURM may show it as COMPLETING for long
    jobs = Jobs(train)
    # its launcher may just have submitted the next job
    while living := [job for job in find_living_jobs(train, Queue(1.0)) if job.name not in done]:
        for job in living:
            print(f"cancelling job {job.job_id}")
            folder = jobs.folder(job.name)
            if folder is not None:
                (folder / CANCELLED).touch()  # so that its launcher submits no other
            record = jobs.record(job.job_id, job.name)
            with suppress(KeyboardInterrupt):
                within_s = SAVE_S if record is None else record.save_within_s
                save_job(job, within_s)
            state = cancel_job(job)
            if settle(lambda: find_holder(train) is None, train, LAUNCHER_S, time.sleep):
                record = jobs.record(job.job_id, job.name)
                # else a launcher that follows records it
                if record is not None and record.ended_at is None:
                    record.write_state(state.name, state.reason, ended=True)
            done[job.name] = f"cancelled job {job.job_id}"
    return list(done.values())


def _end_process(train: Path, holder: Holder) -> str:
    """Ask the process with the lock to save and end, and wait for it; return a line about it."""
    if not holder.holds(train / "lock"):
        remedy = f"run cellmill cancel on {holder.host}"
        if holder.host == os.uname().nodename:
            remedy = "it has passed the lock on; end its processes"
        raise UserError(f"{train}: trained by {holder.text}: {remedy}")
    print(f"asking {holder.text} to save and end")
    try:
        # a launcher leaves its job at SIGTERM; before it has one, it may ignore SIGINT
        ends_job = holder.follows and holder.handles(signal.SIGINT)
        os.kill(holder.pid, signal.SIGINT if ends_job else signal.SIGTERM)
    except ProcessLookupError:
        pass
    except PermissionError:
        raise UserError(f"{train}: trained by {holder.text}, which you may not signal") from None
    if not settle(lambda: find_holder(train) is None, train, SAVE_S, time.sleep):
        raise UserError(f"{holder.text} was asked to end {SAVE_S // 60} min ago and has not ended")
    return f"ended process {holder.pid}"


def follow(*, run: str, to: str, results: Path) -> None:
    """Send `run` to the tracker called `to` until it has ended.

    The tracker has the options that the run was started with, or its defaults. Raise UserError if
    it is unknown or fails.
    """
    train = find_train_folder(results, run)
    options = stored_options(read_json(train / "run.json")["options"], str(train / "run.json"))
    try:
        tracker = options.track.to.get(to) or by_name(TrackerConfig, {to: None})[to]
    except ValueError as error:
        raise UserError(f"--to {error}") from None
    follower = Follower(train, tracker)
    queue = Queue(POLL_S)

    def ended() -> str:
        """Return the status of a training that has ended: done, stopped or failed.

        Return "" after a pause while it is queued or running.
        """
        locked = find_holder(train) is not None
        if locked or find_living_jobs(train, queue):  # a job whose launcher left it
            time.sleep(POLL_S if locked else SLOWEST_POLL_S)
            return ""
        state = TrainFolder(train).state()
        return state if state in ("done", "stopped") else "failed"

    try:
        follower.follow(ended)
    except KeyboardInterrupt:
        print(f"\nno longer sending {run}; run the same command to resume")
    except Exception as error:
        # the tracker's library raises what it likes; an OSError of a file names it, and a
        # ConnectionError does not
        if isinstance(error, UserError) or (
            isinstance(error, OSError) and error.filename is not None
        ):
            raise
        line = without_secrets(
            f"tracker {to!r}: {in_one_line(error)}; run the same command to resume"
        )
        raise UserError(line) from error
    print(f"{run}: sent {follower.n_lines} lines and {follower.n_artifacts} files to {to}")


def logs(*, run: str, results: Path, follow: bool) -> None:
    """Print the log of `run`; with `follow` also what is appended while it runs.

    Raise UserError without a log.
    """
    train = find_train_folder(results, run)
    printed = find_train_log(results, run)  # by a training here, or the launcher of a waiting job
    newest = Jobs(train).newest()
    local = read_local(train)
    if newest is not None and local and local[-1]["started_at"] > newest.submitted_at:
        newest = None
    holder = find_holder(train)
    with until_interrupted():
        if follow and holder is not None and not holder.follows:
            follow_run(Tail(printed), lambda: find_holder(train) is not None)
        elif follow and newest is not None:
            tail = Tail(newest.log)
            follow_run(tail, _make_follower(newest, tail).alive)
        elif newest is not None and newest.log.exists():
            Tail(newest.log).read()
            print_reason(train)
        elif printed.exists():
            Tail(printed).read()
        elif newest is not None:
            raise UserError(
                f"{run}: job {newest.job_id} ({newest.state}) has no log yet; it will be {newest.log}"
            )
        else:
            raise UserError(f"{run}: no log: it has no job, and {printed} does not exist")
