"""status, attach, logs and cancel beside a training on a real SLURM, with and without a launcher that follows it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.launched import Launched, on_slurm, run_options
from tests.cluster.rig import Rig
from tests.distributed.command import wait_for


def cellmill(rig: Rig, stage: str, results: Path) -> subprocess.Popen[str]:
    """The command for the run called one."""
    return subprocess.Popen(
        [sys.executable, "-m", "cellmill.cli", stage, "one", "--results", str(results)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | rig.environment,
    )


def printed(rig: Rig, stage: str, results: Path) -> str:
    return cellmill(rig, stage, results).communicate(timeout=500)[0]


@pytest.mark.full
def test_status_attach_logs_and_cancel_work_with_and_without_a_launcher(rig: Rig, corpus: str, tmp_path: Path) -> None:
    results = tmp_path / "results"
    train, opts = results / "runs" / "one" / "train", run_options(5000, checkpoint_every_steps=4)
    first = Launched.start(corpus, train, opts, rig.environment, **on_slurm(nproc_per_node=1))
    first.wait_for_step(6)
    (job_id,) = first.job_ids()
    attached = cellmill(rig, "attach", results)
    table = printed(rig, "status", results)
    assert re.search(
        rf"^one  running  +\d+/5000 +[\d.]+  {job_id} +RUNNING +\S+ (h|min|s) +\d+ +\d+ s ago$", table, re.M
    ), table
    first.process.kill()
    first.process.wait()
    assert "step 1/5000" in printed(rig, "logs", results)
    done = printed(rig, "cancel", results)
    expected = (
        f"cancelling job {job_id}\njob {job_id} may save for 30 s; interrupt again to end it at once\n"
        f"cancelled job {job_id}; saved at step \\d+; train resumes from there\n"
    )
    assert re.fullmatch(expected, done), done
    saved = int(re.findall(r"saved at step (\d+)", done)[0])
    assert saved >= 6
    followed = attached.communicate(timeout=500)[0]
    assert attached.returncode == 75
    begins = rf"following job {job_id}, its log: .*\njob {job_id}: RUNNING on node\[1-2\]\n"
    assert re.match(begins, followed), followed
    assert "step 1/5000" in followed
    assert followed.endswith(f"cellmill attach: job {job_id} ended with COMPLETED; saved at step {saved}\n")
    assert [record["state"] for record in first.records()] == ["COMPLETED"], "nobody else could record it"
    assert f"one  stopped  {saved}/5000" in printed(rig, "status", results)

    # the next one waits in the queue, and its launcher follows it
    again = Launched.start(
        corpus, train, opts, rig.environment, **on_slurm(nproc_per_node=1, sbatch_options="begin=now+300")
    )
    again.wait_for_print("PENDING (BeginTime)")
    table = printed(rig, "status", results)
    assert re.search(rf"^one  queued  +{saved}/5000 .* PENDING \(BeginTime\) ", table, re.M), table
    second = again.job_ids()[-1]
    assert f"cancelled job {second}; saved at step {saved}" in printed(rig, "cancel", results)
    assert again.end() == 75
    by_command = "cellmill train: job {} was cancelled by `cellmill cancel`; saved at step {}; run the same command"
    assert again.last_line.startswith(by_command.format(second, saved))
    wait_for(lambda: not rig.squeue())
    assert "one: no job is queued or running" in printed(rig, "attach", results)

    cost = json.loads((train / "cost.json").read_text())
    assert cost["source"] == "own files"
    ran, waited = cost["jobs"]
    assert (ran["gpus"], ran["processes"], ran["nodes"], ran["cpus"]) == (4, 2, 2, 8)
    assert (waited["state"], waited["elapsed_s"]) == ("CANCELLED", 0)
    assert 0.1 < cost["totals"]["training_efficiency_frac"] < 1
    assert re.search(
        r"^0.0\d+ GPU-hours in 2 jobs, waited \d+ s in the queue, \d+ % of it training$", again.printed, re.M
    )

    # a job that saved and ended on request is not followed by another
    third = Launched.start(corpus, train, opts, rig.environment, **on_slurm(nproc_per_node=1))
    third.wait_for_print(f"step {saved + 3}/5000")
    saved_by = re.findall(r"saved at step (\d+)", printed(rig, "cancel", results))[0]
    assert int(saved_by) >= saved + 3
    assert third.end() == 75
    assert third.last_line.startswith(by_command.format(third.job_ids()[-1], saved_by))
    assert rig.squeue() == []


@pytest.mark.full
def test_a_training_on_this_machine_is_cancelled_with_its_state_saved(rig: Rig, corpus: str, tmp_path: Path) -> None:
    results = tmp_path / "results"
    run = Launched.start(corpus, results / "runs" / "one" / "train", run_options(5000), {}, nproc_per_node=1)
    run.wait_for_step(3)
    assert "one  running  " in printed(rig, "status", results)
    done = printed(rig, "cancel", results)
    assert re.search(
        rf"^ended process {run.process.pid}; saved at step [1-9]\d*; train resumes from there$", done, re.M
    )
    assert run.end() == 75
    assert "one  stopped  " in printed(rig, "status", results)
    assert re.search(r"^[\d.]+ core-hours in 1 start on this machine, \d+ % of it training$", run.printed, re.M)
