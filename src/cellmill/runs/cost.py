"""What a run cost: each start of its jobs, what it held of the machine, and for how long.

SLURM's accounting is asked first; where there is none, or it does not know a job, the run's own attempt files have
nearly the same to within the seconds a node takes to start. Trainings on this machine note themselves in local.json.
What cannot be known is null, and `unknown` says why. A job that SLURM requeued has one entry for each start.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cellmill.config.machine import Machine
from cellmill.errors import DataError, Stopped
from cellmill.files import read_json, write_json
from cellmill.runs.job_states import ALIVE
from cellmill.runs.jobs import JobRecord, Jobs

SACCT = "sacct"
OWN = "own files"
LOCAL = "local"
"""In the place of a partition: a training on this machine."""
ANSWER_WITHIN_S = 15
LAG_S = 4.0  # how long accounting may take to hear of a job's end
_FIELDS = (
    *("JobID", "Partition", "State", "Submit", "Start", "End", "ElapsedRaw", "NNodes", "AllocCPUS", "AllocTRES"),
    *("TotalCPU", "MaxRSS", "JobName"),  # the name last: it may hold a |
)


@dataclass(frozen=True)
class Start:
    """One start of a job, or one wait that never became one. Times are seconds since 1970; None is not known."""

    job_id: str
    """Empty on this machine."""
    partition: str
    state: str
    submitted_at: float | None
    started_at: float | None
    ended_at: float | None
    """While it runs, when it was last seen."""
    queue_wait_s: float | None
    elapsed_s: float | None
    nodes: int | None
    processes: int | None
    gpus: int | None
    cpus: int | None
    """Cores held."""
    cpu_s: float | None
    """CPU time used."""
    max_memory_gb: float | None
    """The most that one node's processes held together."""
    source: str


def cost(train: Path, training_s: float | None, now: float) -> dict[str, Any] | None:
    """What the run in `train` cost so far, as in cost.json; None when nothing was ever started.

    Totals are sums over starts. `training_efficiency_frac` = `training_s` / sum of `elapsed_s`: the part of the time
    in which nodes were held that went into steps of the curve. What it lacks are starts, validation, checkpoints,
    steps that were lost and trained again, and trainings of an earlier configuration. `cpu_efficiency_frac` = CPU time
    used / (cores held x time).

    Parameters
    ----------
    training_s
        Seconds that the steps of the curve took; None when it is not known.
    """
    records = Jobs(train).all()
    known, why_not = _accounted(records)
    starts: list[Start] = []
    for record in records:
        starts += known.get(record.job_id) or _own(record, now)
    starts += _local(train)
    if not starts:
        return None
    starts.sort(key=lambda start: start.submitted_at or 0.0)
    totals, unknown = _totals(starts, training_s, why_not)
    sources = sorted({start.source for start in starts}, reverse=True)
    return {
        "written_at": now,
        "source": " and ".join(sources),
        "jobs": [asdict(start) for start in starts],
        "totals": totals,
        "unknown": unknown,
    }


def sentence(cost: dict[str, Any]) -> str:
    """One line: 2.31 GPU-hours in 3 jobs, waited 12 min in the queue, 81 % of it training."""
    totals = cost["totals"]
    hours, what = totals["gpu_hours"], "GPU-hours"
    if not any(job["gpus"] for job in cost["jobs"]):
        hours, what = totals["cpu_core_hours"], "core-hours"
    jobs = len({job["job_id"] for job in cost["jobs"] if job["job_id"]})
    local = sum(not job["job_id"] for job in cost["jobs"])
    places = [f"{jobs} {'job' if jobs == 1 else 'jobs'}"] if jobs else []
    places += [f"{local} {'start' if local == 1 else 'starts'} on this machine"] if local else []
    parts = [f"{'an unknown number of' if hours is None else _hours(hours)} {what} in {' and '.join(places)}"]
    if jobs and totals["queue_wait_s"] is not None:
        parts.append(f"waited {span(totals['queue_wait_s'])} in the queue")
    if totals["training_efficiency_frac"] is not None:
        parts.append(f"{100 * totals['training_efficiency_frac']:.0f} % of it training")
    return ", ".join(parts)


def span(seconds: float) -> str:
    """A length of time in its largest unit: 40 s, 12 min, 3.5 h, 2.1 days."""
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
    unknown: dict[str, str] = {}

    def total(name: str, values: Iterable[tuple[Start, float | None]], reason: str) -> float | None:
        pairs = list(values)
        lacking = [start.job_id or "a start on this machine" for start, value in pairs if value is None]
        if lacking:
            unknown[name] = f"not known of {', '.join(dict.fromkeys(lacking))}: {reason}"
            return None
        return sum(value for _, value in pairs if value is not None)

    def product(start: Start, number: float | None) -> float | None:
        return None if number is None or start.elapsed_s is None else number * start.elapsed_s / 3600

    lost = "it left no attempt file, and there is no accounting of it"
    elapsed = total("elapsed_s", ((s, s.elapsed_s) for s in starts), lost)
    cores = total("cpu_core_hours", ((s, product(s, s.cpus)) for s in starts), lost)
    ran = [s for s in starts if s.elapsed_s]
    used = total("cpu_efficiency_frac", ((s, s.cpu_s) for s in ran), why_not or "its accounting has none")
    most = total("max_memory_gb", ((s, s.max_memory_gb) for s in ran), why_not or "its accounting has none")
    if most is not None:
        most = max((s.max_memory_gb or 0.0 for s in ran), default=0.0)
    if training_s is None:
        unknown["training_efficiency_frac"] = "metrics.jsonl has no rates"
    elif not elapsed:
        unknown["training_efficiency_frac"] = unknown.get("elapsed_s", "nothing ran")
    if not cores and used is not None:
        unknown["cpu_efficiency_frac"] = unknown.get("cpu_core_hours", "nothing ran")
    totals = {
        "gpu_hours": total("gpu_hours", ((s, product(s, s.gpus)) for s in starts), lost),
        "cpu_core_hours": cores,
        "elapsed_s": elapsed,
        "queue_wait_s": total("queue_wait_s", ((s, s.queue_wait_s) for s in starts), lost),
        "training_s": training_s,
        # the curve's clock and the cluster's are two: their quotient may come out a hair above 1
        "training_efficiency_frac": min(1.0, training_s / elapsed) if training_s is not None and elapsed else None,
        "cpu_efficiency_frac": used / 3600 / cores if used is not None and cores else None,
        "max_memory_gb": most,
    }
    return totals, unknown


# From SLURM's accounting


def _accounted(records: list[JobRecord]) -> tuple[dict[str, list[Start]], str]:
    """Starts of those jobs that sacct knows, and why it does not know all; waits a little for the newest job's end."""
    if not records:
        return {}, "only SLURM's accounting has it"
    if shutil.which("sacct") is None:
        return {}, "sacct is not on PATH"
    give_up = time.monotonic() + LAG_S
    while True:
        try:
            found = parse_sacct(_ask([record.job_id for record in records]), records)
        except ValueError as error:
            return {}, str(error)
        newest = records[-1]
        lags = newest.ended_at is not None and any(s.state in ALIVE for s in found.get(newest.job_id, [])[-1:])
        if not lags or time.monotonic() > give_up:
            break
        time.sleep(0.5)
    if lags:
        del found[newest.job_id]
    return found, "" if len(found) == len(records) else "sacct does not know the job"


def _ask(job_ids: list[str]) -> str:
    """sacct's answer. Raises ValueError saying why there is none."""
    command = ["sacct", "-P", "-n", "--duplicates", "-j", ",".join(job_ids), "-o", ",".join(_FIELDS)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_WITHIN_S,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"SLURM_TIME_FORMAT": "%s", "TZ": "UTC"},
        )
    except OSError as error:
        raise ValueError(f"sacct: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise ValueError(f"sacct: no answer within {ANSWER_WITHIN_S} s") from None
    if done.returncode:
        said = " ".join(done.stderr.split())[:200] or f"exit code {done.returncode}"
        raise ValueError(f"sacct: {said.removeprefix('sacct: ').removeprefix('error: ')}")
    return done.stdout


def parse_sacct(answer: str, records: list[JobRecord]) -> dict[str, list[Start]]:
    """Starts by job number. Rows of another job that had the number are left out: its name differs.

    So are jobs that a training shared, as under `allocation`: their time is not all its own. Raises ValueError when a
    row is not one of sacct's.
    """
    by_id = {record.job_id: record for record in records}
    found: dict[str, list[tuple[dict[str, str], list[dict[str, str]]]]] = {}
    for line in answer.splitlines():
        cells = line.split("|", len(_FIELDS) - 1)
        if len(cells) != len(_FIELDS) or not re.match(r"\d+", cells[0]):
            raise ValueError(f"sacct answered {line.strip()[:80]!r}")
        row = dict(zip(_FIELDS, cells))
        number, _, step = row["JobID"].partition(".")
        if not step:
            found.setdefault(number, []).append((row, []))
        elif number in found:  # steps follow their start
            found[number][-1][1].append(row)
    starts: dict[str, list[Start]] = {}
    for number, record in by_id.items():
        own = [(row, steps) for row, steps in found.get(number, []) if row["JobName"] == record.name]
        if own:
            starts[number] = [_start(row, steps, record) for row, steps in own]
    return starts


def _start(row: dict[str, str], steps: list[dict[str, str]], record: JobRecord) -> Start:
    submitted, started, ended = (_time(row[name]) for name in ("Submit", "Start", "End"))
    nodes = int(_scaled(row["NNodes"]))
    if not row["AllocTRES"]:  # ended in the queue: SLURM gives it the start it never had
        started = None
    gpus = re.search(r"gres/gpu=(\d+)", row["AllocTRES"])
    memory = [_scaled(step["MaxRSS"]) for step in steps if step["MaxRSS"]]
    until = ended if started is None else started
    return Start(
        job_id=record.job_id,
        partition=row["Partition"],
        state=row["State"].split()[0],  # "CANCELLED by 1000"
        submitted_at=submitted,
        started_at=started,
        ended_at=ended,
        queue_wait_s=None if submitted is None or until is None else max(0.0, until - submitted),
        elapsed_s=_scaled(row["ElapsedRaw"]),
        nodes=nodes,
        processes=nodes * record.nproc_per_node,
        gpus=int(gpus[1]) if gpus else nodes * record.gpus_per_node,  # a site may not count GPUs
        cpus=int(_scaled(row["AllocCPUS"])),
        cpu_s=_seconds(row["TotalCPU"]) if ended is not None and memory else None,  # 0 where it was not gathered
        max_memory_gb=max(memory) / 1e9 if memory else None,
        source=SACCT,
    )


def _time(text: str) -> float | None:
    return float(text) if text.isdigit() else None  # Unknown, None


def _seconds(text: str) -> float | None:
    """`days-hours:minutes:seconds.milliseconds`, of which the first ones may be absent."""
    match = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+(?:\.\d+)?)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return ((24 * days + hours) * 60 + minutes) * 60 + seconds


def _scaled(text: str) -> float:
    """A number as SLURM writes it: 90560K is 90560 * 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTP]?)", text)
    if match is None:
        raise ValueError(f"sacct gives {text[:40]!r} where a number should be")
    return float(match[1]) * 1024.0 ** " KMGTP".index(match[2] or " ")


# From the run's own files


def _own(record: JobRecord, now: float) -> list[Start]:
    """Starts by attempt files; the wait alone when there are none."""
    try:
        attempts = record.attempts()
    except DataError:  # one that a full disk cut off
        attempts = []
    alive = record.ended_at is None
    if not attempts:
        waited = record.state not in ("COMPLETED", "FAILED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED")
        waits = (record.ended_at or now) - record.submitted_at if waited else None
        return [_start_of(record, None, record.submitted_at, record.ended_at, waits, 0.0 if waited else None)]
    starts, before = [], record.submitted_at
    for number, attempt in enumerate(attempts):
        began, ended = float(attempt["started_at"]), attempt["ended_at"]
        last = number == len(attempts) - 1
        state = record.state if last else "REQUEUED"
        until = float(attempt["seen_at"] if ended is None else ended)
        start = _start_of(record, attempt, before, until, max(0.0, began - before), until - began)
        starts.append(Start(**(asdict(start) | {"state": "RUNNING" if last and alive and ended is None else state})))
        before = until  # a requeued job waits from where it was ended
    return starts


def _start_of(
    record: JobRecord,
    attempt: dict[str, Any] | None,
    submitted: float,
    ended: float | None,
    wait_s: float | None,
    elapsed_s: float | None,
) -> Start:
    nodes = len(attempt["hosts"]) if attempt else int(record.nodes.partition("-")[0])
    return Start(
        job_id=record.job_id,
        partition=record.slurm_partition,
        state=record.state,
        submitted_at=submitted,
        started_at=float(attempt["started_at"]) if attempt else None,
        ended_at=ended,
        queue_wait_s=wait_s,
        elapsed_s=elapsed_s,
        nodes=nodes,
        processes=int(attempt["processes"]) if attempt else nodes * record.nproc_per_node,
        gpus=int(attempt["gpus"]) if attempt else nodes * record.gpus_per_node,
        cpus=nodes * record.cpus_per_node,
        cpu_s=None,
        max_memory_gb=None,
        source=OWN,
    )


# Trainings on this machine


@contextmanager
def noted(train: Path, machine: Machine) -> Iterator[None]:
    """Notes in local.json when a training on this machine begins and how it ends. The caller holds the run's lock."""
    file = train / "local.json"
    before = _close(read_local(train), train)
    entry: dict[str, Any] = {
        "host": os.uname().nodename,
        "started_at": time.time(),
        "ended_at": None,
        "processes": machine.node_counts[-1] * machine.nproc_per_node,
        "gpus": min(machine.node_counts[-1] * machine.nproc_per_node, gpus_here()),
        "cpus": len(os.sched_getaffinity(0)),
        "cpu_s": None,
        "how": None,
    }
    _keep(file, [*before, entry])
    used, how = _cpu_s(), "FAILED"
    try:
        yield
        how = "COMPLETED"
    except (Stopped, KeyboardInterrupt):
        how = "STOPPED"
        raise
    finally:
        entry |= {"ended_at": time.time(), "cpu_s": _cpu_s() - used, "how": how}
        _keep(file, [*before, entry])


def _keep(file: Path, entries: list[dict[str, Any]]) -> None:
    try:
        write_json(file, entries)
    except OSError as error:  # a full disk must not hide how the training ended
        print(f"warning: {file}: {error.strerror}", flush=True)


def read_local(train: Path) -> list[dict[str, Any]]:
    """Trainings on this machine, oldest first. `how`: COMPLETED, STOPPED or FAILED; None if it runs or was killed."""
    file = train / "local.json"
    try:
        entries = read_json(file) if file.exists() else []
    except DataError:
        return []
    return [entry for entry in entries if isinstance(entry, dict) and "started_at" in entry]


def _close(entries: list[dict[str, Any]], train: Path) -> list[dict[str, Any]]:
    """The last entry of a training that was killed gets the last sign of it as its end."""
    if entries and entries[-1]["ended_at"] is None:
        entries[-1] |= {"ended_at": _last_sign(entries[-1], train), "how": "KILLED"}
    return entries


def _last_sign(entry: dict[str, Any], train: Path) -> float:
    signs = [path.stat().st_mtime for path in (train / "metrics.jsonl", train / "state.json") if path.exists()]
    return max([entry["started_at"], *signs])


def _local(train: Path) -> list[Start]:
    starts = []
    for entry in read_local(train):
        ended = entry["ended_at"] or _last_sign(entry, train)
        starts.append(
            Start(
                job_id="",
                partition=LOCAL,
                state=entry["how"] or "RUNNING",
                submitted_at=entry["started_at"],
                started_at=entry["started_at"],
                ended_at=ended,
                queue_wait_s=0.0,
                elapsed_s=ended - entry["started_at"],
                nodes=1,
                processes=entry["processes"],
                gpus=entry["gpus"],
                cpus=entry["cpus"],
                cpu_s=entry["cpu_s"],
                max_memory_gb=None,
                source=OWN,
            )
        )
    return starts


def gpus_here() -> int:
    """NVIDIA GPUs this process may use; torch-free, so without asking the driver."""
    there = sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in Path("/dev").glob("nvidia*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return there
    return min(there, sum(bool(word.strip()) and word.strip() != "-1" for word in visible.split(",")))


def _cpu_s() -> float:
    """CPU time of processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
