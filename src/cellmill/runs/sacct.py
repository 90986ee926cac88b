"""Starts of a run's jobs, from SLURM's accounting (sacct)."""

import re
import shutil
import time

from cellmill.runs.job_states import ALIVE
from cellmill.runs.jobs import JobRecord
from cellmill.runs.slurm_command import CommandError, ask, seconds
from cellmill.runs.starts import Start

ANSWER_WITHIN_S = 15
LAG_S = 4.0  # how late accounting may learn of a job's end
_FIELDS = (
    *("JobID", "Partition", "State", "Submit", "Start", "End", "ElapsedRaw", "NNodes", "AllocCPUS", "AllocTRES"),
    *("TotalCPU", "MaxRSS", "JobName"),  # the name last: it may hold a |
)


def sacct_starts(records: list[JobRecord]) -> tuple[dict[str, list[Start]], str]:
    """Starts by job id of the jobs that sacct knows, and why others are missing.

    Waits up to `LAG_S` for the end of the newest job to arrive.
    """
    if not records:
        return {}, "only SLURM's accounting has it"
    if shutil.which("sacct") is None:
        return {}, "sacct is not on PATH"
    deadline = time.monotonic() + LAG_S
    while True:
        try:
            starts = parse_sacct(_query([record.job_id for record in records]), records)
        except (CommandError, ValueError) as error:
            return {}, str(error)
        newest = records[-1]
        lags = newest.ended_at is not None and any(s.state in ALIVE for s in starts.get(newest.job_id, [])[-1:])
        if not lags or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    if lags:
        del starts[newest.job_id]
    return starts, "" if len(starts) == len(records) else "sacct does not know the job"


def _query(job_ids: list[str]) -> str:
    """Output of sacct. Raises CommandError."""
    command = ["sacct", "-P", "-n", "--duplicates", "-j", ",".join(job_ids), "-o", ",".join(_FIELDS)]
    return ask(command, ANSWER_WITHIN_S, SLURM_TIME_FORMAT="%s", TZ="UTC")


def parse_sacct(answer: str, records: list[JobRecord]) -> dict[str, list[Start]]:
    """Starts by job id. Raises ValueError if a line is not sacct's.

    Left out are rows of another job that had the same id (its name differs), and a job that a training shares with
    other work, as under `allocation` (likewise).
    """
    rows: dict[str, list[tuple[dict[str, str], list[dict[str, str]]]]] = {}
    for line in answer.splitlines():
        cells = line.split("|", len(_FIELDS) - 1)
        if len(cells) != len(_FIELDS) or not re.match(r"\d+", cells[0]):
            raise ValueError(f"sacct answered {line.strip()[:80]!r}")
        row = dict(zip(_FIELDS, cells))
        job_id, _, step = row["JobID"].partition(".")
        if not step:
            rows.setdefault(job_id, []).append((row, []))
        elif job_id in rows:  # steps follow the start they belong to
            rows[job_id][-1][1].append(row)
    starts: dict[str, list[Start]] = {}
    for record in records:
        own = [(row, steps) for row, steps in rows.get(record.job_id, []) if row["JobName"] == record.name]
        if own:
            starts[record.job_id] = [_start(row, steps, record) for row, steps in own]
    return starts


def _start(row: dict[str, str], steps: list[dict[str, str]], record: JobRecord) -> Start:
    submitted, started, ended = (_time(row[name]) for name in ("Submit", "Start", "End"))
    nodes = int(_number(row["NNodes"]))
    if not row["AllocTRES"]:  # ended in the queue: SLURM reports a start it never had
        started = None
    gpus = re.search(r"gres/gpu=(\d+)", row["AllocTRES"])
    memory = [_number(step["MaxRSS"]) for step in steps if step["MaxRSS"]]
    until = ended if started is None else started
    return Start(
        job_id=record.job_id,
        partition=row["Partition"],
        state=row["State"].split()[0],  # "CANCELLED by 1000"
        submitted_at=submitted,
        started_at=started,
        ended_at=ended,
        queue_wait_s=None if submitted is None or until is None else max(0.0, until - submitted),
        elapsed_s=_number(row["ElapsedRaw"]),
        nodes=nodes,
        processes=nodes * record.nproc_per_node,
        gpus=int(gpus[1]) if gpus else nodes * record.gpus_per_node,  # a site may not account for GPUs
        cpus=int(_number(row["AllocCPUS"])),
        cpu_s=seconds(row["TotalCPU"]) if ended is not None and memory else None,  # 0 if it was not gathered
        max_memory_gb=max(memory) / 1e9 if memory else None,
        source="sacct",
    )


def _time(text: str) -> float | None:
    return float(text) if text.isdigit() else None  # Unknown, None


def _number(text: str) -> float:
    """A number as SLURM writes it: 90560K is 90560 * 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTP]?)", text)
    if match is None:
        raise ValueError(f"sacct: expected a number, got {text[:40]!r}")
    return float(match[1]) * 1024.0 ** " KMGTP".index(match[2] or " ")
