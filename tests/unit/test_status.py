"""The table of runs, without SLURM and with damaged files; and the stages that wait in SLURM's
queue.
"""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cellmill.cli import main
from cellmill.launch.queue import QueuedJob, explained
from cellmill.launch.stage_jobs import StageWatch, reasons_of_failed, stage_lines
from cellmill.runs.jobs import JobRecord, Jobs
from cellmill.runs.lock import claim, user_name
from cellmill.runs.slurm import JobState

Hold = Callable[..., subprocess.Popen[str]]
Cli = Callable[..., tuple[int, str, str]]
HOLD = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from cellmill.runs.folder import TrainFolder
with TrainFolder(Path(sys.argv[1])).locked(follows=len(sys.argv) > 2):
    print("locked", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty results folder; PATH has only tmp_path/bin."""
    for name in ("bin", "results/runs"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "results"


@pytest.fixture
def hold() -> Iterator[Hold]:
    """A function that starts a process which holds the lock of a training folder, and ends with the
    test.
    """
    started: list[subprocess.Popen[str]] = []

    def start(train: Path, *follows: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(train), *follows], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout.readline() == "locked\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def cli(results: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    """A function that gives exit code, output and error of a command."""
    return lambda *words: (main([*words, "--results", str(results)]), *capsys.readouterr())


def command(results: Path, name: str, script: str) -> None:
    """Put a SLURM command with this shell script on PATH."""
    path = results.parent / "bin" / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def squeue(results: Path, *lines: str) -> None:
    text = "".join(f"{line}\n" for line in lines)
    command(results, "squeue", f"/bin/cat <<'END'\n{text}END")


def run_of(results: Path, name: str, **files: Any) -> Path:
    """The training folder of a run with these JSON files."""
    train = results / "runs" / name / "train"
    train.mkdir(parents=True)
    for file, value in files.items():
        (train / f"{file}.json").write_text(json.dumps(value))
    return train


def curve(train: Path, *lines: dict[str, Any], age_s: float = 105) -> None:
    path = train / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    os.utime(path, (time.time() - age_s, time.time() - age_s))


def job(train: Path, number: int = 1, **changes: Any) -> JobRecord:
    """A submission, with the name that is looked up in SLURM."""
    folder = train / "jobs" / f"{number:03}"
    folder.mkdir(parents=True, exist_ok=True)
    value: dict[str, Any] = {
        "path": folder,
        "job_id": str(40 + number),
        "name": Jobs(train).name(f"{number:03}"),
    }
    value |= {
        "submitted_at": time.time() - 300,
        "state": "PENDING",
        "slurm_partition": "gpu",
        "runtime": 60,
    }
    value |= {"nodes": "2", "nproc_per_node": 4, "gpus_per_node": 4, "cpus_per_node": 8}
    return JobRecord(**(value | changes)).write()


def checkpoint(train: Path, step: int) -> None:
    path = train / "checkpoints" / f"step-{step:08}"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text("{}")
    (path / "state.json").write_text(
        json.dumps({"steps": 600, "progress": {"step": step, "cells": 64 * step}})
    )


RUNNING = {"state": "running", "step": 100, "steps": 600, "cells": 6400}


def test_the_table_shows_the_state_of_each_run(results: Path, hold: Hold, cli: Cli) -> None:
    (results / "runs" / "a-new" / "train").mkdir(parents=True)
    done = run_of(
        results, "b-done", status={"state": "done"}, state=RUNNING | {"state": "done", "step": 600}
    )
    curve(done, {"step": 600, "loss": 0.51234}, age_s=7300)
    here = run_of(results, "c-here", state=RUNNING)
    curve(
        here,
        *({"step": s, "loss": 1 / s, "left_s": 3.0 * (480 - s)} for s in range(200, 241, 10)),
        {"step": 240},
    )
    checkpoint(here, 200)
    hold(here)
    killed = run_of(results, "d-killed", state=RUNNING)
    curve(killed, {"step": 130, "loss": 0.25, "cells_per_s": 32.0})
    broken = {"started_at": time.time() - 60, "ended_at": time.time(), "how": "FAILED"}
    run_of(results, "e-broken", local=[broken], state=RUNNING | {"step": 0})
    waiting = job(run_of(results, "f-waits"))
    on = run_of(results, "g-on", state=RUNNING)
    curve(on, {"step": 300, "loss": 0.125, "cells_per_s": 640.0, "left_s": 30.0})
    job(on, ended_at=1.0, state="TIMEOUT")
    second = job(on, 2, state="PENDING")
    failed = job(run_of(results, "h-failed"), job_id="77", ended_at=time.time(), state="FAILED")
    (failed.path / "error.txt").write_text("node1: out of memory")
    job(run_of(results, "i-cancelled"), job_id="78", ended_at=time.time(), state="CANCELLED")
    job(
        between := run_of(results, "j-between", state=RUNNING),
        state="TIMEOUT",
        ended_at=time.time(),
    )
    hold(between, "follows")  # a launcher that is about to submit the next job
    squeue(
        results,
        f"41|PENDING|PartitionTimeLimit|||{waiting.name}",
        f"42|RUNNING|None|node[1-2]|10:00|{second.name}",
        "43|RUNNING|None|node3|10:00|somebody's own",
    )
    assert "\n" + cli("status")[1] == TABLE
    lost = claim(failed.path.parents[1], "77")  # of its first start
    os.utime(lost.file, (time.time() - 9, time.time() - 9))
    (failed.path / "attempt-000.json").write_text(json.dumps({"hosts": ["node3"]}))
    assert "\n" + cli("status")[1] == TABLE, "the claim is older than the end of the job"
    os.utime(lost.file, (time.time() + 1, time.time() + 1))
    line = (
        "job 77 still trains on node3; `scancel 77` lets it save and end, unless SLURM has lost it: then end its "
        "processes there\n"
    )
    assert "h-failed     running " in (shown := cli("status")[1])
    assert shown.endswith(f"h-failed: {line}")
    code, _, error = cli("cancel", "h-failed")
    assert (code, error) == (2, f"cellmill cancel: {line}")


def test_without_an_answer_from_squeue_the_record_is_shown(results: Path, cli: Cli) -> None:
    job(run_of(results, "one"), state="RUNNING")
    head = "run  state    step  loss  job  slurm    left  saved  last line\n"
    row = "one  running     -     -  41   RUNNING     -      -          -\n"
    assert (
        cli("status")[1] == head + row + "squeue is not on PATH: jobs are shown as last recorded\n"
    )
    command(results, "squeue", "echo down >&2; exit 1")
    unknown = "no usable answer from squeue (squeue: down): jobs are shown as last recorded\n"
    assert cli("status")[1] == head + row + unknown
    command(results, "squeue", "echo '<html>503</html>'")
    assert "(squeue answered '<html>503</html>')" in cli("status")[1]


def test_the_state_of_a_job_that_ended_unfollowed_is_queried(results: Path, cli: Cli) -> None:
    record = job(run_of(results, "one", state=RUNNING), state="RUNNING")
    squeue(results, f"41|TIMEOUT|TimeLimit|||{record.name}")
    assert "one  stopped  100/600     -  41   TIMEOUT (TimeLimit)" in cli("status")[1]
    squeue(results)
    assert "one  stopped  100/600     -  41   NOT_LISTED" in cli("status")[1]
    command(results, "sacct", f"echo 'FAILED|{record.name}'")
    assert "one  failed  100/600     -  41   FAILED" in cli("status")[1]
    assert json.loads((record.path / "job.json").read_text())["state"] == "RUNNING", (
        "status changes no file"
    )


def test_a_job_that_was_not_recorded_is_found_by_its_name(results: Path, cli: Cli) -> None:
    train = run_of(results, "one")
    (train / "jobs" / "001").mkdir(parents=True)
    squeue(results, f"55|PENDING|Priority|||{Jobs(train).name('001')}")
    assert "one  queued     -     -  55   PENDING (Priority)" in cli("status")[1]


def test_an_allocation_that_outlives_its_training_is_not_running(
    results: Path, hold: Hold, cli: Cli
) -> None:
    train = run_of(results, "one", state=RUNNING)
    job(train, state="RUNNING")
    squeue(results, "41|RUNNING|None|node1|10:00|interactive")
    assert (
        "one  stopped  100/600     -  41   NOT_LISTED (the allocation goes on)" in cli("status")[1]
    )
    hold(train)
    assert "one  running  100/600     -  41   RUNNING" in cli("status")[1]


@pytest.mark.parametrize("recorded", [True, False])
def test_a_job_that_completes_for_long_is_cancelled_once(
    results: Path, hold: Hold, cli: Cli, monkeypatch: pytest.MonkeyPatch, recorded: bool
) -> None:
    monkeypatch.setattr("cellmill.launch.follow.CANCEL_S", 0)
    monkeypatch.setattr("cellmill.commands.run.LAUNCHER_S", 0)
    train = run_of(results, "one", state=RUNNING)
    completing = job(train, state="RUNNING")
    if not recorded:
        (completing.path / "job.json").unlink()
    hold(train, "follows")  # its launcher, which waits for the end of the job
    calls = results.parent / "calls"
    listed = f"41|COMPLETING|None|node1|10:00|{completing.name}"
    # without a bound of its own, cancel would go on for ever
    command(results, "scancel", f"echo scancel >> {calls}")
    command(
        results,
        "squeue",
        f'[ "$(/bin/cat {calls} 2> /dev/null | /usr/bin/wc -l)" -gt 3 ] || echo "{listed}"',
    )
    code, printed, _ = cli("cancel", "one")
    assert (code, printed) == (
        0,
        "cancelling job 41\ncancelled job 41; saved at step 0; train resumes from there\n",
    )


def test_a_launcher_that_ignores_sigint_is_ended(
    results: Path, hold: Hold, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cellmill.commands.run.SAVE_S", 5)
    command(results, "squeue", "exit 0")
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as of `snakemake &` in a script
    launcher = hold(run_of(results, "one"), "follows")
    signal.signal(signal.SIGINT, handler)
    code, printed, _ = cli("cancel", "one")
    assert code == 0
    assert f"ended process {launcher.pid}; saved at step 0" in printed


def test_one_damaged_run_hides_no_other(results: Path, cli: Cli) -> None:
    run_of(results, "bad")
    (results / "runs/bad/train/state.json").write_text('{"state": "run')
    run_of(results, "odd", state=[1])
    run_of(results, "old", local=[{"started_at": 1.0}])
    run_of(results, "well", state=RUNNING)
    printed = cli("status")[1].splitlines()
    states = [["bad", "?"], ["odd", "?"], ["old", "?"], ["well", "stopped"]]
    assert [line.split()[:2] for line in printed[1:5]] == states
    assert printed[5].startswith(f"bad: {results}/runs/bad/train/state.json: not valid JSON (")
    file = results / "runs/odd/train/state.json"
    assert (
        printed[6] == f"odd: {file}: not a run's state; start the run again: it rewrites the file"
    )
    assert (
        printed[7]
        == f"old: unexpected content in a file of {results}/runs/old/train (KeyError: 'how')"
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("..", "'..': no such run in {runs}; there are: one, two"),
        ("tow", "'tow': no such run in {runs}; did you mean 'two'?"),
        (
            "../one",
            "'../one': expected the name of a run, got a path in {runs}; did you mean 'one'?",
        ),
    ],
)
def test_an_unknown_run_is_answered_with_existing_names(
    results: Path, cli: Cli, name: str, message: str
) -> None:
    run_of(results, "one")
    run_of(results, "two")
    for stage in ("status", "attach", "cancel", "logs"):
        assert cli(stage, name) == (
            2,
            "",
            f"cellmill {stage}: {message.format(runs=results / 'runs')}\n",
        )


def test_a_wrong_results_folder_is_named(results: Path, cli: Cli) -> None:
    shutil.rmtree(results)
    line = f"{results}/runs: no such folder; set --results to the results folder of a workflow\n"
    for stage in (["status"], ["logs", "one"]):
        assert cli(*stage) == (2, "", f"cellmill {stage[0]}: {line}")
    (results.parent / "workflow").mkdir()  # before the first run a workflow has no such folder
    assert cli("status") == (0, f"{results}/runs: no run yet\n", "")
    unknown = f"cellmill logs: 'one': no such run in {results}/runs; no run yet\n"
    assert cli("logs", "one") == (2, "", unknown)


TABLE = """
run          state                step      loss  job  slurm                           left  saved  last line
a-new        not begun               -         -  -    -                                  -      -          -
b-done       done              600/600    0.5123  -    -                                  -      -  2.0 h ago
c-here       running           240/600  0.004167  -    -                             12 min    200  2 min ago
d-killed     stopped (killed)  130/600      0.25  -    -                                  -      -  2 min ago
e-broken     failed              0/600         -  -    -                                  -      -          -
f-waits      queued                  -         -  41   PENDING (PartitionTimeLimit)       -      -          -
g-on         running           300/600     0.125  42   RUNNING                         30 s      -  2 min ago
h-failed     failed                  -         -  77   FAILED                             -      -          -
i-cancelled  stopped                 -         -  78   CANCELLED                          -      -          -
j-between    queued            100/600         -  41   TIMEOUT                            -      -          -
f-waits: job 41: PENDING (PartitionTimeLimit): runtime 60 min is more than the partition allows: lower it in the profile
h-failed: job 77: node1: out of memory
"""


def test_status_names_the_stages_that_wait_or_run(results: Path, cli: Cli) -> None:
    here = results.parent
    elsewhere = results
    (here / ".snakemake").mkdir()
    run_of(results, "one")
    squeue(
        results,
        *(
            f"{number}|PENDING|PartitionTimeLimit|1:30:00|1|rule_embed_wildcards_one_sim|{here}"
            for number in (7, 8)
        ),
        f"9|PENDING|Priority|30:00|1|rule_vocabulary|{here}",
        f"10|RUNNING|None|30:00|1|rule_shard_wildcards_sim|{here}",
        f"11|PENDING|Priority|30:00|1|rule_shard_wildcards_sim|{elsewhere}",
        f"12|PENDING|Resources|30:00|2|(null)|{here}",
    )
    assert cli("status")[1].splitlines()[2:] == [
        "stage embed: 2 jobs (7, 8): PENDING (PartitionTimeLimit): limit 1:30:00 is more than the partition allows: "
        "lower it in the profile",
        "stage vocabulary: job 9: PENDING (Priority): jobs of higher priority come first",
        "stage shard: job 10: RUNNING",
    ]


def test_squeue_is_asked_once_a_minute_for_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    ended = threading.Event()
    queued = iter(["7", "7", "78", "78", "78"])

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 6:
            ended.set()
            threading.Event().wait()  # a daemon thread

    def jobs(folder: Path, states: str = "") -> list[QueuedJob]:
        if states:
            return []
        state = JobState("PENDING", "Priority")
        return [QueuedJob(job_id, state, "embed", "30:00", "1") for job_id in next(queued)]

    monkeypatch.setattr("cellmill.launch.stage_jobs.time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr("cellmill.launch.stage_jobs.stage_jobs", jobs)
    monkeypatch.setattr("shutil.which", lambda name: name)
    said: list[str] = []
    StageWatch(tmp_path, said.append).start()
    assert ended.wait(60)
    # a look soon after a job began to wait, to say why
    assert pauses == [15, 15, 60, 15, 60, 60]
    assert [line.partition(":")[0] for line in said] == ["stage embed"]


def test_a_reason_is_repeated_only_if_it_comes_back(tmp_path: Path) -> None:
    said: list[str] = []
    watch = StageWatch(tmp_path, said.append)

    def jobs(*waiting: tuple[str, str]) -> list[QueuedJob]:
        return [
            QueuedJob(job_id, JobState("PENDING", why), "embed", "30:00", "1")
            for job_id, why in waiting
        ]

    watch.look(jobs(("7", "Priority")))
    assert said == [], "a job that has just been submitted"
    watch.look(jobs(("7", "Priority"), ("8", "Priority")))
    priority = "PENDING (Priority): jobs of higher priority come first"
    assert said == [f"stage embed: job 7: {priority}"]
    watch.look(jobs(("7", "Priority"), ("8", "Priority")))
    watch.look(jobs(("7", "Priority"), ("8", "AssocGrpGRES")))
    assert [line.partition("):")[0] for line in said[1:]] == [
        "stage embed: job 8: PENDING (AssocGrpGRES"
    ]
    watch.look([])
    watch.look(jobs(("9", "Priority")))
    watch.look(jobs(("9", "Priority")))
    assert said[2:] == [f"stage embed: job 9: {priority}"]
    many = jobs(*((str(number), "Resources") for number in range(20, 29)))
    line = (
        "stage embed: 9 jobs (20, 21, 22, 23, 24, …): PENDING (Resources): it starts as "
        "soon as enough nodes are free"
    )
    assert stage_lines(many) == [line]


def test_a_preempted_job_that_stays_so_is_named_once(tmp_path: Path) -> None:
    said: list[str] = []
    watch = StageWatch(tmp_path, said.append)
    earlier, requeued, cancelled = (
        QueuedJob(job_id, JobState("PREEMPTED"), "embed", "30:00", "1") for job_id in "678"
    )
    watch.look_at_preempted([earlier])
    watch.look_at_preempted([earlier, requeued, cancelled])
    assert said == []
    for _ in range(2):
        watch.look_at_preempted([earlier, cancelled])
    assert said == [
        "stage embed: job 8: SLURM preempted it and does not requeue it, but Snakemake waits for it without end; press "
        "Ctrl-C, and run the same command again"
    ]


LIMIT = "a limit of yours, "
REQUEST = "a job may not request this: "
SPENT = "the time that was granted is used up: "


@pytest.mark.parametrize(
    ("reason", "begins"),
    [
        *((reason, LIMIT) for reason in (
            "QOSMaxJobsPerUserLimit", "QOSMaxGRESPerUser", "QOSMaxCpuPerUserLimit", "QOSGrpNodeLimit", "QOSJobLimit",
            "AssocMaxJobsLimit", "AssocGrpGRES", "AssocGrpCpuLimit", "MaxGRESPerAccount", "AssociationJobLimit",
        )),
        *((reason, REQUEST) for reason in ("QOSMaxGRESPerJob", "AssocMaxNodePerJobLimit", "QOSMinGRES")),
        *((reason, SPENT) for reason in ("AssocGrpCPUMinutesLimit", "QOSGrpGRESMinutes")),
        ("QOSMaxWallDurationPerJobLimit", "runtime 5 min is more than the QOS allows"),
        ("ReqNodeNotAvail, UnavailableNodes:n1", "its nodes are down or reserved: `sinfo -R` says why; "
         "with another slurm_partition or less runtime it may start sooner"),
        ("Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
         "its nodes are down or reserved: `sinfo -R` says why; with another slurm_partition or less runtime it may "
         "start sooner"),
        ("PartitionInactive", "its partition is not open"),
        ("AccountNotAllowed", "the partition refuses it"),
    ],
)  # fmt: skip
def test_every_reason_why_a_job_waits_has_a_sentence(reason: str, begins: str) -> None:
    line = explained(JobState("PENDING", reason), runtime="runtime 5 min", nodes="2", job_id="7")
    assert line.startswith(f"PENDING ({reason}): {begins}")


SNAKEFILE = """
from cellmill.launch.stage_jobs import reasons_of_failed

rule all:
    input: "a.txt", "b.txt"

rule a:
    output: "a.txt"
    log: "logs/a b.log"
    shell: "(echo cellmill train: first; echo 'cellmill train: why'; echo x; exit 2) 2>&1 | tee {log:q}"

rule b:
    output: "b.txt"
    shell: "touch {output}"

onerror:
    print(*reasons_of_failed(log), sep="\\n", file=sys.stderr)
"""


def test_the_reason_of_a_failed_job_follows_snakemake_output(tmp_path: Path) -> None:
    (tmp_path / "Snakefile").write_text(f"import sys\n{SNAKEFILE}")
    words = [sys.executable, "-m", "snakemake", "--cores", "1"]
    done = subprocess.run(
        words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = done.stdout.splitlines()
    below = lines[
        max(number for number, line in enumerate(lines) if "CalledProcessError" in line) :
    ]
    assert [line for line in below if line.startswith("cellmill ")] == ["cellmill train: why"]
    assert lines[-1] == "At least one job did not complete successfully."


def test_the_reason_of_a_failed_job_comes_from_its_log(
    tmp_path: Path,
) -> None:
    stage = tmp_path / "a.log"
    slurm = tmp_path / "8.log"
    (tmp_path / "log").write_text(
        2 * f"Error in rule embed:\n    log: {stage}, {slurm} (check log file(s) for …)\n"
    )
    slurm.write_text("slurm_script: 4: python: not found\n\n")
    assert reasons_of_failed(str(tmp_path / "log")) == [
        f"{slurm}: slurm_script: 4: python: not found"
    ]
    stage.write_text("cellmill embed: no cells\nbye\n")
    assert reasons_of_failed([str(tmp_path / "log")]) == ["cellmill embed: no cells"]


def test_an_older_snakemake_refusal_is_not_a_failure(
    tmp_path: Path,
) -> None:
    (stage := tmp_path / "a.log").write_text("cellmill embed: of an earlier run\n")
    ending = f"    jobid: 4\n    log: {stage} (check log file(s) for error details)\n"
    refused = f"Error in rule embed:\n    message: SLURM sbatch failed. The error message was 'no QOS'.\n{ending}"
    (tmp_path / "log").write_text(f"{refused}Error in rule embed:\n    message: None\n{ending}")
    [line] = reasons_of_failed(str(tmp_path / "log"))
    assert line.startswith("cellmill: stage embed: sbatch refused the job: no QOS; ")


def test_a_refused_array_of_jobs_is_quoted_for_its_stage(tmp_path: Path) -> None:
    refused = (
        "SLURM sbatch failed for array job submission (tasks 1-2). The error message was '{}'.\n"
    )
    error = (
        "Error in rule {}:\n    message: Part of failed array sbatch submission (tasks 1-2); see log for details.\n"
        "    jobid: {}\n"
    )
    blocks = [
        refused.format("sbatch: error: no QOS"),
        *(error.format("embed", job) for job in (4, 5)),
        refused.format("no account"),
        error.format("evaluate", 6),
    ]
    (tmp_path / "log").write_text("".join(blocks))
    lines = reasons_of_failed(str(tmp_path / "log"))
    assert [line.partition("; ")[0] for line in lines] == [
        "cellmill: stage embed: sbatch refused the job: no QOS",
        "cellmill: stage evaluate: sbatch refused the job: no account",
    ]


def test_the_log_of_a_job_of_an_array_is_found(tmp_path: Path) -> None:
    told = tmp_path / "rule_embed" / "tiny" / "9_1.log"
    told.parent.mkdir(parents=True)
    real = tmp_path / "rule_embed" / "9_1.log"
    real.write_text("slurm_script: 4: python: not found\n")
    stage = tmp_path / "a.log"
    (tmp_path / "log").write_text(
        f"Error in rule embed:\n    log: {stage}, {told} (check log file(s) for …)\n"
    )
    assert reasons_of_failed(str(tmp_path / "log")) == [
        f"{real}: slurm_script: 4: python: not found"
    ]


def test_running_stages_report_their_progress(results: Path, cli: Cli) -> None:
    line = "preprocess kang: 14,000 of 20,000 cells (70%), 400 cells/s, 15 s left"
    logs = {
        "preprocess/c.kang.log": f"a warning\n{line}\n".encode(),
        "preprocess/c.done.log": f"{line}\nkang: 20,000 of 20,000 cells, 9 of 9 genes -> kang.h5ad\n".encode(),
        "shard/damaged.log": b"\xff\xfe shard: 1 of",
        "shard/empty.log": b"",
        "embed/killed.log": line.encode(),
    }
    for name, content in logs.items():
        (path := results.parent / "logs" / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    os.utime(results.parent / "logs/embed/killed.log", (time.time() - 600, time.time() - 600))
    os.utime(results.parent / "logs/preprocess/c.kang.log", (time.time() - 20, time.time() - 20))
    head, stages = cli("status")[1].splitlines()
    assert head == f"{results / 'runs'}: no run yet"
    assert re.fullmatch(rf"{re.escape(line)} \(2\d s ago\)", stages)


@pytest.mark.parametrize("command", [["status"], ["watch", "one"], ["logs", "one"]])
def test_a_failed_run_says_why(results: Path, cli: Cli, command: list[str]) -> None:
    record = job(run_of(results, "one"), state="FAILED", ended_at=time.time())
    record.log.write_text("step 1\n")
    (record.path / "error.txt").write_text("rank 1 on node2: ValueError: no")
    assert "rank 1 on node2: ValueError: no\n" in cli(*command)[1]


@pytest.mark.parametrize("stage", ["status", "attach", "cancel", "logs"])
def test_the_run_of_another_user_is_named_with_its_owner(
    results: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    train = run_of(results, "one", state=RUNNING)

    def no_entry(path: Path, *rest: Any, **options: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("cellmill.runs.lock.open", no_entry, raising=False)
    _, printed, error = cli(stage, "one")
    line = f"{train}: this run belongs to {user_name(os.getuid())}, who alone may read it\n"
    assert (printed + error).endswith(line)
