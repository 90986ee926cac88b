"""Cost of a run: from recorded answers of sacct, from attempt files, and from trainings on this
machine.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cellmill.config.machine import Machine
from cellmill.config.options import ReportOptions
from cellmill.errors import Stopped
from cellmill.files import span
from cellmill.runs import cost as cost_module
from cellmill.runs.cost import cost, local_start, read_local, sentence, write_cost
from cellmill.runs.folder import training_seconds
from cellmill.runs.jobs import JobRecord
from cellmill.stages import report
from tests.unit.test_status import command
from tests.unit.test_status import job as job_of

T = 1_795_249_940.0  # when the first job was submitted
REQUEUED = """\
1|gpu-a100|REQUEUED|1795249940|1795249942|1795249945|3|2|8|billing=8,cpu=8,gres/gpu=4,mem=2000M,node=2|00:04.592||NAME
1.batch||CANCELLED|1795249942|1795249942|1795249946|4|1|4|cpu=4,gres/gpu=2,mem=1000M,node=1|00:00.003|12444K|batch
1.0||CANCELLED|1795249942|1795249942|1795249948|6|2|8|cpu=8,gres/gpu=4,mem=2000M,node=2|00:04.588|90512K|python3
1|gpu-a100|COMPLETED|1795249948|1795249960|1795249967|7|2|8|billing=8,cpu=8,gres/gpu=4,mem=2000M,node=2|00:07.973||NAME
1.batch||COMPLETED|1795249960|1795249960|1795249967|7|1|4|cpu=4,gres/gpu=2,mem=1000M,node=1|00:00.019|12536K|batch
1.0||COMPLETED|1795249960|1795249960|1795249967|7|2|8|cpu=8,gres/gpu=4,mem=2000M,node=2|00:07.953|90560K|python3
"""
CANCELLED = "2|gpu-a100|CANCELLED by 0|1795249972|1795249973|1795249973|0|2|2||00:00:00||NAME\n"


def record(train: Path, number: int, **changes: Any) -> JobRecord:
    """Job `number` of a run, two nodes of two GPUs; submitted 100 s after the previous one."""
    began = T + 100 * (number - 1)
    size = {
        "nodes": "1-2",
        "nproc_per_node": 2,
        "gpus_per_node": 2,
        "cpus_per_node": 4,
        "slurm_partition": "gpu-a100",
    }
    ended = {
        "job_id": str(number),
        "submitted_at": began,
        "state": "COMPLETED",
        "ended_at": began + 90,
    }
    return job_of(train, number, **size, **(ended | changes))


def attempt(
    job: JobRecord, number: int, started: float, seen: float, ended: float | None, nodes: int = 2
) -> None:
    value = {
        "job_id": job.job_id,
        "started_at": T + started,
        "seen_at": T + seen,
        "ended_at": None if ended is None else T + ended,
        "hosts": [f"node{i}" for i in range(nodes)],
        "processes": 2 * nodes,
        "gpus": 2 * nodes,
        "exit_code": 0,
    }
    (job.path / f"attempt-{number:03}.json").write_text(json.dumps(value))


@pytest.fixture
def no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH of one empty folder, which is returned."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def sacct(folder: Path, answer: str, code: int = 0, error: str = "") -> Path:
    """A sacct with this answer; returns the file with its arguments."""
    notes = folder / "asked"
    out = f"/bin/cat <<'END'\n{answer}END\nprintf '{error}' >&2\nexit {code}"
    command(folder, "sacct", f"echo \"$SLURM_TIME_FORMAT $*\" >> '{notes}'\n{out}")
    return notes


def test_sacct_gives_one_entry_for_each_start_of_a_requeued_job(
    tmp_path: Path, no_slurm: Path
) -> None:
    first = record(tmp_path, 1)
    second = record(tmp_path, 2, state="CANCELLED")
    attempt(first, 0, 2, 5, 5)  # ignored, since sacct knows the job
    notes = sacct(
        no_slurm, REQUEUED.replace("NAME", first.name) + CANCELLED.replace("NAME", second.name)
    )
    found = cost(tmp_path, 6.0, T + 200)
    assert notes.read_text() == (
        "%s -P -n --duplicates -j 1,2 -o JobID,Partition,State,Submit,Start,End,ElapsedRaw,NNodes,AllocCPUS,AllocTRES,"
        "TotalCPU,MaxRSS,JobName\n"
    )
    assert found["source"] == "sacct"
    assert [job["state"] for job in found["jobs"]] == ["REQUEUED", "COMPLETED", "CANCELLED"]
    assert [job["queue_wait_s"] for job in found["jobs"]] == [2, 12, 1]
    assert [job["started_at"] for job in found["jobs"]] == [T + 2, T + 20, None]
    assert [job["gpus"] for job in found["jobs"]] == [4, 4, 4]
    totals = found["totals"]
    assert totals["gpu_hours"] == pytest.approx(4 * (3 + 7) / 3600)
    assert totals["cpu_core_hours"] == pytest.approx(8 * (3 + 7) / 3600)
    assert totals["queue_wait_s"] == 15
    assert totals["training_efficiency_frac"] == pytest.approx(0.6)
    assert totals["cpu_efficiency_frac"] == pytest.approx((4.592 + 7.973) / 80)
    assert totals["max_memory_gb"] == pytest.approx(90560 * 1024 / 1e9)
    assert found["unknown"] == {}
    assert (
        sentence(found)
        == "0.0111 GPU-hours in 2 jobs, waited 15 s in the queue, 60 % of it training"
    )


def test_without_accounting_the_cost_comes_from_attempt_files(
    tmp_path: Path, no_slurm: Path
) -> None:
    first = record(tmp_path, 1)
    attempt(first, 0, started=10, seen=40, ended=None)  # its node died before it wrote an end
    attempt(first, 1, started=60, seen=80, ended=85, nodes=1)
    running = record(tmp_path, 2, state="RUNNING", ended_at=None)
    attempt(running, 0, started=150, seen=195, ended=None)
    record(tmp_path, 3, state="PENDING", ended_at=None)
    found = cost(tmp_path, None, T + 260)
    assert found["source"] == "own files"
    assert [job["state"] for job in found["jobs"]] == [
        "REQUEUED",
        "COMPLETED",
        "RUNNING",
        "PENDING",
    ]
    assert [job["queue_wait_s"] for job in found["jobs"]] == [10, 20, 50, 60]
    assert [job["elapsed_s"] for job in found["jobs"]] == [30, 25, 45, 0]
    totals = found["totals"]
    assert totals["gpu_hours"] == pytest.approx((4 * 30 + 2 * 25 + 4 * 45) / 3600)
    assert totals["cpu_core_hours"] == pytest.approx((8 * 30 + 4 * 25 + 8 * 45) / 3600)
    assert (
        totals["cpu_efficiency_frac"],
        totals["max_memory_gb"],
        totals["training_efficiency_frac"],
    ) == (None,) * 3
    assert found["unknown"] == {
        "cpu_efficiency_frac": "unknown for 1, 2: sacct is not on PATH",
        "max_memory_gb": "unknown for 1, 2: sacct is not on PATH",
        "training_efficiency_frac": "metrics.jsonl has no rates",
    }
    assert sentence(found) == "0.0972 GPU-hours in 3 jobs, waited 2 min in the queue"


@pytest.mark.parametrize(
    ("answer", "code", "error", "reason"),
    [
        ("", 1, "sacct: error: slurm_persist_conn_open: Connection refused", "Connection refused"),
        ("", 0, "", "sacct does not know the job"),
        ("Slurm accounting storage is disabled\n", 0, "", "sacct answered 'Slurm accounting storage is disabled'"),
        (CANCELLED.replace("|0|2|2|", "|0|two|2|").replace("2|gpu", "1|gpu"), 0, "",
         "sacct: expected a number, got 'two'"),
        (REQUEUED.replace("NAME", "another"), 0, "", "sacct does not know the job"),
    ],
)  # fmt: skip
def test_the_cost_comes_from_attempt_files_if_sacct_fails(
    tmp_path: Path, no_slurm: Path, answer: str, code: int, error: str, reason: str
) -> None:
    job = record(tmp_path, 1)
    attempt(job, 0, started=10, seen=40, ended=46)
    sacct(no_slurm, answer.replace("NAME", job.name), code, error)
    found = cost(tmp_path, 9.0, T + 200)
    assert found["source"] == "own files"
    assert found["totals"]["gpu_hours"] == pytest.approx(4 * 36 / 3600)
    assert reason in found["unknown"]["max_memory_gb"]
    assert (
        sentence(found) == "0.04 GPU-hours in 1 job, waited 10 s in the queue, 25 % of it training"
    )


def test_a_training_on_this_machine_is_recorded_however_it_ends(
    tmp_path: Path, no_slurm: Path
) -> None:
    machine = Machine(nproc_per_node=2)
    busy = "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass"
    with local_start(tmp_path, machine):
        subprocess.run([sys.executable, "-c", busy], check=True)
    with pytest.raises(Stopped), local_start(tmp_path, machine):
        raise Stopped("asked to")
    with pytest.raises(ZeroDivisionError), local_start(tmp_path, machine):
        raise ZeroDivisionError
    killed = (
        f"from pathlib import Path\nfrom cellmill.config.machine import Machine\nimport os\n"
        f"from cellmill.runs.cost import local_start\n"
        f"with local_start(Path({str(tmp_path)!r}), Machine()): os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", killed]).returncode == 9
    began = json.loads((tmp_path / "local.json").read_text())[-1]["started_at"]
    (tmp_path / "metrics.jsonl").write_text("")
    os.utime(tmp_path / "metrics.jsonl", (began + 30, began + 30))
    found = cost(tmp_path, 3.0, T)
    assert [job["state"] for job in found["jobs"]] == ["COMPLETED", "STOPPED", "FAILED", "RUNNING"]
    # the next one gives the killed one an end: its last sign of life
    with local_start(tmp_path, machine):
        (tmp_path / "metrics.jsonl").unlink()
    found = cost(tmp_path, 3.0, T)
    jobs = found["jobs"]
    assert [job["state"] for job in jobs] == [
        "COMPLETED",
        "STOPPED",
        "FAILED",
        "KILLED",
        "COMPLETED",
    ]
    assert jobs[0]["cpu_s"] >= 0.2
    assert jobs[3]["elapsed_s"] == pytest.approx(30)
    assert (jobs[0]["processes"], jobs[0]["cpus"]) == (2, len(os.sched_getaffinity(0)))
    share = 100 * 3.0 / sum(job["elapsed_s"] for job in jobs)
    assert sentence(found).endswith(
        f"-hours in 5 starts on this machine, {share:.0f} % of it training"
    )


def test_a_training_on_cpu_cores_holds_those_it_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost_module, "visible_gpus", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64))
    held = []
    for given in ({"device": "cpu", "cpus_per_task": 8}, {"nproc_per_node": 2}):
        with local_start(tmp_path, Machine(**given)):
            pass
        start = read_local(tmp_path)[-1]
        held.append((start["gpus"], start["cpus"]))
    assert held == [(0, 8), (2, 64)]


def test_damaged_records_give_an_unknown_cost_or_a_warning(
    tmp_path: Path, no_slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_cost(tmp_path)
    assert (list(tmp_path.glob("*.json")), capsys.readouterr().out) == ([], ""), "it never started"
    job = record(tmp_path, 1)
    (job.path / "job.json").write_text("[1]")
    write_cost(tmp_path)
    assert capsys.readouterr().out.startswith("warning: cost.json is not written: ")
    record(tmp_path, 1)
    (job.path / "attempt-000.json").write_text('{"started_')
    write_cost(tmp_path)
    assert capsys.readouterr().out == "an unknown number of GPU-hours in 1 job\n"
    found = json.loads((tmp_path / "cost.json").read_text())
    assert found["totals"]["gpu_hours"] is None
    assert (
        found["unknown"]["gpu_hours"]
        == "unknown for 1: it left no attempt file, and there is no accounting of it"
    )


def test_a_closed_output_hides_no_end_of_a_training(
    tmp_path: Path, no_slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = record(tmp_path, 1)

    def closed(*given: object, **options: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", closed)
    write_cost(tmp_path)
    assert (tmp_path / "cost.json").exists()
    (job.path / "job.json").write_text("[1]")
    write_cost(tmp_path)


def test_training_time_follows_the_rates_of_the_curve(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"options": {"train": {"global_batch": 64}}}))
    assert training_seconds(tmp_path) is None
    lines = [
        {"step": 1, "loss": 2.0, "cells_per_s": 32.0},
        {"step": 10, "loss": 1.5, "cells_per_s": 64.0},
        {"step": 10, "val_loss": 1.6},
        {"step": 20, "loss": 1.4, "cells_per_s": 128.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert training_seconds(tmp_path) == pytest.approx(2 + 9 + 5)
    (tmp_path / "state.json").write_text(
        json.dumps({"state": "done", "step": 20, "steps": 20, "cells": 20 * 48})
    )
    assert training_seconds(tmp_path) == pytest.approx((2 + 9 + 5) * 48 / 64)
    # the steps of a trunk are in the curve of its branch
    (tmp_path / "branch.json").write_text('{"step": 16}')
    assert training_seconds(tmp_path) == pytest.approx(2 * 48 / 64)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (99, "99 s"), (100, "2 min"), (5970, "1.7 h"), (200_000, "2.3 days")],
)
def test_a_span_is_given_in_its_largest_unit(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_the_report_has_a_table_of_what_was_written(tmp_path: Path, no_slurm: Path) -> None:
    train = tmp_path / "runs" / "<b>one" / "train"
    job = record(train, 1)
    attempt(job, 0, started=10, seen=40, ended=46)
    write_cost(train)
    out = tmp_path / "index.html"
    options = ReportOptions.model_validate({"report": {}})
    report.report(options=options, runs=[tmp_path / "runs" / "<b>one"], corpora=[], out=out)
    text = " ".join(
        re.sub(r"<[^>]*>", " ", out.read_text().partition('<section id="cost">')[2]).split()
    )
    head = "Cost run starts GPU-hours core-hours wall time queue wait training CPU use peak memory"
    assert text.startswith(head)
    assert "&lt;b&gt;one 1 0.04 0.08 36 s 10 s – – – – own files" in text
    no_sacct = "unknown for 1: sacct is not on PATH"
    assert f"&lt;b&gt;one: CPU use, {no_sacct}; peak memory of a node, GB, {no_sacct}; " in text
    assert "1 gpu-a100 COMPLETED 10 s 36 s 2 4 4 8" in text
