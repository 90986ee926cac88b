"""`cellmill train` as a user runs it: real torchrun, real processes to signal and to kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from cellmill.runs.progress import read_lines

WITHIN_S = 580  # of a machine that is busy


class Run:
    """A run in the folder `out` on the shards in `corpus`, and its processes."""

    process: subprocess.Popen[str]

    def __init__(self, corpus: str | Path, out: Path) -> None:
        self.corpus, self.out = corpus, out

    def command(self, options: dict[str, Any], *more: str, nodes: int = 1, nproc: int = 1, restarts: int = 0) -> Any:
        return [
            *(sys.executable, "-m", "cellmill.cli", "train", "--options", json.dumps(options), "--out", str(self.out)),
            *("--manifest", f"{self.corpus}/shards/manifest.json", "--vocabulary", f"{self.corpus}/vocabulary.tsv"),
            *("--nodes", str(nodes), "--nproc-per-node", str(nproc), "--max-restarts", str(restarts), *more),
        ]

    def train(self, options: dict[str, Any], *more: str, code: int = 0, **machine: Any) -> tuple[str, str]:
        """What a training that ends with `code` prints to stdout and stderr; variables may be given as `env`."""
        given = {name: machine.pop(name) for name in ("env", "preexec_fn") if name in machine}
        words = self.command(options, *more, **machine)
        done = subprocess.run(words, capture_output=True, text=True, timeout=WITHIN_S, **given)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout, done.stderr

    def start(self, options: dict[str, Any], until: int, **machine: int) -> None:
        """Start a training and wait until a step is logged."""
        with open(self.out.with_suffix(".log"), "a") as log:
            self.process = subprocess.Popen(self.command(options, **machine), stdout=log, stderr=log, text=True)
        self.wait_for_step(until)

    def wait_for_step(self, step: int) -> None:
        give_up = time.monotonic() + WITHIN_S
        while not any(line["step"] >= step for line in read_lines(self.out / "metrics.jsonl")):
            assert self.process.poll() is None, f"ended with {self.process.returncode} before step {step}:\n{self.log}"
            assert time.monotonic() < give_up, f"no step {step} within {WITHIN_S} s"
            time.sleep(0.02)

    def end(self, code: int) -> str:
        """The log of the training once it has ended with `code` and left no process."""
        assert self.process.wait(WITHIN_S) == code, self.log
        self.none_left()
        return self.log

    def none_left(self, within_s: float = 300) -> None:
        """Wait until no agent and no worker is alive."""
        give_up = time.monotonic() + within_s
        while left := self._processes():
            assert time.monotonic() < give_up, f"{left} live on"
            time.sleep(0.1)

    def worker(self, rank: int = 0) -> psutil.Process:
        return next(process for process in self.workers() if process.environ().get("RANK") == str(rank))

    def workers(self) -> list[psutil.Process]:
        return self._processes(without="cellmill.launch.agent")

    def kill_worker(self, but: int = 0) -> int:
        """Kill a worker other than `but` as soon as there is one; return its pid."""
        give_up = time.monotonic() + WITHIN_S
        while not (found := [process.pid for process in self.workers() if process.pid != but]):
            assert time.monotonic() < give_up, f"no worker within {WITHIN_S} s"
            time.sleep(0.05)
        os.kill(found[0], signal.SIGKILL)
        return found[0]

    def _processes(self, without: str = "") -> list[psutil.Process]:
        """Agents and workers."""
        found = []
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
            if "cellmill.train.worker" in words and str(self.out) in words and without not in words:
                found.append(process)
        return found

    def read(self, name: str) -> dict[str, Any]:
        """A JSON file of the run."""
        found: dict[str, Any] = json.loads((self.out / name).read_text())
        return found

    @property
    def log(self) -> str:
        return self.out.with_suffix(".log").read_text()

    @property
    def losses(self) -> dict[int, float]:
        """By step."""
        lines = [line for line in read_lines(self.out / "metrics.jsonl") if "loss" in line]
        assert len({line["step"] for line in lines}) == len(lines), "a step is in the curve twice"
        return {line["step"]: line["loss"] for line in lines}

    @property
    def files(self) -> dict[Path, int]:
        """Modification times of the run's files."""
        paths = (path for path in self.out.rglob("*") if path.is_file() and path.name != "lock")
        return {path: path.stat().st_mtime_ns for path in paths}
