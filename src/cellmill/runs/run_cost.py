"""Cost of a run (cost.json): every start of its jobs, the resources it held, and the totals.

SLURM's accounting is asked first. Where there is none, or it does not know a job, the run's own attempt files agree
with it to within the seconds a node takes to start; trainings on this machine are in local.json. An unknown total is
null, and `unknown` says why. A job that SLURM requeued has one entry for each start.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cellmill.config.machine import Machine
from cellmill.files import write_json
from cellmill.runs.jobs import Jobs
from cellmill.runs.local_starts import local_start, local_starts
from cellmill.runs.progress import training_seconds
from cellmill.runs.sacct import sacct_starts
from cellmill.runs.starts import Start, attempt_starts

LOST = "it left no attempt file, and there is no accounting of it"


@contextmanager
def accounted(train: Path, machine: Machine) -> Iterator[None]:
    """Write cost.json when the enclosed training ends, however it ends. The caller holds the run's lock."""
    try:
        with local_start(train, machine) if machine.launcher == "local" else nullcontext():
            yield
    finally:
        write_cost(train)


def write_cost(train: Path, show: bool = True) -> None:
    """Write cost.json in `train`, and print it in one sentence. Never raises: a failure is a warning."""
    try:
        if not train.is_dir():  # deleted: it is not made again
            return
        value = cost(train, training_seconds(train), time.time())
        if value is None:
            return
        write_json(train / "cost.json", value)
    except Exception as error:  # a training of days must not end in a traceback about its cost
        print(f"warning: cost.json is not written: {type(error).__name__}: {error}", flush=True)
        return
    if show:
        print(sentence(value), flush=True)


def cost(train: Path, training_s: float | None, now: float) -> dict[str, Any] | None:
    """Cost so far of the run in `train`, as in cost.json; None if nothing was ever started.

    Totals are sums over starts. `training_efficiency_frac` = `training_s` / sum of `elapsed_s`: the share of the
    allocated time spent on steps of the curve. The rest is start-up, validation, checkpoints, steps that were lost and
    repeated, and trainings of an earlier configuration. `cpu_efficiency_frac` = CPU time used / (allocated cores x
    time).

    Parameters
    ----------
    training_s
        Seconds spent on the steps of the curve; None if unknown.
    """
    records = Jobs(train).all()
    by_job, why_not = sacct_starts(records)
    starts = local_starts(train)
    for record in records:
        starts += by_job.get(record.job_id) or attempt_starts(record, now)
    if not starts:
        return None
    starts.sort(key=lambda start: start.submitted_at or 0.0)
    totals, unknown = _totals(starts, training_s, why_not)
    return {
        "written_at": now,
        "source": " and ".join(sorted({start.source for start in starts}, reverse=True)),
        "jobs": [asdict(start) for start in starts],
        "totals": totals,
        "unknown": unknown,
    }


def sentence(cost: dict[str, Any]) -> str:
    """One line: 2.31 GPU-hours in 3 jobs, waited 12 min in the queue, 81 % of it training."""
    totals = cost["totals"]
    hours, unit = totals["gpu_hours"], "GPU-hours"
    if not any(job["gpus"] for job in cost["jobs"]):
        hours, unit = totals["cpu_core_hours"], "core-hours"
    jobs = len({job["job_id"] for job in cost["jobs"] if job["job_id"]})
    local = sum(not job["job_id"] for job in cost["jobs"])
    places = [f"{jobs} {'job' if jobs == 1 else 'jobs'}"] if jobs else []
    places += [f"{local} {'start' if local == 1 else 'starts'} on this machine"] if local else []
    parts = [f"{'an unknown number of' if hours is None else _hours(hours)} {unit} in {' and '.join(places)}"]
    if jobs and totals["queue_wait_s"] is not None:
        parts.append(f"waited {span(totals['queue_wait_s'])} in the queue")
    if totals["training_efficiency_frac"] is not None:
        parts.append(f"{100 * totals['training_efficiency_frac']:.0f} % of it training")
    return ", ".join(parts)


def span(seconds: float) -> str:
    """A duration in its largest unit: 40 s, 12 min, 3.5 h, 2.1 days."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"


def _hours(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _totals(
    starts: list[Start], training_s: float | None, why_not: str
) -> tuple[dict[str, float | None], dict[str, str]]:
    """Totals over starts, and the reason for each that is unknown; `why_not`: why accounting lacks a job."""
    unknown: dict[str, str] = {}

    def total(name: str, values: Iterable[tuple[Start, float | None]], reason: str) -> float | None:
        pairs = list(values)
        lacking = [start.job_id or "a start on this machine" for start, value in pairs if value is None]
        if lacking:
            unknown[name] = f"unknown for {', '.join(dict.fromkeys(lacking))}: {reason}"
            return None
        return sum(value for _, value in pairs if value is not None)

    def hours(start: Start, number: float | None) -> float | None:
        return None if number is None or start.elapsed_s is None else number * start.elapsed_s / 3600

    elapsed = total("elapsed_s", ((s, s.elapsed_s) for s in starts), LOST)
    cores = total("cpu_core_hours", ((s, hours(s, s.cpus)) for s in starts), LOST)
    ran = [s for s in starts if s.elapsed_s]
    cpu_s = total("cpu_efficiency_frac", ((s, s.cpu_s) for s in ran), why_not or "not in its accounting")
    memory = total("max_memory_gb", ((s, s.max_memory_gb) for s in ran), why_not or "not in its accounting")
    if memory is not None:
        memory = max((s.max_memory_gb or 0.0 for s in ran), default=0.0)
    if training_s is None:
        unknown["training_efficiency_frac"] = "metrics.jsonl has no rates"
    elif not elapsed:
        unknown["training_efficiency_frac"] = unknown.get("elapsed_s", "nothing ran")
    if not cores and cpu_s is not None:
        unknown["cpu_efficiency_frac"] = unknown.get("cpu_core_hours", "nothing ran")
    totals = {
        "gpu_hours": total("gpu_hours", ((s, hours(s, s.gpus)) for s in starts), LOST),
        "cpu_core_hours": cores,
        "elapsed_s": elapsed,
        "queue_wait_s": total("queue_wait_s", ((s, s.queue_wait_s) for s in starts), LOST),
        "training_s": training_s,
        # two clocks, the curve's and the cluster's: the quotient may exceed 1 by a hair
        "training_efficiency_frac": min(1.0, training_s / elapsed) if training_s is not None and elapsed else None,
        "cpu_efficiency_frac": cpu_s / 3600 / cores if cpu_s is not None and cores else None,
        "max_memory_gb": memory,
    }
    return totals, unknown
