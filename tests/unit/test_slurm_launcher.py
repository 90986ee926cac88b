"""The launcher against a scripted SLURM: refusals, no answers, garbage, jobs that vanish or mostly
start.
"""

import dataclasses
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cellmill.config.machine import Machine
from cellmill.errors import Stopped, UserError
from cellmill.launch import queue as queue_module
from cellmill.launch.follow import BEGINS, JobFollower, Tail, save_job
from cellmill.launch.job import Job
from cellmill.launch.node import UNSET
from cellmill.launch.slurm import ShortJobs, SlurmLauncher
from cellmill.launch.submit import FIND_MODULE, submitting
from cellmill.runs.folder import TrainFolder
from cellmill.runs.jobs import JobRecord, Jobs
from cellmill.runs.lock import FolderWatch, claim
from cellmill.runs.slurm import JobState

Answer = list[Any]
Capsys = pytest.CaptureFixture[str]
MonkeyPatch = pytest.MonkeyPatch
NONE: Answer = [0, "", ""]


def submitted(job: int = 7) -> Answer:
    return [0, f"Submitted batch job {job}\n", ""]


def listed(state: str, reason: str = "None", job: int = 7, limit: str = "") -> Answer:
    return [0, f"{job}|{state}|{reason}|node1|{limit}|{{name}}\n", ""]


class Scripted:
    """A launcher, a scripted SLURM, and scripted states of a run."""

    def __init__(
        self, folder: Path, monkeypatch: MonkeyPatch, capsys: Capsys, **machine: Any
    ) -> None:
        self.fake = folder / "fake"
        self.train = folder / "runs" / "a" / "train"
        self.capsys = capsys
        (self.fake / "bin").mkdir(parents=True)
        self.train.mkdir(parents=True)
        for name in ("sbatch", "squeue", "sacct", "scancel", "scontrol", "sinfo", "srun"):
            shutil.copy(Path(__file__).parent / "fake_slurm.py", self.fake / "bin" / name)
            (self.fake / "bin" / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{self.fake / 'bin'}:/usr/bin:/bin")
        monkeypatch.setenv("FAKE_SLURM", str(self.fake))
        monkeypatch.setattr("tempfile.tempdir", str(self.fake))  # of shared answers
        monkeypatch.setattr("cellmill.launch.follow.GONE_S", 0.3)
        self.machine = Machine(launcher="slurm", poll_s=0.05, **machine)
        self.states = ["running"]
        self.steps = [0]
        self.first = self.train / "jobs" / "001"

    def answers(self, **answers: list[Answer]) -> None:
        (self.fake / "answers.json").write_text(
            json.dumps(
                {
                    "sacct": [[1, "", "Slurm accounting storage is disabled"]],
                    "scontrol": [[1, "", "slurm_load_jobs error: Invalid job id specified"]],
                    **answers,
                }
            )
        )

    def hook(self, program: str, code: str) -> None:
        """Run this Python code in each call of a command, before it answers."""
        path = self.fake / "bin" / program
        path.write_text(path.read_text().replace("print(out", f"{code}\nprint(out", 1))

    def run(
        self, *after: Answer, before: Sequence[Answer] = (NONE, NONE), **answers: list[Answer]
    ) -> str:
        """Train with these answers of squeue before and after the first submission; return what is
        printed.
        """
        self.answers(squeue=[*before, *after], **({"sbatch": [submitted()]} | answers))
        self.launcher().run(lambda folder: Job("some.module", [str(folder)], 1, 1))
        printed = self.capsys.readouterr()
        assert printed.err == "", "errors of sbatch are said once, by the launcher"
        return printed.out

    def refused(self, *after: Answer, **answers: Any) -> str:
        """The error of `run`."""
        with pytest.raises(UserError) as error:
            self.run(*after, **answers)
        return str(error.value)

    def launcher(self) -> SlurmLauncher:
        """A launcher to which the run's folder shows the scripted states and saved steps, one at
        each look.
        """
        folder = TrainFolder(self.train)
        folder.state = lambda: self._next(self.states)
        folder.saved_step = lambda: self._next(self.steps)
        return SlurmLauncher(folder, self.machine)

    def calls(self, program: str) -> list[str]:
        return [
            line
            for line in (self.fake / "calls").read_text().splitlines()
            if line.startswith(program)
        ]

    @staticmethod
    def _next(values: list[Any]) -> Any:
        return values.pop(0) if len(values) > 1 else values[0]


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Capsys) -> Iterator[Scripted]:
    scripted = Scripted(tmp_path, monkeypatch, capsys)
    yield scripted
    early = scripted.fake / "too_early"
    assert not early.exists(), early.read_text()


@pytest.fixture
def done(scripted: Scripted) -> Scripted:
    """The same, whose run is done after its first job."""
    scripted.states = ["done"]
    return scripted


@pytest.mark.parametrize(
    "limit", ["AssocMaxSubmitJobLimit", "QOSMaxSubmitJobPerUserLimit", "AssocGrpSubmitJobsLimit"]
)
def test_a_full_quota_of_jobs_is_waited_out(done: Scripted, limit: str) -> None:
    said = "Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size and/or time)"
    full = [1, "", f"sbatch: error: {limit}\nsbatch: error: {said}\n"]
    printed = done.run(listed("COMPLETED"), before=[NONE] * 4, sbatch=[full, full, submitted()])
    line = (
        f"sbatch: {limit}: SLURM accepts no further job of yours until others have ended; waiting\n"
    )
    assert printed.startswith(f"{line}submitted job 7;")
    assert printed.count(limit) == 1
    assert [path.name for path in (done.train / "jobs").iterdir()] == ["001"]


@pytest.mark.parametrize(
    "reason", ["JobHeldUser", "job requeued in held state", "job_requeued_in_held_state"]
)
def test_a_held_job_says_how_to_release_it(done: Scripted, reason: str) -> None:
    held = listed("PENDING", reason)
    printed = done.run(held, held, listed("RUNNING"), listed("COMPLETED"))
    assert f"job 7: PENDING ({reason}): held: `scontrol release 7` releases it\n" in printed
    assert printed.count(reason) == 1
    assert printed.endswith("job 7: RUNNING on node1\njob 7: COMPLETED\n")


def test_a_job_held_after_a_failed_start_is_released_once(done: Scripted) -> None:
    held = listed("PENDING", "launch_failed_requeued_held")
    printed = done.run(held, held, held, listed("RUNNING"), listed("COMPLETED"), scontrol=[NONE])
    assert done.calls("scontrol") == ["scontrol release 7"]
    line = "job 7: held after a failed start: released; SLURM does not use the failed node again\n"
    assert printed.count(line) == 1


@pytest.mark.parametrize(
    ("left_min", "update", "calls", "line"),
    [
        (30, "", ["update JobId=7 TimeLimit=25"],
         "; its limit is now 25 min, so that it starts before"),
        (30, "Access denied", ["update JobId=7 TimeLimit=25"], "; Access denied"),
        (9, "", [], ""),
        (90, "", [], None),
    ],
)  # fmt: skip
def test_a_job_runs_before_a_maintenance_if_it_may_train(
    done: Scripted, left_min: int, update: str, calls: list[str], line: str | None
) -> None:
    begins_at = int(time.time()) + 60 * left_min + 30
    shown = (
        f"ReservationName=course StartTime=9 EndTime=9 Flags=SPEC_NODES\n"
        f"ReservationName=past StartTime=10 EndTime=9 Nodes=n9 Flags=MAINT,SPEC_NODES\n"
        f"ReservationName=maint StartTime={begins_at} EndTime=9 Nodes=n1 Flags=MAINT,SPEC_NODES TRES=cpu=32\n"
    )
    waits = listed("PENDING", "ReqNodeNotAvail, Reserved for maintenance", limit="1:00:00")
    begins = listed("PENDING", "Resources")
    scontrol = [[0, shown, ""], [int(bool(update)), "", update]]
    printed = done.run(waits, begins, listed("RUNNING"), listed("COMPLETED"), scontrol=scontrol)
    assert done.calls("scontrol") == [
        "scontrol -o show reservation",
        *(f"scontrol {call}" for call in calls),
    ]
    hour = time.strftime("%a %H:%M", time.localtime(begins_at))
    expected = f"job 7: maintenance begins at {hour}{line}\n"
    assert (expected in printed) == (line is not None)
    [record] = Jobs(done.train).all()
    assert record.limit_s == (1500 if line and "now 25" in line else 3600)
    assert record.changes(done.machine) == []


@pytest.mark.parametrize(
    ("nodes", "fewest", "expected"),
    [
        ("n[1-4]", 1, 3),
        ("n[1-4]", 3, 2),
        ("n[3-4]", 1, 2),
        ("n5", 1, 0),
        ("", 1, 1),
        ("n[3-4],busy[1-2]", 1, 2),
        ("n[3-4],n[6-8]", 2, 0),
    ],
)
def test_a_maintenance_counts_if_it_takes_the_job_s_nodes(
    done: Scripted, nodes: str, fewest: int, expected: int
) -> None:
    starts = [int(time.time()) + 3600 * hour for hour in (1, 2, 3)]
    shown = "".join(
        f"ReservationName=m StartTime={start} EndTime=9 Nodes={of} NodeCnt=1 Flags=MAINT,SPEC_NODES TRES=cpu=32\n"
        for start, of in zip(starts, ("n9", "n[3-4]", "n[1-4]"))
    )
    states = "".join(
        f"{name.replace('busy', 'n')}|{'allocated' if 'busy' in name else 'idle'}|gpu\n"
        for name in queue_module.expand(nodes)
    )
    done.answers(scontrol=[[0, shown, ""]], sinfo=[[0, states, ""]])
    at = queue_module.Queue(1.0).maintenance_at("gpu", fewest)
    assert at == (starts[expected - 1] if expected else 0)


def test_a_job_known_only_to_scontrol_is_not_resubmitted(done: Scripted) -> None:
    shown = [
        0,
        "JobId=7 JobName={name} UserId=u1(7) Priority=1 JobState=PENDING Reason=Resources Dependency=(null)\n",
        "",
    ]
    done.answers()
    printed = done.run(
        listed("RUNNING"),
        *[NONE] * 12,
        listed("COMPLETED"),
        sacct=[[0, "PENDING|{name}\n", ""]],
        scontrol=[shown],
    )
    assert len(done.calls("sbatch")) == 1
    assert "taken for ended" not in printed
    assert printed.endswith("job 7: COMPLETED\n")


def test_jobs_that_the_site_ended_are_not_counted(scripted: Scripted) -> None:
    scripted.states = [*["running"] * 7, "done"]
    ends = ["PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "REVOKED", "PREEMPTED", "PREEMPTED", "COMPLETED"]
    answers = [answer for state in ends for answer in (listed(state), NONE, NONE)]
    scripted.machine = scripted.machine.model_copy(update={"poll_s": 0.01})
    printed = scripted.run(*answers)
    assert len(scripted.calls("sbatch")) == 7
    assert (
        printed.count(
            "warning: the site has ended 5 jobs in a row before they saved: save more often"
        )
        == 1
    )


def test_a_timeout_long_before_the_limit_is_the_site_s(scripted: Scripted) -> None:
    scripted.states = [*["running"] * 4, "done"]
    attempt = '{"hosts": [], "started_at": 1000, "seen_at": 1300, "ended_at": 1300}'
    leaving(scripted, "attempt-000.json", attempt)
    timeout = listed("TIMEOUT", limit="1:00:00")
    answers = [answer for _ in range(4) for answer in (timeout, NONE, NONE)]
    scripted.run(*answers, listed("COMPLETED"))
    assert len(scripted.calls("sbatch")) == 5


@pytest.mark.parametrize("limit", ["5:00", "UNLIMITED", ""])
def test_a_timeout_at_a_lower_limit_is_not_the_site_s(scripted: Scripted, limit: str) -> None:
    attempt = '{"hosts": [], "started_at": 1000, "seen_at": 1300, "ended_at": 1300}'
    leaving(scripted, "attempt-000.json", attempt)
    timeout = listed("TIMEOUT", limit=limit)  # such as of time-min=5, with runtime 60
    said = scripted.refused(*[timeout, NONE, NONE] * 5, timeout)
    assert said.startswith("3 jobs in a row ended without a new checkpoint")
    assert said.endswith(
        "raise runtime or save_within_s in the profile, or save more often (train.checkpoint_every_min)"
    )
    assert len(scripted.calls("sbatch")) == 3


def test_jobs_that_keep_vanishing_are_given_up(scripted: Scripted) -> None:
    line = (
        "3 jobs in a row ended without a new checkpoint; job 7 ended with NOT_LISTED; if the jobs"
    )
    assert scripted.refused(before=[NONE]).startswith(line)
    assert len(scripted.calls("sbatch")) == 3


def leaving(scripted: Scripted, file: str, text: str) -> None:
    """Let each submitted job leave this file beside its log."""
    jobs = str(scripted.train / "jobs")
    code = f"for job in Path({jobs!r}).glob('*'):\n    (job / '7_0_log.out').touch()\n"
    scripted.hook("sbatch", f"{code}    (job / {file!r}).write_text({text!r})")


CLOSED = ("connection.txt", "rank 0 on node1: all_reduce failed: closed")
KILLED = ("7_1_log.out", "rank 3 on node2 ended with signal SIGKILL")
LATE = ("late.txt", "1 of 2 nodes have not joined: node2; their logs may say why")


@pytest.mark.parametrize(
    ("files", "state", "why"),
    [
        ([CLOSED], "FAILED", CLOSED[1]),
        ([CLOSED, KILLED], "FAILED", KILLED[1]),  # the signal broke the collective
        ([LATE], "TIMEOUT", LATE[1]),  # and a short limit is not blamed
    ],
    ids=["collective", "signal", "late nodes"],
)
def test_files_of_a_job_give_the_reason_if_no_process_does(
    scripted: Scripted, files: list[tuple[str, str]], state: str, why: str
) -> None:
    for file in files:
        leaving(scripted, *file)
    scripted.machine = scripted.machine.model_copy(update={"runtime": 5})
    error = scripted.refused(*[listed(state), NONE, NONE] * 3)
    assert (
        error == f"3 jobs in a row ended without a new checkpoint; job 7 ended with {state}: {why}"
    )
    line = f"job 7 ended with {state}: {why}; going on from step 0 with another job\n"
    assert scripted.capsys.readouterr().out.count(line) == 2


def test_a_silent_job_running_only_for_sacct_has_ended(
    scripted: Scripted,
) -> None:
    own = claim(scripted.train, "7")
    os.utime(own.file, (time.time() - 100, time.time() - 100))
    refused = [1, "", "sbatch: error: enough\n"]
    answers = {"sbatch": [submitted(), refused], "sacct": [[0, "RUNNING|{name}\n", ""]]}
    assert "enough" in scripted.refused(listed("RUNNING"), *[NONE] * 50, **answers)
    assert (
        "job 7: squeue no longer lists it and it gives no sign of life, though sacct says RUNNING: taken for ended "
        "(`sacctmgr show runawayjobs` lets an administrator correct sacct)\njob 7: NOT_LISTED\n"
        "job 7 ended with NOT_LISTED; going on from step 0 with another job\n"
    ) in scripted.capsys.readouterr().out


RUN_SETUP = """
import subprocess
setup = script[script.index("# setup"):script.index("# command")]
subprocess.run(["bash", "-c", setup], env={"SLURMD_NODENAME": "node1"}, stdout=open("LOG", "w"))
"""
IMPORTS = (
    "ModuleNotFoundError: No module named 'anndata'",
    "/env/bin/python: No module named submitit.core",
)


@pytest.mark.parametrize(
    ("machine", "log", "states", "error"),
    [
        ({"runtime": 5}, "", ["RUNNING", "TIMEOUT"],
         "start-up took 300 s of the limit's 300 s, and no step was made: raise runtime to at least 12 (min) in the "
         "profile (job 7, log: LOG)"),
        *(({}, f"Traceback (most recent call last):\n{line}\nsrun: error: node1: task 0: Exited with code 1\n",
           ["FAILED"], f"{line}; check modules, setup and container in the profile (job 7, log: LOG)")
          for line in IMPORTS),
        ({}, "srun: unrecognized option '--nonsense=3'\nTry \"srun --help\" for more information\n", ["FAILED"],
         "srun: unrecognized option '--nonsense=3'; change srun_options in the profile (job 7, log: LOG)"),
        ({"modules": "cuda/99"}, "", ["RUNNING", "FAILED"],
         "`module load cuda/99` failed on node1, which has no command module, also after /etc/profile.d (setup, which "
         "runs after modules, may load them itself); change modules in the profile (job 7, log: LOG)"),
        # which sacct says, when squeue has forgotten the job
        ({}, "", ["CANCELLED by 0"], "job 7 was cancelled by somebody else; run the same command to resume"),
    ],
    ids=["short limit", "no module", "no module of Python", "srun", "modules", "cancelled"],
)  # fmt: skip
def test_an_error_that_a_restart_cannot_mend_takes_one_job(
    scripted: Scripted, machine: dict[str, Any], log: str, states: list[str], error: str
) -> None:
    scripted.machine = scripted.machine.model_copy(update=machine)
    file = scripted.first / "7_0_log.out"
    if "modules" in machine:
        scripted.hook("sbatch", RUN_SETUP.replace("LOG", str(file)))
    elif log:
        leaving(scripted, file.name, log)
    known = [] if " by " in states[0] else [listed(state) for state in states]
    assert scripted.refused(*known, sacct=[[0, f"{states[-1]}|{{name}}\n", ""]]) == error.replace(
        "LOG", str(file)
    )
    assert len(scripted.calls("sbatch")) == 1


@pytest.mark.parametrize("before", ["", "set -u; ", "set -eu; "])
def test_module_is_found_in_the_files_of_login_shells(done: Scripted, before: str) -> None:
    done.machine = done.machine.model_copy(
        update={"modules": "cuda/12 nccl", "setup": 'echo "then $LOADED"'}
    )
    done.run(listed("COMPLETED"))
    folder = done.fake / "profile.d"
    folder.mkdir()
    (folder / "a.sh").write_text('[ "$UNSET_IN_A_JOB" ] && true\necho noise\n')
    (folder / "lmod.sh").write_text('module() { LOADED="$*"; test "$2" = cuda/12; }\n')
    script = (done.fake / "script.sh").read_text()
    setup = script[script.index("# setup") : script.index("# command")]
    setup = before + setup.partition("\n")[2].replace("/etc/profile.d", str(folder))
    ran = subprocess.run(["bash", "-c", setup], env={}, capture_output=True, text=True)
    assert (ran.stdout, ran.returncode) == ("then load cuda/12 nccl\n", 0)


def recorded(scripted: Scripted) -> JobRecord:
    """Job 7, recorded as running and known to squeue by its name."""
    folder, name = Jobs(scripted.train).new()
    (scripted.fake / "name").write_text(name)
    return JobRecord.of(scripted.machine, folder, "7", name).write_state("RUNNING")


def test_a_job_for_another_machine_is_followed_with_a_warning(done: Scripted) -> None:
    recorded(done)
    done.machine = done.machine.model_copy(update={"nodes": "4", "slurm_partition": "gpu"})
    assert (
        "warning: the job was submitted for another machine than the profile's (slurm_partition none -> gpu, "
        "nodes 1 -> 4); to change it, interrupt, which saves and cancels the job, and run the same command again\n"
    ) in done.run(listed("COMPLETED"), before=[listed("RUNNING")] * 2)


def test_a_cancelled_job_may_save_during_an_outage(
    scripted: Scripted,
) -> None:
    (scripted.fake / "name").write_text("a")
    scripted.answers(squeue=[[1, "", "slurm_load_jobs error"], listed("COMPLETED")], scancel=[NONE])
    save_job(queue_module.QueuedJob("7", JobState("RUNNING"), "a"), 60)
    assert scripted.calls("scancel") == ["scancel --name=a --signal=USR2 7"]


def test_a_second_interrupt_ends_the_wait_for_a_save(scripted: Scripted) -> None:
    # each look at the running job meets an interrupt; only the second signal to the job ends it
    ended = "if (folder / 'ended').exists():\n    out = out.replace('RUNNING', 'CANCELLED')\n"
    interrupt = f"elif 'RUNNING' in out:\n    os.kill(os.getppid(), {int(signal.SIGINT)})"
    scripted.hook("squeue", ended + interrupt)
    scripted.hook("scancel", "if 'USR2' not in ' '.join(sys.argv):\n    (folder / 'ended').touch()")
    began = time.monotonic()
    with pytest.raises(Stopped, match=r"^cancelled job 7; saved at step 0; run the same command"):
        scripted.run(listed("RUNNING"), scancel=[NONE])
    assert time.monotonic() - began < scripted.machine.save_within_s / 2
    name = (scripted.fake / "name").read_text()
    assert scripted.calls("scancel") == [
        f"scancel --name={name} --signal=USR2 7",
        f"scancel --name={name} 7",
    ]


def test_a_terminated_launcher_leaves_its_job(scripted: Scripted) -> None:
    terminate = f"if 'RUNNING' in out:\n    os.kill(os.getppid(), {int(signal.SIGTERM)})"
    scripted.hook("squeue", terminate)
    with pytest.raises(
        Stopped, match=r"^job 7 goes on without this process; .* `scancel 7` to end it"
    ):
        scripted.run(listed("RUNNING"), scancel=[NONE])
    assert scripted.calls("scancel") == []


def test_a_new_launcher_may_start_once_a_job_is_unknown(scripted: Scripted) -> None:
    record = recorded(scripted)
    scripted.machine = scripted.machine.model_copy(update={"launcher": "local"})
    launcher = scripted.launcher()
    scripted.answers(squeue=[NONE, NONE, listed("RUNNING")])
    assert launcher.living() == record
    assert not launcher.is_gone(record)
    scripted.answers(squeue=[NONE])
    time.sleep(4 * scripted.machine.poll_s)  # an answer is good for so long
    assert launcher.is_gone(record)
    assert launcher.living() is None


@pytest.mark.parametrize("first", [[], [NONE, NONE]], ids=["listed", "not listed at first"])
def test_the_allocation_of_a_killed_launcher_is_left_alone(
    scripted: Scripted, first: list[Answer]
) -> None:
    name = recorded(scripted).name  # as launcher allocation leaves it
    salloc = [0, "7|RUNNING|None|node1|10:00|interactive\n", ""]
    ended = [0, f"{salloc[1]}8|COMPLETED|None|node1|10:00|{{name}}\n", ""]
    scripted.states = ["running", "done"] if first else ["done"]
    printed = scripted.run(
        salloc, salloc, salloc, ended, salloc, before=first, sbatch=[submitted(8)], scancel=[NONE]
    )
    assert "job 7: RUNNING" not in printed
    assert len(scripted.calls("sbatch")) == 1
    job = queue_module.QueuedJob("7", JobState("RUNNING"), name)
    left = JobFollower(job, queue_module.Queue(0), Tail(scripted.first / "log"))
    left.cancel()  # such as by Ctrl-C just then
    assert scripted.calls("scancel") == [f"scancel --name={name} 7"]
    assert [record.job_id for record in Jobs(scripted.train).all() if record.ended_at is None] == []


@pytest.mark.parametrize("all_results", [False, True])
def test_a_deleted_folder_cancels_its_job(
    scripted: Scripted, monkeypatch: MonkeyPatch, all_results: bool
) -> None:
    monkeypatch.setattr("cellmill.runs.lock.SURE_S", 0.3)
    monkeypatch.setattr("cellmill.launch.follow.TICK_S", 0.05)
    folder = scripted.train.parents[1] if all_results else scripted.train.parent
    delete = f"import shutil\nif 'RUNNING' in out:\n    shutil.rmtree({str(folder)!r}, ignore_errors=True)"
    scripted.hook("squeue", delete)
    (scripted.train / "lock").touch()
    seen = [
        listed("PENDING", "Priority"),
        *[listed("RUNNING")] * 4,
        *[listed("PENDING")] * 30,
        listed("CANCELLED"),
    ]
    deleted = f"{scripted.train}: the run's folder was deleted; job 7, which can save nothing, was cancelled"
    assert scripted.refused(*seen, scancel=[NONE]) == deleted
    assert scripted.calls("scancel") == [f"scancel --name={(scripted.fake / 'name').read_text()} 7"]
    assert not folder.exists()
    assert len(scripted.calls("sbatch")) == 1


def test_an_unmounted_file_system_is_not_a_deleted_folder(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("cellmill.runs.lock.SURE_S", 0)
    train = tmp_path / "mounted" / "results" / "runs" / "a" / "train"
    train.mkdir(parents=True)
    (train / "lock").touch()
    watch = FolderWatch(train)
    (tmp_path / "mounted" / "results").rename(tmp_path / "away")
    stat_of = Path.stat

    def stat_below(path: Path, **options: bool) -> os.stat_result:
        """As if the folders that are left belonged to the file system below the one that is away."""
        fields = [*stat_of(path, **options)]
        fields[stat.ST_DEV] = -1
        return os.stat_result(fields)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", stat_below)
        watch.check()
    with pytest.raises(UserError, match=r"train: the run's folder was deleted$"):
        watch.check()
    (tmp_path / "away").rename(tmp_path / "mounted" / "results")
    watch.wait()


@pytest.mark.parametrize(
    ("nonsense", "shown"),
    [
        (
            [1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"],
            "squeue: slurm_load",
        ),
        ([0, "<html>504 Gateway Time-out</html>\n", ""], "squeue answered '<html>504"),
        ([0, "7|FLYING|None|node1||{name}\n", ""], "squeue gives job 7 an unknown state: FLYING"),
        ([{"sleep": 60}, "", ""], "squeue: no answer within 5 s"),
    ],
)
def test_an_unusable_answer_is_never_the_end_of_a_job(
    done: Scripted, monkeypatch: MonkeyPatch, nonsense: Answer, shown: str
) -> None:
    monkeypatch.setattr("cellmill.runs.slurm.ANSWER_WITHIN_S", 5)
    early = not isinstance(nonsense[0], dict) and "{name}" not in nonsense[1]
    before = [nonsense, NONE, NONE] if early else [NONE, NONE]
    printed = done.run(
        listed("RUNNING"), nonsense, nonsense, listed("RUNNING"), listed("COMPLETED"), before=before
    )
    assert f"warning: no usable answer from squeue ({shown}" in printed
    assert "squeue answers again\n" in printed
    assert len(done.calls("sbatch")) == 1


def test_a_night_without_the_controller_ends_no_training(
    scripted: Scripted, monkeypatch: MonkeyPatch
) -> None:
    hours = iter([0, 1, 13, 26])
    monkeypatch.setattr(
        "cellmill.launch.follow.time", SimpleNamespace(monotonic=lambda: 3600.0 * next(hours))
    )
    job = queue_module.QueuedJob("7", JobState("RUNNING"), "a")
    follower = JobFollower(job, queue_module.Queue(1.0), Tail(scripted.fake / "log"))
    for _ in range(2):
        follower._wait_for_answer("no answer")
    with pytest.raises(
        Stopped, match="job 7 may still run: run the same command to follow it again"
    ):
        follower._wait_for_answer("no answer")


def test_sbatch_is_retried_unless_the_job_exists(done: Scripted) -> None:
    lost = [
        1,
        "",
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n",
    ]
    running = listed("RUNNING")
    printed = done.run(
        running,
        running,
        listed("COMPLETED"),
        before=[NONE] * 3,
        sbatch=[lost, [0, "what?\n", ""], submitted()],
    )
    assert len(done.calls("sbatch")) == 2, "the second answer was lost, the job was not"
    assert "Socket timed out on send/recv operation; trying again\n" in printed
    assert "job 7 was submitted but not recorded: adopted by its name\n" in printed
    adopted = done.train / "jobs" / "002"
    assert [path.name for path in adopted.glob("*.pkl")] == ["7_submitted.pkl"], (
        "as submitit looks for it on the node"
    )


def test_the_answer_of_sbatch_is_found_among_wrapper_output(done: Scripted) -> None:
    said = "note: job 50 of yours is still held\nSubmitted batch job 7\nSubmitted batch job limit: 500 left\n"
    done.run(listed("COMPLETED"), sbatch=[[0, said, ""]])
    assert json.loads((done.first / "job.json").read_text())["job_id"] == "7"


@pytest.mark.parametrize(
    ("alive", "gone_s"), [(True, 0), (False, 60)], ids=["it renews its claim", "requeued"]
)
def test_a_live_job_is_not_replaced_if_the_queue_forgets_it(
    done: Scripted, monkeypatch: MonkeyPatch, alive: bool, gone_s: float
) -> None:
    own = claim(done.train, "7")
    if not alive:
        own.release()  # by its first start: a requeued job waits without a claim
    monkeypatch.setattr("cellmill.launch.follow.GONE_S", gone_s)
    waits = listed("PENDING", "BeginTime")
    assert "NOT_LISTED" not in done.run(
        waits, *[NONE] * 6, waits, listed("RUNNING"), *[NONE] * 6, listed("COMPLETED")
    )
    assert len(done.calls("sbatch")) == 1


def test_the_batch_script_requests_the_machine_of_the_profile(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Capsys
) -> None:
    machine = {
        "nodes": "2-4", "nproc_per_node": 8, "gpus_per_node": "h100:8", "runtime": 90, "mem_mb": 0,
        "slurm_partition": "gpu,gpu-long", "slurm_account": "lab_7", "qos": "high", "constraint": "nvlink&ib",
        "reservation": "workshop", "modules": "cuda/12.4 nccl", "srun_options": "mpi=none overcommit",
        "setup": "source 'my env/bin/activate' && ulimit -n 4096", "sbatch_options": "exclude=node7 exclusive",
        "save_within_s": 300,
    }  # fmt: skip
    scripted = Scripted(tmp_path / "it's a folder", monkeypatch, capsys, **machine)
    scripted.states = ["done"]
    scripted.run(listed("COMPLETED"))
    folder = str(scripted.first).replace("'", "'\"'\"'")
    script = (scripted.fake / "script.sh").read_text()
    name = (scripted.fake / "name").read_text()
    assert re.fullmatch(r"a\.[0-9a-f]{12}\.001", name)
    python = re.search(r"(\S+) -u -m submitit", script)
    assert python
    FIND = "\n".join(FIND_MODULE)
    assert (
        script
        == f"""#!/bin/bash

# Parameters
#SBATCH --account=lab_7
#SBATCH --constraint='nvlink&ib'
#SBATCH --cpus-per-task=16
#SBATCH --exclude=node7
#SBATCH --exclusive
#SBATCH --gpus-per-node=h100:8
#SBATCH --job-name={name}
#SBATCH --mem=0
#SBATCH --nodes=2-4
#SBATCH --open-mode=append
#SBATCH --output='{folder}/%j_0_log.out'
#SBATCH --partition=gpu,gpu-long
#SBATCH --qos=high
#SBATCH --requeue
#SBATCH --reservation=workshop
#SBATCH --signal=USR2@300
#SBATCH --time=90

# setup
unset {UNSET}
{FIND}
{{ module load cuda/12.4 nccl
}} || {{ echo 'cellmill: `module load cuda/12.4 nccl` failed on' "$SLURMD_NODENAME$no_module; change modules in \
the profile"; exit 1; }}
{{ source 'my env/bin/activate' && ulimit -n 4096
}} || {{ echo 'cellmill: `source '"'"'my env/bin/activate'"'"' && ulimit -n 4096` failed on' "$SLURMD_NODENAME; change \
setup in the profile"; exit 1; }}

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output '{folder}/%j_%t_log.out' --ntasks-per-node=1 --cpus-per-task=16 --kill-on-bad-exit=1 \
--mpi=none --overcommit {python[1]} -u -m submitit.core._submit '{folder}'
"""
    )
    for path in (scripted.train / "jobs", scripted.first):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_submitit_names_files_as_the_launcher_expects(
    done: Scripted,
) -> None:
    """Private parts of submitit, for which its version is bounded: the pickle's name before
    sbatch's answer, and the first line of the log.
    """
    done.hook(
        "sbatch",
        f"print(*os.listdir({str(done.first)!r}), file=open({str(done.fake / 'seen')!r}, 'w'))",
    )
    done.run(listed("COMPLETED"))
    assert re.search(r"(^| )[0-9a-f]{32}\.pkl( |$)", (done.fake / "seen").read_text().strip())
    task = json.loads((done.first / "task.json").read_text())
    task["job"] |= {"module": "this", "arguments": []}
    (done.first / "task.json").write_text(json.dumps(task))
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS": "1",
    }
    slurm |= {"SLURM_STEP_NODELIST": "127.0.0.1", "SUBMITIT_EXECUTOR": "slurm"}
    # as srun in the job's script
    words = [sys.executable, "-m", "submitit.core._submit", str(done.first)]
    ended = subprocess.run(words, env=os.environ | slurm, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Beautiful is better than ugly." in ended.stdout
    assert BEGINS in (ended.stdout + ended.stderr).splitlines()[0]
    assert json.loads((done.first / "attempt-000.json").read_text())["exit_code"] == 0


def test_a_launcher_that_cannot_submit_gives_the_reason(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Capsys
) -> None:
    scripted = Scripted(tmp_path / "100%jobs", monkeypatch, capsys)
    assert scripted.refused().endswith(
        r"SLURM interprets % and \ in the path of a log; use a folder without them"
    )
    monkeypatch.setenv("PATH", "/nowhere")
    line = "sbatch is not on PATH: run this on a login node of the cluster, or set launcher"
    assert scripted.refused().startswith(line)


@pytest.mark.parametrize(
    "answer", [listed("RUNNING"), [1, "", "slurm_load_jobs error: Unable to contact slurm"]]
)
def test_squeue_is_called_once_per_poll_interval(scripted: Scripted, answer: Answer) -> None:
    scripted.answers(squeue=[answer])
    (scripted.fake / "name").write_text("cellmill-a-0.001")
    queue = queue_module.Queue(poll_s=60)
    job = queue_module.QueuedJob("7", JobState(""), "cellmill-a-0.001")
    state = "UNKNOWN" if answer[0] else "RUNNING"
    assert {queue.state(job).name for _ in range(50)} == {state}
    assert len(scripted.calls("squeue")) == 1


def test_a_task_that_cannot_be_launched_ends_the_job(
    scripted: Scripted,
) -> None:
    failed = "srun: error: task 1 launch failed: Slurmd could not connect IO"
    leaving(
        scripted,
        "7_0_log.out",
        f"submitit INFO - Starting with JobEnvironment(job_id=7)\n{failed}\n",
    )
    scripted.states = ["running", "done"]
    scripted.steps = [0, 5]
    running = listed("RUNNING")
    ended = listed("COMPLETED", job=8)
    printed = scripted.run(
        running,
        running,
        listed("CANCELLED"),
        NONE,
        ended,
        sbatch=[submitted(), submitted(8)],
        scancel=[NONE],
    )
    assert f"{failed}: the other tasks would wait for it" in printed
    assert len(scripted.calls("scancel")) == 1
    assert "job 7 ended with LAUNCH_FAILED; going on from step 5 with another job\n" in printed


def test_a_job_follows_one_whose_node_does_not_answer(
    scripted: Scripted, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("cellmill.launch.follow.CANCEL_S", 0.3)
    monkeypatch.setattr("cellmill.launch.follow.TICK_S", 0.05)
    failed = "srun: error: task 1 launch failed: Slurmd could not connect IO"
    log = f"submitit INFO - Starting with JobEnvironment(job_id=7)\n{failed}\n"
    leaving(scripted, "7_0_log.out", log)
    # the first job completes for minutes
    scripted.hook(
        "squeue",
        "if 'scancel' in (folder / 'calls').read_text():\n"
        "    out = '7|COMPLETING|None|node1||' + names_so_far[0] + '\\n'\n"
        "if len(names_so_far) == 2:\n"
        "    out += '8|COMPLETED|None|node2||' + names_so_far[1] + '\\n'",
    )
    scripted.states = ["running", "done"]
    sbatch = [submitted(), submitted(8)]
    printed = scripted.run(listed("RUNNING"), sbatch=sbatch, scancel=[NONE])
    assert "job 7 ended with LAUNCH_FAILED; going on from step 0 with another job\n" in printed
    assert [record.state for record in Jobs(scripted.train).all()] == ["LAUNCH_FAILED", "COMPLETED"]


def test_meaningless_lines_stay_in_the_log(tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "log").write_text(
        "submitit INFO (2026-01-01 10:00:00,001) - Starting with JobEnvironment(job_id=7)\nstep 1/10\n"
        "submitit WARNING (…) - Bypassing signal SIGCONT\nsrun: error: node2: task 1: Out Of Memory\n"
        "torchrun ended with exit code 1\ntorchrun ended with exit code -9\n"
        "srun: error: node1: task 0: Exited with exit code 1\nsrun: error: node2: task 1: Terminated\n"
        "srun: launch/slurm: _step_signal: Terminating StepId=41.0\nsrun: Force Terminated StepId=41.0\nstep 2"
    )
    Tail(tmp_path / "log").read()
    kept = "srun: error: node2: task 1: Out Of Memory\ntorchrun ended with exit code -9\nstep 2"
    assert capsys.readouterr().out == f"step 1/10\n{kept}"


def test_a_failed_launch_is_forgotten_when_the_job_is_requeued(tmp_path: Path) -> None:
    begins = "submitit INFO - Starting with JobEnvironment(job_id=7)\n"
    failed = "srun: error: task 1 launch failed: Slurmd could not connect IO\n"
    log = tmp_path / "log"
    log.write_text(begins + failed + begins + "step 1/10\n")
    tail = Tail(log)
    tail.read()
    assert tail.not_launched is None
    with open(log, "a") as file:
        file.write(failed)
    tail.read()
    assert tail.not_launched[3] == "Slurmd could not connect IO"
    (tmp_path / "early").write_text(failed + begins)  # of one start: srun may write first
    early = Tail(tmp_path / "early")
    early.read()
    assert early.not_launched is not None


def noting(file: Path) -> str:
    """Python code that writes its environment to `file`."""
    return f"open({str(file)!r}, 'a').write(str(dict(os.environ)))"


def test_slurm_filters_in_the_environment_hide_no_job(
    scripted: Scripted, monkeypatch: MonkeyPatch
) -> None:
    for name in ("SQUEUE_PARTITION", "SQUEUE_NAMES", "SCANCEL_STATE", "SACCT_FORMAT"):
        monkeypatch.setenv(name, "other")
    monkeypatch.setenv("LOGNAME", "somebody")
    seen = scripted.fake / "seen"
    for program in ("squeue", "scancel"):
        scripted.hook(program, noting(seen))
    (scripted.fake / "name").write_text("a")
    scripted.answers(squeue=[listed("RUNNING")], scancel=[NONE])
    queue = queue_module.Queue(poll_s=1)
    job = queue_module.QueuedJob("7", JobState(""), "a")
    assert queue.state(job).name == "RUNNING"
    queue.cancel(job)
    assert not re.search("SQUEUE_|SCANCEL_|SACCT_", seen.read_text())
    assert scripted.calls("squeue") == [
        f"squeue -a -h -t all -u {os.getuid()} -o %i|%T|%r|%N|%l|%j"
    ]


def test_arrays_in_the_queue_are_ignored() -> None:
    answer = (
        "1_3|RUNNING|None|n|UNLIMITED|a\n4+0|RUNNING|None|n||b\n"
        "5|FLYING|None|n||c\n6|RUNNING|None|n|1-00:00:00|odd | name\nof two lines\n"
    )
    answer = f"loading modules\n\nCLUSTER: blue\n{answer}"
    found = queue_module.parse(answer)
    assert [(line.job_id, line.state.name, line.name) for line in found] == [
        ("5", "UNKNOWN", "c"),
        ("6", "RUNNING", "odd | name"),
    ]


def test_sbatch_options_in_the_environment_are_respected(
    scripted: Scripted, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for name in (
        "SBATCH_EXCLUSIVE",
        "SBATCH_TIMELIMIT",
        "SBATCH_SIGNAL",
        "SBATCH_ACCOUNT",
        "SBATCH_ARRAY_INX",
    ):
        monkeypatch.setenv(name, "mine")
    for name in (
        "SLURM_NTASKS",
        "SLURM_NNODES",
        "SLURM_DISTRIBUTION",
        "SLURM_CONF",
        "SLURM_CLUSTERS",
    ):
        monkeypatch.setenv(name, "mine")
    machine = Machine(launcher="slurm", runtime=90)
    with submitting(machine):
        assert {name for name in os.environ if name.startswith("SBATCH_")} == {
            "SBATCH_EXCLUSIVE",
            "SBATCH_ACCOUNT",
        }
        kept = {name for name in os.environ if name.startswith("SLURM_")}
        assert kept == {"SLURM_CONF", "SLURM_CLUSTERS"}, "srun in the job would read the others"
    with submitting(machine.model_copy(update={"slurm_account": "lab"})):
        assert "SBATCH_ACCOUNT" not in os.environ
    monkeypatch.setenv("SLURM_JOB_ID", "99")
    with submitting(machine):
        assert not any(name.startswith("SBATCH_") for name in os.environ)
    assert os.environ["SBATCH_TIMELIMIT"] == "mine"


def ended(folder: Path, elapsed_s: float) -> JobRecord:
    """A job of 10 min that ran so long."""
    folder.mkdir()
    attempt = {"started_at": 1000.0, "seen_at": 1001.0, "ended_at": 1000.0 + elapsed_s}
    (folder / "attempt-000.json").write_text(json.dumps(attempt))
    return JobRecord.of(Machine(launcher="slurm", runtime=10, save_within_s=60), folder, "7", "one")


def test_jobs_at_their_limit_that_mostly_started_are_named_once(tmp_path: Path) -> None:
    trained = [0.0]
    short = ShortJobs(lambda: trained[-1])

    def line(elapsed_s: float, training_s: float, steps: int, was_to_save: bool = False) -> str:
        trained.append(trained[-1] + training_s)
        return short.line(ended(tmp_path / str(len(trained)), elapsed_s), steps, was_to_save)

    assert [line(540, training_s, 9) for training_s in (400, 54, 400)] == [""] * 3, "they train"
    assert line(540, 54, 3) == ""
    assert line(100, 10, 1) == "", "preempted: it did not reach its limit"
    assert line(540, 54, 3) == ""
    assert line(540, 162, 9) == (
        "warning: the last 2 jobs spent 80% of their time on starting and saving, and made 3 and 9 steps: raise "
        "runtime (10 min) in the profile"
    )
    assert line(540, 54, 3) == ""
    preempted = ended(tmp_path / "preempted", 33)
    preempted = preempted.write_state("TIMEOUT", ended=True)
    trained.append(trained[-1])
    assert short.line(preempted, 0, was_to_save=True) == "", (
        "SLURM says TIMEOUT of a job that ended in its grace time"
    )
    lowered = dataclasses.replace(ended(tmp_path / "lowered", 290), limit_s=360.0)
    trained.append(trained[-1])
    assert short.line(lowered, 0, was_to_save=True) == "", "a maintenance was to begin"
    # a limit that cut off the start-up, which SLURM announced
    assert line(100, 0, 0, was_to_save=True) == "", "it was preempted"
    assert line(500, 0, 3, was_to_save=True) == line(500, 4, 0, was_to_save=True) == "", (
        "it made steps"
    )
    with pytest.raises(UserError) as error:
        line(500, 0, 0, was_to_save=True)
    assert str(error.value).startswith(
        "start-up took 500 s of the limit's 600 s, and no step was made: raise runtime to at least 18 (min) in the "
        "profile (job 7, log: "
    )
    short = ShortJobs(lambda: None)
    jobs = [ended(tmp_path / f"unknown{number}", 540) for number in range(3)]
    assert [short.line(job, 0, was_to_save=False) for job in jobs] == [""] * 3, (
        "nothing is known of the curve"
    )


@pytest.mark.parametrize("others", ["FAILED|mine\n", "FAILED|mine\n{}", "{}FAILED|allocation\n"])
def test_accounting_of_a_reused_job_id_is_told_by_name(scripted: Scripted, others: str) -> None:
    own = "CANCELLED by 7|a.0123456789ab.001\n"
    scripted.answers(squeue=[NONE], sacct=[[0, others.format(own), ""]])
    job = queue_module.QueuedJob("7", JobState("RUNNING"), "a.0123456789ab.001")
    state = queue_module.Queue(1.0).state(job)
    assert state.name == ("CANCELLED" if "{}" in others else "NOT_LISTED")
