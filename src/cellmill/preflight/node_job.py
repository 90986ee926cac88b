"""The job of a preflight, by a training's launcher, and the reports of its nodes.

torchrun starts `preflight/node_probe.py` on the nodes. Every node reads a file that this machine
wrote and leaves a report (`node_probe.report_node`) that this machine reads, so the folder is shared
both ways.
"""

import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from cellmill.config.machine import Machine
from cellmill.errors import UserError
from cellmill.files import read_json, write_json
from cellmill.launch.follow import settle
from cellmill.launch.job import Job
from cellmill.launch.submit import End, StillQueued, run_once
from cellmill.preflight.check import TRAIN, Check, no
from cellmill.preflight.nodes import judge_allreduce, judge_end, judge_nodes
from cellmill.runs.lock import locked
from cellmill.runs.slurm import NOT_LISTED

HEAD = "head.json"  # rewritten by this machine every second: its token and time
ALLREDUCE = "allreduce.json"
REPORTS = "node-*.json"
JOB_MIN = 10  # time limit of the job; it takes well under a minute once its nodes have connected
SAVE_WITHIN_S = 30
SETTLE_S = 30  # most seconds until a shared folder shows a file that a node wrote


class Heartbeat:
    """Thread that writes this machine's time to the job's folder every second.

    It also notes when each report of a node appears, by which clocks are compared.
    """

    def __init__(self) -> None:
        self.token = secrets.token_hex(8)
        self.seen_at: dict[str, float] = {}  # seconds since 1970, by name of the report
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, folder: Path) -> None:
        """Write the time to `folder`, then start the thread."""
        self._write_time(folder)
        thread = threading.Thread(target=self._run, args=(folder,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def note_reports(self, folder: Path) -> None:
        """Note the time of each report that is new."""
        for path in folder.glob(REPORTS):
            self.seen_at.setdefault(path.name, time.time())

    def _write_time(self, folder: Path) -> None:
        write_json(folder / HEAD, {"token": self.token, "time": time.time()})

    def _run(self, folder: Path) -> None:
        while not self._ended.wait(1.0):
            with suppress(OSError):  # a full disk, perhaps: the nodes report it as well
                self._write_time(folder)
                self.note_reports(folder)


def check_job(
    machine: Machine, device: str, folder: Path, wait_s: float, record: dict[str, Any]
) -> Iterator[Check]:
    """Run the job of a preflight under `folder`, then judge its end and the nodes' reports.

    `device` is the device of the plan. The job is cancelled if it waits for more than `wait_s`. The
    end and the reports are added to `record`. Raise KeyboardInterrupt if a signal ended the job.
    """
    heartbeat = Heartbeat()
    try:
        end = _run_job(machine, folder, wait_s, heartbeat)
    except UserError as error:
        remedy = ""
        if isinstance(error, StillQueued):
            remedy = f"--wait-min waits longer; {TRAIN} slurm_partition, qos or nodes may be served sooner"
        yield no("job", str(error), remedy)
        return
    except OSError as error:
        text = f"{error.filename or folder}: {error.strerror}"
        yield no("shared folder", text, "work in another")
        return
    nodes = []
    for path in sorted(end.path.glob(REPORTS)):
        nodes.append(read_json(path) | {"seen": heartbeat.seen_at.get(path.name)})
    allreduce_file = end.path / ALLREDUCE
    allreduce = read_json(allreduce_file) if allreduce_file.exists() else None
    record["job"] = {
        "id": end.job_id,
        "state": end.state,
        "nodes": end.nodes,
        "queued_s": end.queued_s,
    }
    record["nodes"] = nodes
    record["allreduce"] = allreduce
    yield judge_end(end, [node["host"] for node in nodes], complete=allreduce is not None)
    if nodes:
        yield from judge_nodes(machine, device, nodes, heartbeat.token)
    if allreduce is not None:
        yield from judge_allreduce(machine.interface, nodes, allreduce)


def _run_job(machine: Machine, folder: Path, wait_s: float, heartbeat: Heartbeat) -> End:
    """Run the job to its end, with a heartbeat in its folder."""
    limits = {
        "runtime": min(JOB_MIN, machine.runtime),
        "save_within_s": min(SAVE_WITHIN_S, machine.save_within_s),
    }
    short = machine.model_copy(update=limits)

    def make_job(job_folder: Path) -> Job:
        heartbeat.start(job_folder)  # before any process is started there
        path = job_folder.resolve()
        return Job(
            "cellmill.preflight.node_probe",
            arguments=[str(path)],
            nodes=machine.node_counts[-1],
            nproc_per_node=machine.nproc_per_node,
            error_file=str(path / "error.txt"),
        )

    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        message = "another preflight of this profile is running ({holder})"
        with locked(folder, message, wait_s=0) as lock:
            end = run_once(make_job, short, folder, lock, wait_s)
        if end.state in ("COMPLETED", NOT_LISTED):
            settle((end.path / ALLREDUCE).exists, end.path, SETTLE_S, time.sleep)
        heartbeat.note_reports(end.path)
        return end
    finally:
        heartbeat.stop()
