"""Training through SLURM: a job of one torchrun agent per node, and the next after it.

The launcher relies only on SLURM and the run's own files, so it may be killed at any time and
another one takes over: it attaches to the job on record, or adopts one of its name that was
submitted but not recorded, and never submits while one is alive. docs/cluster.md lists what may
happen to a job, and what the launcher then does.
"""

import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from cellmill.config.machine import Machine
from cellmill.errors import DataError, Stopped, UserError
from cellmill.files import span
from cellmill.launch.bad_nodes import HOW_TO_LIFT, KEPT_S, BadNodes, blamed
from cellmill.launch.follow import (
    TICK_S,
    JobFollower,
    Tail,
    cancel_job,
    how_to_end,
    save_job,
    say,
    settle,
)
from cellmill.launch.job import Job
from cellmill.launch.queue import Queue
from cellmill.launch.signals import Requests, requests
from cellmill.launch.submit import NEEDED, SlurmJobs
from cellmill.runs.folder import TrainFolder, training_seconds
from cellmill.runs.jobs import CANCELLED, CONNECTION, JobRecord, Jobs, error_line
from cellmill.runs.lock import FolderDeleted, FolderWatch, claimant
from cellmill.runs.slurm import ENDED_BY_SITE, INFRASTRUCTURE, NOT_LISTED, OTHER_JOB

SHARE = 0.5  # a job that spent more than this share of its time on start-up was mostly start-up
IN_A_ROW = 2  # such jobs until they are warned about
# a job that ended this close to its limit ended by it: SLURM may announce it a minute early
EARLY_S = 90.0
MANY_ENDED_BY_SITE = 5  # jobs in a row without a new checkpoint after which the remedy is named
LONGEST_PAUSE_S = 600  # before another job after such jobs
FRUITLESS_JOBS = 3  # jobs in a row without a new checkpoint after which another would not help
TOO_SHORT = (
    "; if the jobs were too short, raise runtime or save_within_s in the profile, or save more often "
    "(train.checkpoint_every_min)"
)
SETTLE_S = 60  # how long a shared folder may take to show what a node wrote


class ShortJobs:
    """Jobs of one run that were mostly start-up."""

    def __init__(self, training_s: Callable[[], float | None]) -> None:
        self.training_s = training_s  # time of all steps of the curve; None if unknown
        self._before_s = training_s() or 0.0
        self._has_warned = False
        # (share of the time without training, steps saved) of each of the last jobs that ended at
        # its limit
        self._at_limit = list[tuple[float, int]]()

    def line(self, ended: JobRecord, steps: int, was_to_save: bool) -> str:
        """One line, once, if this job and the one before it were mostly start-up; otherwise empty.

        `steps` is what the job has added to the newest checkpoint. `was_to_save`: SLURM announced
        the job's end, which it does before a preemption too. Raise UserError if the job ended at
        its limit before its first step.
        """
        limit_s = _limit_s(ended)
        elapsed_s = _last_elapsed_s(ended)
        is_at_limit = bool(elapsed_s) and not _ended_early(ended)
        after_s = self.training_s()
        trained_s = (after_s or 0.0) - self._before_s
        self._before_s = after_s or 0.0
        made_nothing = not ended.late and not steps and trained_s <= 0
        if ended.state == "TIMEOUT":
            hit_limit = not _ended_early(ended)
        else:
            hit_limit = is_at_limit and was_to_save and ended.state != "PREEMPTED"
        if made_nothing and hit_limit and limit_s >= 60 * ended.runtime:
            took_s = elapsed_s or limit_s
            least_min = math.ceil((2 * took_s + ended.save_within_s) / 60)
            raise UserError(
                f"start-up took {took_s:.0f} s of the limit's {limit_s:.0f} s, and no step was made: raise runtime to "
                f"at least {least_min} (min) in the profile (job {ended.job_id}, log: {ended.log})"
            )
        if after_s is None or not is_at_limit:
            self._at_limit.clear()
            return ""
        trained_share = min(1.0, max(0.0, trained_s) / max(elapsed_s, 1e-9))
        self._at_limit.append((1 - trained_share, steps))
        shares, saved = zip(*self._at_limit[-IN_A_ROW:])
        if self._has_warned or len(shares) < IN_A_ROW or min(shares) < SHARE:
            return ""
        self._has_warned = True
        return (
            f"warning: the last {IN_A_ROW} jobs spent {sum(shares) / IN_A_ROW:.0%} of their time on starting and "
            f"saving, and made {' and '.join(map(str, saved))} steps: raise runtime ({ended.runtime} min) in the "
            "profile"
        )


def _last_elapsed_s(ended: JobRecord) -> float:
    """Seconds of a job's last start, by its own record; 0 if that is missing or damaged."""
    with suppress(DataError):
        for attempt in ended.attempts()[-1:]:
            return float(attempt["ended_at"] or attempt["seen_at"]) - float(attempt["started_at"])
    return 0.0


def _ended_early(ended: JobRecord) -> bool:
    """True if a job ended long before its limit.

    SLURM says TIMEOUT also of one that ended in the grace time of a preemption.
    """
    return 0 < _last_elapsed_s(ended) < _limit_s(ended) - ended.save_within_s - EARLY_S


def _limit_s(ended: JobRecord) -> float:
    return ended.limit_s or 60.0 * ended.runtime


class SlurmLauncher:
    """Submits and follows the jobs of one run.

    One process at a time: the caller holds the run's lock.
    """

    def __init__(self, folder: TrainFolder, machine: Machine) -> None:
        self.folder = folder
        self.machine = machine
        self.watch = FolderWatch(folder.path)
        self.bad_nodes = BadNodes.of_run(folder.path)
        self.slurm = SlurmJobs(
            Jobs(folder.path), Queue(machine.poll_s, machine.slurm_cluster), machine
        )
        missing = [name for name in NEEDED if shutil.which(name) is None]
        if missing:
            raise UserError(
                f"{missing[0]} is not on PATH: run this on a login node of the cluster, or set launcher to local or "
                "allocation in the profile"
            )
        if machine.container and not Path(machine.container).exists():
            raise UserError(
                f"{machine.container}: no such image; set container in the profile to its path"
            )

    def living(self) -> JobRecord | None:
        """The job of this run that SLURM still has, recorded or not."""
        newest = self.slurm.jobs.newest()
        if newest is not None and newest.ended_at is None:
            queue = self.slurm.queue.for_cluster(newest.cluster)
            state = queue.state(newest)
            # it may still run: its follower waits until SLURM is sure
            if state.may_be_alive or state.name == NOT_LISTED:
                return newest
            name = NOT_LISTED if state.name == OTHER_JOB else state.name
            self._note_bad_nodes(newest.write_state(name, state.reason, ended=True))
        return self.slurm.find()

    def is_gone(self, record: JobRecord) -> bool:
        """Wait until SLURM lists the job.

        Return True if it has been missing long enough to count as ended.
        """
        follower = JobFollower.of(record, self.slurm.queue, echo=False)
        while follower.alive():
            if follower.state.alive:
                return False
            self.slurm.requests.wait(min(TICK_S, self.machine.poll_s))
        return True

    def run(self, job: Callable[[Path], Job]) -> None:
        """Train until the run's files say done.

        `job` returns the job for a folder that takes its error. Raise Stopped if it was cancelled
        or detached from, UserError if the training or SLURM refuses.
        """
        with requests() as self.slurm.requests:
            record = self.living()
            fruitless = 0
            ended_by_site = 0
            short = ShortJobs(lambda: training_seconds(self.folder.path))
            if record is not None:
                say(f"attached to job {record.job_id}; its log: {record.log}")
                changes = record.changes(self.machine)
                if changes:
                    say(
                        "warning: the job was submitted for another machine than the profile's "
                        f"({', '.join(changes)}); to change it, interrupt, which saves and cancels the job, and run "
                        "the same command again"
                    )
            for _ in range(self.machine.max_jobs):
                saved_before = self.folder.saved_step()
                ended = self._follow(record or self._submit(job), self.slurm.requests)
                if self.folder.state() == "done":
                    return
                # a second error in a row is not the node's
                may_move = self._note_bad_nodes(ended) and not fruitless
                why = self._why_another(ended, may_move)
                log = Tail(ended.log)
                if log.last(Tail.REFUSED):
                    record = self._after_claim()
                    if self.folder.state() == "done":
                        return
                    continue
                saved = self.folder.saved_step()
                too_short = short.line(ended, saved - saved_before, bool(log.last(Tail.TO_SAVE)))
                if saved > saved_before:
                    fruitless = 0
                    ended_by_site = 0
                elif ended.state in ENDED_BY_SITE or (
                    ended.state == "TIMEOUT" and ended.limit_s and _ended_early(ended)
                ):
                    ended_by_site += 1
                else:
                    fruitless += 1
                if fruitless == FRUITLESS_JOBS:
                    advice = "" if ended.late or ended.state == "FAILED" else TOO_SHORT
                    raise UserError(
                        f"{fruitless} jobs in a row ended without a new checkpoint; {why}{advice}"
                    )
                say(f"{why}; going on from step {saved} with another job")
                if too_short:
                    say(too_short)
                if ended_by_site == MANY_ENDED_BY_SITE:
                    say(
                        f"warning: the site has ended {ended_by_site} jobs in a row before they saved: save more often "
                        "(train.checkpoint_every_min), or change slurm_partition or qos in the profile to one that is "
                        "not preempted"
                    )
                if ended_by_site > 1:  # the next one would probably end as soon
                    self.slurm.pause(min(self.machine.poll_s * 2**ended_by_site, LONGEST_PAUSE_S))
                record = None
        raise UserError(
            f"not done after {self.machine.max_jobs} jobs; run the same command to resume, or raise max_jobs "
            "in the profile"
        )

    def _submit(self, job: Callable[[Path], Job]) -> JobRecord:
        """Submit a job that excludes nodes that have failed. Print which."""
        self.slurm.excluded = self._excluded()
        if self.slurm.excluded:
            nodes = ", ".join(self.slurm.excluded)
            say(f"excluding {nodes}: failed in the last {span(KEPT_S)} (see status); {HOW_TO_LIFT}")
        return self.slurm.submit(job)

    def _excluded(self) -> list[str]:
        return self.bad_nodes.excluded(self._node_states, self.machine.node_counts[0])

    def _node_states(self) -> dict[str, str]:
        return self.slurm.queue.node_states(self.machine.slurm_partition)

    def _note_bad_nodes(self, ended: JobRecord) -> bool:
        """Note the nodes that caused the end of a job.

        True if there are any and the next job excludes them.
        """
        nodes = blamed(ended, self._node_states)
        for name, why in nodes.items():
            self.bad_nodes.add(name, why)
        return bool(nodes) and nodes.keys() <= {*self._excluded()}

    def _after_claim(self) -> JobRecord | None:
        """Wait until no job claims the run, or SLURM has one of its jobs; return that job's record."""
        path = self.folder.path
        has_warned = False
        while True:
            record = self.slurm.find()
            job = claimant(path)
            if record is not None or not job or self.folder.state() == "done":
                return record
            if not has_warned:
                say(f"{how_to_end(path, job)}; another job is submitted once it has ended")
                has_warned = True
            self.watch.check()
            self.slurm.pause(self.machine.poll_s)

    def _follow(self, record: JobRecord, requests: Requests) -> JobRecord:
        """Follow a job until it has ended and the shared folder shows how, obeying signals.

        Return its record. Cancels it, and raises FolderDeleted, if the run's folder was deleted.
        """
        follower = JobFollower.of(record, self.slurm.queue)
        for _ in follower.states(requests.wait):
            try:
                self.watch.check(f"; job {record.job_id}, which can save nothing, was cancelled")
            except FolderDeleted:
                cancel_job(record, requests.wait)
                raise
            if requests.first:
                self._obey(follower, record, requests)
        self.watch.wait()
        ended = follower.record
        assert ended is not None
        if ended.state == "COMPLETED":
            shown = ("done", "stopped")
            settle(
                lambda: self.folder.state() in shown or bool(ended.error),
                self.folder.path,
                SETTLE_S,
                requests.wait,
            )
        return ended

    def _obey(self, follower: JobFollower, record: JobRecord, requests: Requests) -> None:
        """Cancel the job or leave it, as requested. Raise Stopped."""
        job_id = record.job_id
        if requests.first == "hand over":
            raise Stopped(
                f"job {job_id} was left to another process; run the same command to follow it again"
            )
        if requests.first == "detach" or self.machine.on_interrupt == "detach":
            raise Stopped(
                f"job {job_id} goes on without this process; run the same command to follow it again, "
                f"`scancel {record.argument}` to end it"
            )
        say(f"cancelling job {job_id}")
        requests.again = False
        save_job(record, record.save_within_s, requests.wait, lambda: requests.again)
        follower.cancel(requests.wait)
        raise Stopped(
            f"cancelled job {job_id}; saved at step {self.folder.saved_step()}; run the same command to resume"
        )

    def _why_another(self, ended: JobRecord, may_move: bool) -> str:
        """The reason for submitting another job. Raise UserError or Stopped if there is none.

        `may_move`: the next job excludes the nodes that caused the end of this one.
        """
        outcome = next(outcome for applies, outcome in self._outcomes(ended, may_move) if applies)
        if isinstance(outcome, UserError):
            raise outcome
        return outcome

    def _outcomes(
        self, ended: JobRecord, may_move: bool
    ) -> Iterator[tuple[object, str | UserError]]:
        """Pairs of a test and its outcome, of which the first that applies counts.

        The outcome is the reason for another job, or the error that ends the training.
        """
        log = Tail(ended.log)
        job = f"job {ended.job_id}"
        source = f"(job {ended.job_id}, log: {ended.log})"
        again = "run the same command to resume"
        yield may_move and ended.error, f"{job} ended with {ended.state}: {ended.error}"
        yield ended.error, UserError(f"{ended.error} {source}")
        saved = f"saved at step {self.folder.saved_step()}"
        stopped = Stopped(f"{job} was cancelled by `cellmill cancel`; {saved}; {again}")
        yield (ended.path / CANCELLED).exists(), stopped
        yield (
            ended.state == "CANCELLED",
            Stopped(f"{job} was cancelled by somebody else; {again}"),
        )
        refused = log.last(Tail.REFUSED)
        yield refused, refused
        failed = log.last(Tail.FAILED_SETUP)
        yield failed, UserError(f"{failed} {source}")
        yield (
            ended.state == "COMPLETED" and self.folder.state() == "stopped",
            f"{job} stopped and saved before its time limit or a preemption",
        )
        yield (
            ended.state == "OUT_OF_MEMORY" or log.last(Tail.OUT_OF_MEMORY),
            UserError(
                f"the job ran out of memory: raise set-resources: train: {self.machine.memory_key} in the "
                f"profile, or lower train.token_budget {source}"
            ),
        )
        path = self.folder.path
        free = shutil.disk_usage(path).free
        yield (
            free < 1 << 20,
            UserError(
                f"{path}: no space left ({free} bytes); make room and run the same command {source}"
            ),
        )
        late = f": {ended.late}" if ended.late else ""
        yield ended.state in INFRASTRUCTURE, f"{job} ended with {ended.state}{late}"
        yield (
            ended.state != "FAILED",
            UserError(f"the job ended with {ended.state} before the training was done {source}"),
        )
        no_log = f"{job} ended with FAILED and left no log (can the nodes see {ended.path}?)"
        yield not ended.log.exists(), no_log
        # a signal is the cause of a collective that failed
        for task_log in sorted(ended.path.glob(f"{ended.job_id}_*_log.out")):
            killed = Tail(task_log).last(Tail.KILLED)
            yield killed, f"{job} ended with FAILED: {killed}"
        connection = error_line(ended.path, CONNECTION)
        yield connection, f"{job} ended with FAILED: {connection}"
        failed = log.last(Tail.FAILED_IMPORT)
        advice = "check modules, setup and container in the profile"
        yield failed, UserError(f"{failed}; {advice} {source}")
        refused = log.last(Tail.SRUN_OPTIONS)
        yield refused, UserError(f"{refused}; change srun_options in the profile {source}")
        yield True, f"{job} ended with FAILED and no process said why, log: {ended.log}"
