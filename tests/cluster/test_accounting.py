"""Cost of a run by a real sacct, compared with the run's own files."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.cluster.launched import Launched, on_slurm, run_options
from tests.cluster.rig import Rig


@pytest.mark.full
def test_the_cost_of_a_chain_of_jobs_equals_the_accounting(
    rig_with_accounting: Rig, corpus: str, tmp_path: Path
) -> None:
    rig, train, opts = rig_with_accounting, tmp_path / "run" / "train", run_options(16)
    first = Launched.start(corpus, train, opts, rig.environment, **on_slurm(sbatch_options="begin=now+300"))
    first.wait_for_print("PENDING (BeginTime)")
    os.killpg(first.process.pid, signal.SIGINT)
    assert first.end() == 75, first.printed
    second = Launched.start(corpus, train, opts, rig.environment, **on_slurm(nproc_per_node=1, mem_mb=2000))
    assert second.end() == 0, second.printed

    cost = json.loads((train / "cost.json").read_text())
    jobs = cost["jobs"]
    assert cost["source"] == "sacct"
    assert [job["state"] for job in jobs] == ["CANCELLED", "COMPLETED"]
    assert jobs[0]["started_at"] is None
    assert jobs[0]["elapsed_s"] == 0
    assert jobs[0]["queue_wait_s"] == jobs[0]["ended_at"] - jobs[0]["submitted_at"]
    ran = jobs[1]
    assert (ran["partition"], ran["nodes"], ran["processes"], ran["gpus"], ran["cpus"]) == ("gpu-a100", 2, 2, 4, 8)
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
        r"^0.0\d+ GPU-hours in 2 jobs, waited \d+ s in the queue, \d+ % of it training$", second.printed, re.M
    ), second.printed

    # SLURM counts from before the task starts to after it has ended
    (attempt,) = (json.loads(path.read_text()) for path in train.glob("jobs/*/attempt-*.json"))
    assert held_s == pytest.approx(attempt["ended_at"] - attempt["started_at"], abs=8)
    assert ran["gpus"] == attempt["gpus"]
