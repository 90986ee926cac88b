"""status, attach, logs and cancel beside a training on a real SLURM, with and without a launcher
that follows it; and its cost, by the run's own files and by sacct.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.launched import Launched, cellmill, on_slurm, run_options
from tests.cluster.rig import Rig
from tests.distributed.command import wait_for


def printed(rig: Rig, stage: str, results: Path) -> str:
    return cellmill(rig, stage, "one", "--results", str(results))


@pytest.mark.full
def test_commands_work_with_or_without_a_launcher(rig: Rig, corpus: str, tmp_path: Path) -> None:
    results = tmp_path / "results"
    train = results / "runs" / "one" / "train"
    opts = run_options(5000, checkpoint_every_steps=4)
    first = Launched.start(corpus, train, opts, rig.environment, **on_slurm(nproc_per_node=1))
    first.wait_for_step(6)
    (job_id,) = first.job_ids()
    command = [sys.executable, "-m", "cellmill.cli", "attach", "one", "--results", str(results)]
    attached = subprocess.Popen(
        command, stdout=-1, stderr=-2, text=True, env=os.environ | rig.environment
    )
    table = printed(rig, "status", results)
    assert re.search(
        rf"^one  running  +\d+/5000 +[\d.]+  {job_id} +RUNNING +\S+ (h|min|s) +\d+ +\d+ s ago$",
        table,
        re.M,
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
    assert followed.endswith(
        f"cellmill attach: job {job_id} ended with COMPLETED; saved at step {saved}\n"
    )
    assert [record["state"] for record in first.records()] == ["COMPLETED"], (
        "nobody else could record it"
    )
    assert f"one  stopped  {saved}/5000" in printed(rig, "status", results)

    # the next one waits in the queue, and its launcher follows it
    again = Launched.start(
        corpus,
        train,
        opts,
        rig.environment,
        **on_slurm(nproc_per_node=1, sbatch_options="begin=now+300"),
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
        r"^0.0\d+ GPU-hours in 2 jobs, waited \d+ s in the queue, \d+ % of it training$",
        again.printed,
        re.M,
    )

    # a job that saved and ended on request is not followed by another
    third = Launched.start(corpus, train, opts, rig.environment, **on_slurm(nproc_per_node=1))
    third.wait_for_step(saved + 3)
    saved_by = re.findall(r"saved at step (\d+)", printed(rig, "cancel", results))[0]
    assert int(saved_by) >= saved + 3
    assert third.end() == 75
    assert third.last_line.startswith(by_command.format(third.job_ids()[-1], saved_by))
    assert rig.squeue() == []


@pytest.mark.full
def test_the_cost_of_a_chain_of_jobs_equals_the_accounting(
    rig_with_accounting: Rig, corpus: str, tmp_path: Path
) -> None:
    rig = rig_with_accounting
    train = tmp_path / "run" / "train"
    opts = run_options(16)
    first = Launched.start(
        corpus, train, opts, rig.environment, **on_slurm(sbatch_options="begin=now+300")
    )
    first.wait_for_print("PENDING (BeginTime)")
    os.killpg(first.process.pid, signal.SIGINT)
    assert first.end() == 75, first.printed
    second = Launched.start(
        corpus, train, opts, rig.environment, **on_slurm(nproc_per_node=1, mem_mb=2000)
    )
    assert second.end() == 0, second.printed

    cost = json.loads((train / "cost.json").read_text())
    jobs = cost["jobs"]
    assert cost["source"] == "sacct"
    assert [job["state"] for job in jobs] == ["CANCELLED", "COMPLETED"]
    assert jobs[0]["started_at"] is None
    assert jobs[0]["elapsed_s"] == 0
    assert jobs[0]["queue_wait_s"] == jobs[0]["ended_at"] - jobs[0]["submitted_at"]
    ran = jobs[1]
    assert (ran["partition"], ran["nodes"], ran["processes"], ran["gpus"], ran["cpus"]) == (
        "gpu-a100",
        2,
        2,
        4,
        8,
    )
    held_s = int(rig.call("sacct", "-n", "-X", "-P", "-j", ran["job_id"], "-o", "ElapsedRaw"))
    assert ran["elapsed_s"] == held_s
    totals = cost["totals"]
    assert totals["cpu_core_hours"] == pytest.approx(8 * held_s / 3600)
    assert totals["gpu_hours"] == pytest.approx(4 * held_s / 3600)
    assert 0.05 < totals["training_efficiency_frac"] < 1
    assert 0.01 < totals["cpu_efficiency_frac"] < 1
    assert 0.2 < totals["max_memory_gb"] < 4
    assert cost["unknown"] == {}
    assert re.search(
        r"^0.0\d+ GPU-hours in 2 jobs, waited \d+ s in the queue, \d+ % of it training$",
        second.printed,
        re.M,
    ), second.printed

    # SLURM counts from before the task starts to after it has ended
    (attempt,) = (json.loads(path.read_text()) for path in train.glob("jobs/*/attempt-*.json"))
    assert held_s == pytest.approx(attempt["ended_at"] - attempt["started_at"], abs=8)
    assert ran["gpus"] == attempt["gpus"]
