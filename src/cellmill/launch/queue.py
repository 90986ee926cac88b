"""States of SLURM jobs, by squeue or, for jobs it has forgotten, by sacct, and why they wait.

The launchers of a user on one host share squeue's answers (`shared_answer`). No answer, or one that
cannot be parsed, is UNKNOWN and never taken for the end of a job.
"""

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product

from cellmill.launch.shared_answer import Answer, shared_answer
from cellmill.runs.jobs import Jobs
from cellmill.runs.slurm import (
    ALIVE,
    ENDED,
    NOT_LISTED,
    OTHER_JOB,
    UNKNOWN,
    UNLISTED,
    ClusterJob,
    CommandError,
    JobState,
    ask,
    call,
    on_cluster,
    parse_duration,
)

REMEDIES = {
    "PartitionTimeLimit": "{runtime} is more than the partition allows: lower it in the profile",
    "PartitionNodeLimit": "the partition has fewer nodes than {nodes}: lower nodes in the profile",
    "QOSMaxWallDurationPerJobLimit": "{runtime} is more than the QOS allows: lower it in the profile",
    "AssocMaxWallDurationPerJobLimit": "{runtime} is more than the account allows: lower it in the profile",
    "JobHeldUser": "held: `scontrol release {job_id}` releases it",
    "JobHeldAdmin": "held by an administrator, who must release it",
    "job requeued in held state": "held: `scontrol release {job_id}` releases it",
    "launch failed requeued held": "held after a failed start: `scontrol release {job_id}` tries again",
    "JobHoldMaxRequeue": "held after too many requeues: `scontrol release {job_id}` tries again",
    "(Bad)?Constraints": "no node satisfies it: change constraint, gpus_per_node or the memory in the profile",
    "PartitionConfig": "the partition does not allow the request: change nodes, runtime or slurm_partition in the "
    "profile",
    "MaxMemPerLimit": "a node of the partition gives less memory: request less in the profile",
    "Reservation(Deleted|Invalid)": "its reservation is gone: change reservation in the profile "
    "(slurm-reservation for stages)",
    "ReqNodeNotAvail|NodeDown|Reservation|Nodes required for job are DOWN": "its nodes are down or reserved: "
    "`sinfo -R` says why; with another slurm_partition or less runtime it may start sooner",
    "Partition(Down|Inactive)": "its partition is not open: wait, or change slurm_partition in the profile",
    "(QOS|Account)NotAllowed": "the partition refuses it: change slurm_account, qos or slurm_partition in the profile",
    "Licenses": "its licenses are in use",
    "Dependency": "it starts after the job that it depends on",
    "Prolog|Cleaning|MpiPortsBusy|NvidiaImexChannels": "SLURM prepares its nodes",
    "MaxPoweredUpNodes|Power(NotAvail|Reserved)": "the site limits how many nodes are switched on",
    "JobLaunchFailure|SystemFailure": "SLURM could not start it: an administrator sees why in SLURM's logs",
    "QOSUsageThreshold|AccountingPolicy": "too little of what was granted is left: change slurm_account or qos in the "
    "profile",
    "BeginTime": "SLURM starts it at a set time, or again after a pause",
    "DependencyNeverSatisfied": "it will never start: cancel it",
    "InvalidAccount": "slurm_account is not valid: change it in the profile",
    "InvalidQOS": "qos is not valid: change it in the profile",
    "Priority": "jobs of higher priority come first",
    "Resources": "it starts as soon as enough nodes are free",
    r"(QOS|Assoc)Grp\w*Minutes\w*|Job is at or exceeds .*": "the time that was granted is used up: change "
    "slurm_account or qos in the profile",
    r"(QOS|Assoc)(Max\w*Per(Job|Node)|Min)\w*": "a job may not request this: change the request, or "
    "qos, in the profile",
    r"(QOS|Assoc)(Max|Grp|Job|Resource|Time)\w*|Association\w*Limit|Max\w*Per(Account|User)": "a limit "
    "of yours, the account or the QOS is reached: it starts once other jobs have ended, or with "
    "another qos in the profile",
}
"""What a pending job waits for, or what to do, by regular expression of SLURM's reason; the first
match counts.
"""
FRESH_S = 2.0
# sbatch's words for a quota of submitted jobs that is full
QUOTA = re.compile(r"(?:Assoc|QOS)\w*SubmitJobs?\w*Limit")


@dataclass(frozen=True)
class QueuedJob(ClusterJob):
    """One job as squeue lists it."""

    job_id: str
    state: JobState
    name: str  # the stage, if it is the job of a stage
    # its time limit and number of nodes, as SLURM writes them; only for the job of a stage
    limit: str = ""
    nodes: str = ""
    cluster: str = ""  # empty for the default


@dataclass
class Queue:
    """Jobs of this user, by answers that are at most `poll_s` seconds old."""

    poll_s: float
    cluster: str = ""  # or several separated by commas; empty for the default
    _answer: Answer = field(default=Answer(float("-inf"), "", ""), init=False)

    @property
    def fresh_s(self) -> float:
        """Age up to which an answer counts as new: launchers that ask at once share it."""
        return FRESH_S if self.poll_s > FRESH_S else 0.0

    def for_cluster(self, cluster: str) -> "Queue":
        """The queue of a cluster, or this one if `cluster` is empty: job ids are per cluster."""
        return self if cluster in ("", self.cluster) else Queue(self.poll_s, cluster)

    def state(self, job: ClusterJob, max_age_s: float = 0.0) -> JobState:
        """The state of a job; OTHER_JOB if the job of its id has another name.

        By an answer that is at most `max_age_s` or `poll_s` seconds old, if the job is in it.
        """
        try:
            for age_s in (max(self.poll_s, max_age_s), self.fresh_s):
                jobs = {listed.job_id: listed for listed in self._listed(age_s)}
                if job.job_id in jobs:
                    break
        except CommandError as error:
            return JobState(UNKNOWN, str(error))
        if job.job_id in jobs:
            listed = jobs[job.job_id]
            return listed.state if listed.name == job.name else JobState(OTHER_JOB)
        submitted_at = getattr(job, "submitted_at", 0.0)
        if 0 <= time.time() - submitted_at < 2 * self.fresh_s:
            return JobState(NOT_LISTED)  # too new for a shared answer
        try:
            options = ["-X", "-n", "-P", "--duplicates", "-j", job.job_id, "-o", "State,JobName"]
            answer = ask(self._command("sacct", *options))
        except CommandError:  # without accounting the run's own files say how far it came
            answer = ""
        word = ""
        for line in answer.splitlines():  # oldest first; a reused job id has several jobs
            text, _, job_name = line.strip().partition("|")
            if job_name == job.name:
                word = text.partition(" ")[0]  # CANCELLED by 1000
        if word in ALIVE:
            return JobState(word, UNLISTED)
        return JobState(word if word in ENDED else NOT_LISTED)

    def named(self, is_ours: Callable[[str], bool]) -> list[QueuedJob]:
        """Jobs alive now whose name `is_ours`. Raise CommandError without a usable answer."""
        jobs = [job for job in self._listed(self.fresh_s) if is_ours(job.name)]
        for job in jobs:
            if job.state.name == UNKNOWN:
                raise CommandError(job.state.reason)
        return [job for job in jobs if job.state.alive]

    def cancel(self, job: ClusterJob, signal: str = "") -> str:
        """Cancel a job, or send its tasks a signal.

        Return scancel's error message, if any. scancel leaves a job of another name alone.
        """
        options = [f"--name={job.name}"]
        if signal:
            options.append(f"--signal={signal}")
        return self.complaint("scancel", *options, job.job_id)

    def controller_has(self, job: ClusterJob) -> bool:
        """True if scontrol shows that a job is alive.

        A site may cache the answers of squeue.
        """
        try:
            shown = ask(self._command("scontrol", "-o", "show", "job", job.job_id))
        except CommandError:  # it does not know the job
            return False
        fields = dict(re.findall(r"(\w+)=(\S*)", shown))
        return fields.get("JobName") == job.name and fields.get("JobState") in ALIVE

    def complaint(self, program: str, *arguments: str) -> str:
        """Run a command without output; return its error message, if any."""
        try:
            return call(self._command(program, *arguments)).stderr.strip()
        except CommandError as error:
            return str(error)

    def maintenance_at(self, partition: str, fewest: int) -> float:
        """Begin of the next maintenance that leaves a partition less than `fewest` idle nodes.

        In seconds since 1970; 0 if none does. One that takes no node of the partition does not count.
        """
        with suppress(CommandError):
            command = self._command("scontrol", "-o", "show", "reservation")
            shown = ask(command, SLURM_TIME_FORMAT="%s")
            found = re.findall(r"StartTime=(\d+) .*Nodes=(\S+) .*Flags=\S*MAINT", shown)
            states = self.node_states(partition)
            idle = {name for name, state in states.items() if state.startswith("idle")}
            for start, nodes in sorted((int(start), nodes) for start, nodes in found):
                taken = states.keys() & expand(nodes)
                if start > time.time() and (taken or not states):
                    idle -= taken
                    if len(idle) < fewest:
                        return start
        return 0

    def node_states(self, partition: str) -> dict[str, str]:
        """States of a partition's nodes by name, as sinfo writes them; empty without an answer."""
        options = ["-p", partition] if partition else []
        with suppress(CommandError):
            answer = ask(self._command("sinfo", "-a", "-h", "-N", *options, "-o", "%N|%T|%P"))
            rows = re.findall(r"^([^|\n]+)\|(\S+)\|(\S+)\s*$", answer, re.MULTILINE)
            # the default partition ends with *
            return {name: state for name, state, its in rows if partition or its.endswith("*")}
        return {}

    def _command(self, program: str, *arguments: str) -> list[str]:
        return [program, *on_cluster(self.cluster, *arguments)]

    def _listed(self, max_age_s: float) -> list[QueuedJob]:
        """Jobs by an answer of at most this age. Raise CommandError without a usable answer."""
        if time.monotonic() - self._answer.queried_at >= max_age_s:
            # asked by uid, since the environment can change the name; -a: also hidden partitions
            who = ["-u", str(os.getuid())]
            options = ["-a", "-h", "-t", "all", *who, "-o", "%i|%T|%r|%N|%l|%j"]
            self._answer = shared_answer(self._command("squeue", *options), max_age_s)
        if self._answer.error:
            raise CommandError(self._answer.error)
        return parse(self._answer.text, self.cluster)


def living_jobs(jobs: Jobs, queue: Queue) -> list[QueuedJob]:
    """Jobs of a run that SLURM has, recorded or not, on the queue's cluster or the newest job's.

    Not one that still completes after its end was recorded. Raise CommandError without a usable
    answer.
    """
    living = queue.named(jobs.owns)
    newest = queue.for_cluster(jobs.cluster())
    if newest is not queue:
        living += newest.named(jobs.owns)
    by_name = {(job.job_id, job.name): job for job in living}
    for record in jobs.all() if living else ():
        job = by_name.get((record.job_id, record.name))
        if job is not None and job.state.name == "COMPLETING" and record.ended_at is not None:
            del by_name[record.job_id, record.name]
    return list(by_name.values())


def parse(answer: str, cluster: str = "") -> list[QueuedJob]:
    """The jobs in squeue's answer. Raise CommandError if it has lines and none of them is a job.

    With several clusters squeue prints the name of each above its jobs, even without a header.
    With one, `cluster`, it may print none.
    Other lines between jobs are ignored: they are from start-up files of the shell, or the rest of
    a name with a line break.
    """
    jobs = []
    foreign = []
    passed_over = False
    for line in map(str.strip, answer.splitlines()):
        match = re.fullmatch(r"(\d+)\|([A-Z_]+)\|([^|]*)\|([^|]*)\|([^|]*)\|(.*)", line)
        if match:
            number, word, reason, nodes, limit, name = match.groups()
            state = JobState(word, "" if reason == "None" else reason, nodes, parse_duration(limit))
            if word not in ALIVE | ENDED:
                state = JobState(UNKNOWN, f"squeue gives job {number} an unknown state: {word}")
            jobs.append(QueuedJob(number, state, name, cluster=cluster))
        elif re.match(r"\d+[_+]", line):
            passed_over = True  # an array task or a component of a heterogeneous job: not ours
        elif line.startswith("CLUSTER: "):
            cluster = line.removeprefix("CLUSTER: ")
        elif line:
            foreign.append(line)
    if foreign and not jobs and not passed_over:
        raise CommandError(f"squeue answered {foreign[0][:80]!r}")
    return jobs


def explained(state: JobState, **request: str) -> str:
    """The state with its reason and, for a pending job, what it waits for or what to do.

    `request` has `runtime`, `nodes` and `job_id` as they are named to the user
    (`JobRecord.request`).
    """
    if state.name == "PENDING":
        reason = state.reason.split(",")[0].replace("_", " ")
        for pattern, remedy in REMEDIES.items():
            if re.fullmatch(pattern, reason):
                return f"{state.text}: {remedy.format(**request)}"
    return state.text


def expand(nodelist: str) -> list[str]:
    """Hosts of a node list, in its order: `gpu-[01-02,7],n1` is gpu-01, gpu-02, gpu-7, n1."""
    hosts = []
    for group in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        texts_and_ranges = re.split(r"\[([^\]]*)\]", group)  # text, ranges, text, ranges …
        choices = []
        for index, part in enumerate(texts_and_ranges):
            choices.append([part] if index % 2 == 0 else list(_numbers(part)))
        hosts += ["".join(words) for words in product(*choices)]
    return hosts


def _numbers(ranges: str) -> Iterator[str]:
    """Numbers of ranges such as 01-03,7, with leading zeros."""
    for part in ranges.split(","):
        low, _, high = part.partition("-")
        for number in range(int(low), int(high or low) + 1):
            yield f"{number:0{len(low)}}"
