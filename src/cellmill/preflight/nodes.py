"""Checks that only the nodes can answer: one short job by the launcher of a training, and the reports it leaves.

Every node reads a file this machine wrote and leaves a report that this machine reads, so the folder is shared both
ways. torchrun starts `preflight/node_probe.py` on the nodes.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from cellmill.config import check_options
from cellmill.config.machine import Machine
from cellmill.errors import UserError
from cellmill.files import read_json, write_json
from cellmill.launch.follow import settle
from cellmill.launch.job import Job
from cellmill.preflight.check import TRAIN, Check, no
from cellmill.preflight.judge import judge_allreduce, judge_end, judge_nodes
from cellmill.preflight.run_once import End, StillQueued, run_once
from cellmill.runs.job_states import GONE
from cellmill.runs.lock import locked

HEAD = "head.json"
"""Rewritten by this machine every second: its token and time."""
ALLREDUCE = "allreduce.json"
JOB_MIN = 10  # time limit of the job; it takes well under a minute once its nodes have connected
SAVE_WITHIN_S = 30
SETTLE_S = 30  # how long a shared folder may take to show what a node wrote


def node_file(node: int) -> str:
    return f"node-{node:03}.json"


class NodeCheck:
    """The job of a preflight. `facts` is for the record: how it ran, and the nodes' reports."""

    def __init__(self, machine: Machine, device: str, folder: Path, wait_s: float) -> None:
        self.machine, self.device, self.folder, self.wait_s = machine, device, folder, wait_s
        self.facts: dict[str, Any] = {}

    def run(self) -> Iterator[Check]:
        """Run the job, then judge. Raises KeyboardInterrupt if a signal ended it."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self.folder.chmod(0o700)
        with Head() as head:
            try:
                end = self._run_once(head)
            except StillQueued as error:
                remedy = f"--wait-min waits longer; {TRAIN} slurm_partition, qos or nodes may be served sooner"
                yield no("job", str(error), remedy)
                return
            except UserError as error:
                yield no("job", str(error))
                return
            except OSError as error:
                yield no("shared folder", f"{error.filename or self.folder}: {error.strerror}", "work in another")
                return
            nodes = head.collect(end)
        allreduce = read_json(end.path / ALLREDUCE) if (end.path / ALLREDUCE).exists() else None
        self.facts = {
            "job": {"id": end.job_id, "state": end.state, "nodes": end.nodes, "queued_s": end.queued_s},
            "nodes": nodes,
            "allreduce": allreduce,
        }
        yield from judge_end(end, [node["host"] for node in nodes], complete=allreduce is not None)
        if nodes:
            yield from judge_nodes(self.machine, self.device, nodes, head.token)
        if allreduce is not None:
            yield from judge_allreduce(self.machine.interface, nodes, allreduce)

    def _run_once(self, head: Head) -> End:
        machine = self.machine
        short = {"runtime": min(JOB_MIN, machine.runtime), "save_within_s": min(SAVE_WITHIN_S, machine.save_within_s)}
        brief: Machine = check_options(Machine, machine.model_dump() | short, "the job")

        def job(path: Path) -> Job:
            head.begin(path)
            module = "cellmill.preflight.node_probe"
            return Job(
                module,
                [str(path.resolve())],
                machine.node_counts[-1],
                machine.nproc_per_node,
                error_file=str(path.resolve() / "error.txt"),
            )

        with locked(self.folder, "another preflight of this profile is running ({holder})", wait_s=0) as lock:
            return run_once(job, brief, self.folder, lock, self.wait_s)


class Head:
    """This machine's side of the shared folder: writes its time every second, and notes when each report appears."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(8)
        self.seen: dict[str, float] = {}
        """When each report was first seen."""
        self._path = Path()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Head:
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def begin(self, path: Path) -> None:
        """Write the first time to `path`, before anything is started there."""
        self._path = path
        self._write()
        if not self._thread.is_alive():
            self._thread.start()

    def collect(self, end: End) -> list[dict[str, Any]]:
        """The nodes' reports, once all are visible or no more can be expected; `seen` is when each was first seen."""
        if end.state in ("COMPLETED", GONE):
            settle((end.path / ALLREDUCE).exists, end.path, SETTLE_S, time.sleep)
        self._look()
        return [read_json(path) | {"seen": self.seen.get(path.name)} for path in sorted(end.path.glob("node-*.json"))]

    def _beat(self) -> None:
        while not self._over.wait(1.0):
            with suppress(OSError):  # a full disk, perhaps: the nodes report it as well
                self._write()
                self._look()

    def _write(self) -> None:
        write_json(self._path / HEAD, {"token": self.token, "time": time.time()})

    def _look(self) -> None:
        for file in self._path.glob("node-*.json"):
            self.seen.setdefault(file.name, time.time())
