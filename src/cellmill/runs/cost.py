"""Cost of a run (cost.json): every start of its jobs, the resources it held, and the totals.

Starts come from SLURM's accounting (sacct), or from the attempt files that the jobs write
themselves. local.json has an entry for each start of a training on this machine. An unknown total
is null, and `unknown` says why.
"""

import os
import re
import resource
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cellmill.config.machine import Machine
from cellmill.errors import DataError, Stopped
from cellmill.files import read_json, span, write_json
from cellmill.runs.folder import training_seconds
from cellmill.runs.jobs import JobRecord, Jobs, write_if_room
from cellmill.runs.slurm import ALIVE, RAN, CommandError, ask, parse_duration

OWN_FILES = "own files"
LOCAL = "local"  # partition of a start on this machine
LOST = "it left no attempt file, and there is no accounting of it"
ANSWER_WITHIN_S = 15
LAG_S = 4.0  # how late accounting may learn of a job's end


@dataclass(frozen=True)
class Start:
    """One start of a job, or a wait in the queue that never became one. Times are seconds since
    1970; None: unknown.
    """

    job_id: str  # empty on this machine
    partition: str
    state: str
    submitted_at: float | None
    started_at: float | None
    ended_at: float | None  # while it runs, when it was last seen
    queue_wait_s: float | None
    elapsed_s: float | None
    nodes: int | None
    processes: int | None
    gpus: int | None
    cpus: int | None  # allocated cores
    cpu_s: float | None = None  # CPU time used
    max_memory_gb: float | None = None  # peak memory of one node's processes together
    source: str = OWN_FILES


def _start(state: str, queued_at: float, started_at: float, ended_at: float, **held: Any) -> Start:
    """A start by the run's own files; `held` has the other fields."""
    waited_s = max(0.0, started_at - queued_at)
    elapsed_s = ended_at - started_at
    times: dict[str, Any] = {
        "submitted_at": queued_at,
        "started_at": started_at,
        "ended_at": ended_at,
    }
    return Start(state=state, queue_wait_s=waited_s, elapsed_s=elapsed_s, **times, **held)


def attempt_starts(record: JobRecord, now: float) -> list[Start]:
    """Starts of a job by its attempt files; only its wait in the queue if there is none."""
    try:
        attempts = record.attempts()
    except DataError:  # truncated by a full disk
        attempts = []
    starts = list[Start]()
    queued_at = record.submitted_at
    job: dict[str, Any] = {"job_id": record.job_id, "partition": record.slurm_partition}
    for attempt in attempts:
        ended = attempt["ended_at"]
        state = record.state
        nodes = len(attempt["hosts"])
        if attempt is not attempts[-1]:
            state = "REQUEUED"
        elif record.ended_at is None and ended is None:
            state = "RUNNING"
        ended_at = float(attempt["seen_at"] if ended is None else ended)
        held = {name: attempt[name] for name in ("processes", "gpus")}
        held |= {"nodes": nodes, "cpus": nodes * record.cpus_per_node}
        starts.append(
            _start(state, queued_at, float(attempt["started_at"]), ended_at, **job, **held)
        )
        queued_at = ended_at  # a requeued job waits again from its end
    if starts:
        return starts
    nodes = int(record.nodes.partition("-")[0])
    # how long a job ran is unknown without attempt files
    waited = record.state not in RAN
    held = {
        "processes": record.nproc_per_node,
        "gpus": record.gpus_per_node,
        "cpus": record.cpus_per_node,
    }
    held = {name: nodes * number for name, number in held.items()}
    times: dict[str, Any] = {
        "submitted_at": queued_at,
        "started_at": None,
        "ended_at": record.ended_at,
    }
    times["queue_wait_s"] = (record.ended_at or now) - queued_at if waited else None
    times["elapsed_s"] = 0.0 if waited else None
    return [Start(**job, state=record.state, nodes=nodes, **times, **held)]


# the name is last: it may hold a |
_FIELDS = (
    "JobID Partition State Submit Start End ElapsedRaw NNodes AllocCPUS AllocTRES TotalCPU MaxRSS "
    "JobName"
).split()


def sacct_starts(records: list[JobRecord]) -> tuple[dict[str, list[Start]], str]:
    """Starts by job id of the jobs that sacct knows, and why others are missing. Waits up to
    `LAG_S` for the end of the newest job to arrive.
    """
    if not records:
        return {}, "only SLURM's accounting has it"
    if shutil.which("sacct") is None:
        return {}, "sacct is not on PATH"
    deadline = time.monotonic() + LAG_S
    while True:
        try:
            jobs = ",".join(record.job_id for record in records)
            command = ["sacct", "-P", "-n", "--duplicates", "-j", jobs, "-o", ",".join(_FIELDS)]
            starts = parse_sacct(
                ask(command, ANSWER_WITHIN_S, SLURM_TIME_FORMAT="%s", TZ="UTC"), records
            )
        except (CommandError, ValueError) as error:
            return {}, str(error)
        newest = records[-1]
        lags = newest.ended_at is not None and any(
            s.state in ALIVE for s in starts.get(newest.job_id, [])[-1:]
        )
        if not lags or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    if lags:
        del starts[newest.job_id]
    return starts, "" if len(starts) == len(records) else "sacct does not know the job"


def parse_sacct(answer: str, records: list[JobRecord]) -> dict[str, list[Start]]:
    """Starts by job id. Raises ValueError if a line is not sacct's. Left out are rows of another
    job that had the same id (its name differs), and a job that a training shares with other work,
    as under `allocation` (likewise).
    """
    by_job = {(record.job_id, record.name): record for record in records}
    starts = defaultdict[str, list[Start]](list)
    rows = list[list[dict[str, str]]]()
    for line in answer.splitlines():
        cells = line.split("|", len(_FIELDS) - 1)
        if len(cells) != len(_FIELDS) or not re.match(r"\d+", cells[0]):
            raise ValueError(f"sacct answered {line.strip()[:80]!r}")
        if "." not in cells[0] or not rows:  # steps follow the start they belong to
            rows.append([])
        rows[-1].append(dict(zip(_FIELDS, cells)))
    for row, *steps in rows:
        record = by_job.get((row["JobID"], row["JobName"]))
        if record is None:
            continue
        times = (row[name] for name in ("Submit", "Start", "End"))
        # Unknown, None
        submitted, started, ended = (float(text) if text.isdigit() else None for text in times)
        nodes = int(_number(row["NNodes"]))
        gpus = re.search(r"gres/gpu=(\d+)", row["AllocTRES"])
        if not row["AllocTRES"]:  # ended in the queue: SLURM reports a start it never had
            started = None
        memory = [_number(step["MaxRSS"]) for step in steps if step["MaxRSS"]]
        until = ended if started is None else started
        start = Start(
            job_id=record.job_id,
            partition=row["Partition"],
            state=row["State"].split()[0],  # "CANCELLED by 1000"
            submitted_at=submitted,
            started_at=started,
            ended_at=ended,
            queue_wait_s=None
            if submitted is None or until is None
            else max(0.0, until - submitted),
            elapsed_s=_number(row["ElapsedRaw"]),
            nodes=nodes,
            processes=nodes * record.nproc_per_node,
            # a site may not account for GPUs
            gpus=int(gpus[1]) if gpus else nodes * record.gpus_per_node,
            cpus=int(_number(row["AllocCPUS"])),
            # 0 if it was not gathered
            cpu_s=parse_duration(row["TotalCPU"]) if ended is not None and memory else None,
            max_memory_gb=max(memory) / 1e9 if memory else None,
            source="sacct",
        )
        starts[record.job_id].append(start)
    return dict(starts)


def _number(text: str) -> float:
    """A number as SLURM writes it: 90560K is 90560 * 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTP]?)", text)
    if match is None:
        raise ValueError(f"sacct: expected a number, got {text[:40]!r}")
    return float(match[1]) * 1024.0 ** " KMGTP".index(match[2] or " ")


@contextmanager
def local_start(train: Path, machine: Machine) -> Iterator[None]:
    """Record in local.json the start and end of a training on this machine. The caller holds the
    run's lock.
    """
    file = train / "local.json"
    earlier = read_local(train)
    if earlier and earlier[-1]["ended_at"] is None:
        earlier[-1] |= {"ended_at": _last_sign_of_life(earlier[-1], train), "how": "KILLED"}
    processes = machine.node_counts[-1] * machine.nproc_per_node
    entry: dict[str, Any] = {
        "host": os.uname().nodename,
        "started_at": time.time(),
        "ended_at": None,
        "processes": processes,
        "gpus": min(processes, visible_gpus()),
        "cpus": len(os.sched_getaffinity(0)),
        "cpu_s": None,
        "how": None,
    }
    write_if_room(file, [*earlier, entry])
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    how = "FAILED"
    try:
        yield
        how = "COMPLETED"
    except (Stopped, KeyboardInterrupt):
        how = "STOPPED"
        raise
    finally:
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)
        entry |= {"ended_at": time.time(), "cpu_s": cpu_s, "how": how}
        write_if_room(file, [*earlier, entry])


def read_local(train: Path) -> list[dict[str, Any]]:
    """Entries of local.json, oldest first. `how`: COMPLETED, STOPPED, FAILED or KILLED; None while
    it runs.
    """
    try:
        entries = read_json(train / "local.json")
    except DataError:
        return []
    return [entry for entry in entries if isinstance(entry, dict) and "started_at" in entry]


def local_starts(train: Path) -> list[Start]:
    """Starts of the run in `train` on this machine."""
    starts = []
    for entry in read_local(train):
        began = entry["started_at"]
        ended = entry["ended_at"] or _last_sign_of_life(entry, train)
        held = {name: entry[name] for name in ("processes", "gpus", "cpus", "cpu_s")}
        held |= {"job_id": "", "partition": LOCAL, "nodes": 1}
        starts.append(_start(entry["how"] or "RUNNING", began, began, ended, **held))
    return starts


def _last_sign_of_life(entry: dict[str, Any], train: Path) -> float:
    files = (train / "metrics.jsonl", train / "state.json")
    return max([entry["started_at"], *(path.stat().st_mtime for path in files if path.exists())])


def visible_gpus() -> int:
    """Number of NVIDIA GPUs this process may use, without importing torch or asking the driver."""
    devices = sum(
        bool(re.fullmatch(r"nvidia\d+", path.name)) for path in Path("/dev").glob("nvidia*")
    )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return devices
    return min(
        devices, sum(bool(word.strip()) and word.strip() != "-1" for word in visible.split(","))
    )


@contextmanager
def accounted(train: Path, machine: Machine) -> Iterator[None]:
    """Write cost.json when the enclosed training ends, however it ends. The caller holds the run's
    lock.
    """
    try:
        with local_start(train, machine) if machine.launcher == "local" else nullcontext():
            yield
    finally:
        write_cost(train)


def write_cost(train: Path, show: bool = True) -> None:
    """Write cost.json in `train`, and print it in one sentence. Never raises: a failure is a
    warning.
    """
    try:
        # a deleted one stays away
        if train.is_dir() and (value := cost(train, training_seconds(train), time.time())):
            write_json(train / "cost.json", value)
            if show:
                print(sentence(value), flush=True)
    except Exception as error:  # a training of days must not end in a traceback about its cost
        print(f"warning: cost.json is not written: {type(error).__name__}: {error}", flush=True)


def cost(train: Path, training_s: float | None, now: float) -> dict[str, Any] | None:
    """Cost so far of the run in `train`, as in cost.json; None if nothing was ever started.

    Totals are sums over starts. `training_efficiency_frac` = `training_s` (of the steps of the
    curve; None if unknown) / sum of `elapsed_s`. The rest is start-up, validation, checkpoints,
    steps that were lost and repeated, and trainings of an earlier configuration.
    `cpu_efficiency_frac` = CPU time used / (allocated cores x time).
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
    starts = cost["jobs"]
    on_gpus = any(start["gpus"] for start in starts)
    hours, unit = (
        (totals["gpu_hours"], "GPU-hours") if on_gpus else (totals["cpu_core_hours"], "core-hours")
    )
    jobs = len({start["job_id"] for start in starts if start["job_id"]})
    local = sum(not start["job_id"] for start in starts)
    where = [f"{jobs} {'job' if jobs == 1 else 'jobs'}"] if jobs else []
    where += [f"{local} {'start' if local == 1 else 'starts'} on this machine"] if local else []
    amount = (
        "an unknown number of"
        if hours is None
        else f"{hours:.3g}"
        if hours < 100
        else f"{hours:,.0f}"
    )
    parts = [f"{amount} {unit} in {' and '.join(where)}"]
    if jobs and totals["queue_wait_s"] is not None:
        parts.append(f"waited {span(totals['queue_wait_s'])} in the queue")
    if totals["training_efficiency_frac"] is not None:
        parts.append(f"{100 * totals['training_efficiency_frac']:.0f} % of it training")
    return ", ".join(parts)


def _totals(
    starts: list[Start], training_s: float | None, why_not: str
) -> tuple[dict[str, float | None], dict[str, str]]:
    """Totals over starts, and the reason for each that is unknown; `why_not`: why accounting lacks
    a job.
    """
    unknown = dict[str, str]()
    totals = dict[str, float | None]()

    def hours(start: Start, number: float | None) -> float | None:
        return (
            None if number is None or start.elapsed_s is None else number * start.elapsed_s / 3600
        )

    ran = [start for start in starts if start.elapsed_s]
    why_not = why_not or "not in its accounting"
    for name, found, reason in (
        ("gpu_hours", [(start, hours(start, start.gpus)) for start in starts], LOST),
        ("cpu_core_hours", [(start, hours(start, start.cpus)) for start in starts], LOST),
        ("elapsed_s", [(start, start.elapsed_s) for start in starts], LOST),
        ("queue_wait_s", [(start, start.queue_wait_s) for start in starts], LOST),
        ("cpu_efficiency_frac", [(start, start.cpu_s) for start in ran], why_not),
        ("max_memory_gb", [(start, start.max_memory_gb) for start in ran], why_not),
    ):
        known = [value for _, value in found if value is not None]
        if len(known) < len(found):
            lacking = dict.fromkeys(
                start.job_id or "a start on this machine" for start, each in found if each is None
            )
            unknown[name], totals[name] = f"unknown for {', '.join(lacking)}: {reason}", None
        else:
            totals[name] = max(known, default=0.0) if name == "max_memory_gb" else sum(known)
    elapsed = totals["elapsed_s"]
    cores = totals["cpu_core_hours"]
    cpu_s = totals["cpu_efficiency_frac"]
    if training_s is None:
        unknown["training_efficiency_frac"] = "metrics.jsonl has no rates"
    elif not elapsed:
        unknown["training_efficiency_frac"] = unknown.get("elapsed_s", "nothing ran")
    if not cores and cpu_s is not None:
        unknown["cpu_efficiency_frac"] = unknown.get("cpu_core_hours", "nothing ran")
    # two clocks, the curve's and the cluster's: the quotient may exceed 1 by a hair
    trained_frac = min(1.0, training_s / elapsed) if training_s is not None and elapsed else None
    used_frac = cpu_s / 3600 / cores if cpu_s is not None and cores else None
    own = {
        "training_s": training_s,
        "training_efficiency_frac": trained_frac,
        "cpu_efficiency_frac": used_frac,
    }
    return totals | own, unknown
