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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
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
    """One start of a job, or a wait in the queue that never became one.

    Times are seconds since 1970; None: unknown.
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

    @property
    def has_run(self) -> bool:
        """False for a wait in the queue that never became a start."""
        return self.started_at is not None or self.elapsed_s is None


def _start(state: str, queued_at: float, started_at: float, ended_at: float, **held: Any) -> Start:
    """A start by the run's own files; `held` has the other fields."""
    return Start(
        state=state,
        submitted_at=queued_at,
        started_at=started_at,
        ended_at=ended_at,
        queue_wait_s=max(0.0, started_at - queued_at),
        elapsed_s=ended_at - started_at,
        **held,
    )


def attempt_starts(record: JobRecord, now: float) -> list[Start]:
    """Starts of a job by its attempt files; only its wait in the queue if there is none."""
    try:
        attempts = record.attempts()
    except DataError:  # truncated by a full disk
        attempts = []
    if not attempts:
        return [_start_without_attempt(record, now)]
    starts = []
    queued_at = record.submitted_at
    for attempt in attempts:
        ended_at = attempt["ended_at"]
        state = record.state
        if attempt is not attempts[-1]:
            state = "REQUEUED"
        elif record.ended_at is None and ended_at is None:
            state = "RUNNING"
        if ended_at is None:
            ended_at = attempt["seen_at"]
        nodes = len(attempt["hosts"])
        start = _start(
            state,
            queued_at,
            float(attempt["started_at"]),
            float(ended_at),
            job_id=record.job_id,
            partition=record.slurm_partition,
            nodes=nodes,
            processes=attempt["processes"],
            gpus=attempt["gpus"],
            cpus=nodes * record.cpus_per_node,
        )
        starts.append(start)
        queued_at = float(ended_at)  # a requeued job waits again from its end
    return starts


def _start_without_attempt(record: JobRecord, now: float) -> Start:
    """A job's wait in the queue; how long it ran is unknown if it did."""
    nodes = int(record.nodes.partition("-")[0])
    has_run = record.state in RAN
    return Start(
        job_id=record.job_id,
        partition=record.slurm_partition,
        state=record.state,
        submitted_at=record.submitted_at,
        started_at=None,
        ended_at=record.ended_at,
        queue_wait_s=None if has_run else (record.ended_at or now) - record.submitted_at,
        elapsed_s=None if has_run else 0.0,
        nodes=nodes,
        processes=nodes * record.nproc_per_node,
        gpus=nodes * record.gpus_per_node,
        cpus=nodes * record.cpus_per_node,
    )


# the name is last: it may hold a |
_FIELDS = (
    "JobID Partition State Submit Start End ElapsedRaw NNodes AllocCPUS AllocTRES TotalCPU MaxRSS "
    "JobName"
).split()


def sacct_starts(records: list[JobRecord]) -> tuple[dict[str, list[Start]], str]:
    """Starts by job id that sacct knows, waiting `LAG_S` for the last, and why others are missing."""
    if not records:
        return {}, "only SLURM's accounting has it"
    if shutil.which("sacct") is None:
        return {}, "sacct is not on PATH"
    jobs = ",".join(record.job_id for record in records)
    where = ["-L"] * any(record.cluster for record in records)  # in all clusters
    command = ["sacct", *where, "-P", "-n", "--duplicates", "-j", jobs, "-o", ",".join(_FIELDS)]
    newest = records[-1]
    deadline = time.monotonic() + LAG_S
    while True:
        try:
            answer = ask(command, ANSWER_WITHIN_S, SLURM_TIME_FORMAT="%s", TZ="UTC")
            starts = parse_sacct(answer, records)
        except (CommandError, ValueError) as error:
            return {}, str(error)
        last = starts.get(newest.job_id, [])[-1:]
        is_late = newest.ended_at is not None and any(start.state in ALIVE for start in last)
        if not is_late or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    if is_late:
        del starts[newest.job_id]
    return starts, "" if len(starts) == len(records) else "sacct does not know the job"


def parse_sacct(answer: str, records: list[JobRecord]) -> dict[str, list[Start]]:
    """Starts by job id. Raise ValueError if a line is not sacct's.

    Left out are rows of another job that had the same id (its name differs), and a job that a
    training shares with other work, as under `allocation` (likewise).
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
        if record is not None:
            starts[record.job_id].append(_sacct_start(row, steps, record))
    return dict(starts)


def _sacct_start(row: dict[str, str], steps: list[dict[str, str]], record: JobRecord) -> Start:
    """One start of a job by its row and those of its steps."""
    submitted = _seconds(row["Submit"])
    ended = _seconds(row["End"])
    # a job that ended in the queue has no resources: SLURM reports a start it never had
    started = _seconds(row["Start"]) if row["AllocTRES"] else None
    nodes = int(_number(row["NNodes"]))
    gpus = nodes * record.gpus_per_node  # a site may not account for GPUs
    counted = re.search(r"gres/gpu=(\d+)", row["AllocTRES"])
    if counted:
        gpus = int(counted[1])
    memory = [_number(step["MaxRSS"]) for step in steps if step["MaxRSS"]]
    waited_until = ended if started is None else started
    queue_wait_s = None
    if submitted is not None and waited_until is not None:
        queue_wait_s = max(0.0, waited_until - submitted)
    return Start(
        job_id=record.job_id,
        partition=row["Partition"],
        state=row["State"].split()[0],  # "CANCELLED by 1000"
        submitted_at=submitted,
        started_at=started,
        ended_at=ended,
        queue_wait_s=queue_wait_s,
        elapsed_s=_number(row["ElapsedRaw"]),
        nodes=nodes,
        processes=nodes * record.nproc_per_node,
        gpus=gpus,
        cpus=int(_number(row["AllocCPUS"])),
        # 0 if it was not gathered
        cpu_s=parse_duration(row["TotalCPU"]) if ended is not None and memory else None,
        max_memory_gb=max(memory) / 1e9 if memory else None,
        source="sacct",
    )


def _seconds(text: str) -> float | None:
    """A time in seconds since 1970; None for Unknown and None."""
    return float(text) if text.isdigit() else None


def _number(text: str) -> float:
    """A number as SLURM writes it: 90560K is 90560 * 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTP]?)", text)
    if match is None:
        raise ValueError(f"sacct: expected a number, got {text[:40]!r}")
    return float(match[1]) * 1024.0 ** " KMGTP".index(match[2] or " ")


@contextmanager
def local_start(train: Path, machine: Machine) -> Iterator[None]:
    """Record in local.json the start and end of a training on this machine.

    The caller holds the run's lock.
    """
    file = train / "local.json"
    earlier = read_local(train)
    if earlier and earlier[-1]["ended_at"] is None:
        earlier[-1] |= {"ended_at": _last_sign_of_life(earlier[-1], train), "how": "KILLED"}
    processes = machine.node_counts[-1] * machine.nproc_per_node
    cores = len(os.sched_getaffinity(0))
    entry: dict[str, Any] = {
        "host": os.uname().nodename,
        "started_at": time.time(),
        "ended_at": None,
        "processes": processes,
        "gpus": 0 if machine.wanted_device == "cpu" else min(processes, visible_gpus()),
        "cpus": min(cores, machine.node_counts[-1] * machine.cpus_per_task or cores),
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
    """Entries of local.json, oldest first.

    `how`: COMPLETED, STOPPED, FAILED or KILLED; None while it runs.
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
        began_at = entry["started_at"]
        ended_at = entry["ended_at"] or _last_sign_of_life(entry, train)
        held = {name: entry[name] for name in ("processes", "gpus", "cpus", "cpu_s")}
        held |= {"job_id": "", "partition": LOCAL, "nodes": 1}
        starts.append(_start(entry["how"] or "RUNNING", began_at, began_at, ended_at, **held))
    return starts


def _last_sign_of_life(entry: dict[str, Any], train: Path) -> float:
    files = (train / "metrics.jsonl", train / "state.json")
    return max([entry["started_at"], *(path.stat().st_mtime for path in files if path.exists())])


def visible_gpus() -> int:
    """Number of NVIDIA GPUs this process may use, without importing torch or asking the driver."""
    devices = len([*Path("/dev").glob("nvidia[0-9]*")])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return devices
    listed = [word for word in visible.split(",") if word.strip() not in ("", "-1")]
    return min(devices, len(listed))


@contextmanager
def accounted(train: Path, machine: Machine) -> Iterator[None]:
    """Write cost.json when the enclosed training ends, however it ends.

    The caller holds the run's lock.
    """
    try:
        with local_start(train, machine) if machine.launcher == "local" else nullcontext():
            yield
    finally:
        write_cost(train)


def write_cost(train: Path, show: bool = True) -> None:
    """Write cost.json in `train`, and print it in one sentence.

    Never raises: a failure is a warning.
    """
    try:
        # a deleted run is not made again
        value = cost(train, training_seconds(train), time.time()) if train.is_dir() else None
        if value is not None:
            write_json(train / "cost.json", value)
        line = sentence(value) if show and value is not None else ""
    except Exception as error:  # a training of days must not end in a traceback about its cost
        line = f"warning: cost.json is not written: {type(error).__name__}: {error}"
    with suppress(OSError):  # nobody may read it any more
        print(line, end="\n" if line else "", flush=True)


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


def had_gpus(starts: Sequence[Start]) -> bool:
    """True if a start that ran had GPUs or an unknown number of them; if none ran, all starts count."""
    ran = [start for start in starts if start.elapsed_s != 0]
    return any(start.gpus != 0 for start in ran or starts)


def sentence(cost: dict[str, Any]) -> str:
    """One line: 2.31 GPU-hours in 3 jobs, waited 12 min in the queue, 81 % of it training."""
    totals = cost["totals"]
    starts = [Start(**start) for start in cost["jobs"]]
    on_gpus = had_gpus(starts)
    unit = "GPU-hours" if on_gpus else "core-hours"
    hours = totals["gpu_hours" if on_gpus else "cpu_core_hours"]
    amount = "an unknown number of"
    if hours is not None:
        amount = f"{hours:.3g}" if hours < 100 else f"{hours:,.0f}"
    job_ids = [start.job_id for start in starts]
    jobs = len({*job_ids} - {""})
    places = (jobs, "job", ""), (job_ids.count(""), "start", " on this machine")
    where = [f"{n} {noun}{'s' * (n > 1)}{place}" for n, noun, place in places if n]
    parts = [f"{amount} {unit} in {' and '.join(where)}"]
    if jobs and totals["queue_wait_s"] is not None:
        parts.append(f"waited {span(totals['queue_wait_s'])} in the queue")
    if totals["training_efficiency_frac"] is not None:
        parts.append(f"{100 * totals['training_efficiency_frac']:.0f} % of it training")
    return ", ".join(parts)


def _totals(
    starts: list[Start], training_s: float | None, why_not: str
) -> tuple[dict[str, float | None], dict[str, str]]:
    """Totals over starts, and the reason for each that is unknown.

    `why_not` is the reason why accounting lacks a job.
    """
    unknown = dict[str, str]()
    totals = dict[str, float | None]()
    ran = [start for start in starts if start.elapsed_s]
    why_not = why_not or "not in its accounting"
    for name, field, counted, reason in (
        ("gpu_hours", "gpus", starts, LOST),
        ("cpu_core_hours", "cpus", starts, LOST),
        ("elapsed_s", "elapsed_s", starts, LOST),
        ("queue_wait_s", "queue_wait_s", starts, LOST),
        ("cpu_efficiency_frac", "cpu_s", ran, why_not),
        ("max_memory_gb", "max_memory_gb", ran, why_not),
    ):
        lacking = dict[str, None]()
        known = [0.0]
        for start in counted:
            value = getattr(start, field)
            if value is not None and name.endswith("_hours"):
                value = start.elapsed_s and value * start.elapsed_s / 3600
            if value is None:
                lacking[start.job_id or "a start on this machine"] = None
            else:
                known.append(value)
        totals[name] = max(known) if name == "max_memory_gb" else sum(known)
        if lacking:
            unknown[name] = f"unknown for {', '.join(lacking)}: {reason}"
            totals[name] = None
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
    fractions = {
        "training_s": training_s,
        "training_efficiency_frac": trained_frac,
        "cpu_efficiency_frac": used_frac,
    }
    return totals | fractions, unknown
