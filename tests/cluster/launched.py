"""A training started through SLURM, as the tests handle it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.rig import Rig
from tests.distributed.command import last_step, losses, wait_for, words
from tests.distributed.conftest import options

HYBRID = {"strategy": "fsdp", "sharding_strategy": "HYBRID_SHARD"}


def run_options(steps: int, **train: Any) -> dict[str, Any]:
    """A small run."""
    length = {
        "steps": steps,
        "checkpoint_every_steps": 10,
        "val_every_steps": 10_000,
        "global_batch": 64,
    }
    return options(HYBRID, model={"hidden": 48, "layers": 3}, train=length | train)


def on_slurm(**changes: Any) -> dict[str, Any]:
    """Two nodes of two processes on the partition gpu-a100; `changes` override."""
    machine = {
        "launcher": "slurm",
        "nodes": 2,
        "nproc_per_node": 2,
        "slurm_partition": "gpu-a100",
        "gpus_per_node": "a100:2",
        "device": "cpu",
        "mem_mb": 3000,
        "cpus_per_task": 4,
        "runtime": 5,
        "save_within_s": 30,
        "poll_s": 0.5,
    }
    return machine | changes


@dataclass
class Launched:
    """A launcher process, its run folder and its output."""

    process: subprocess.Popen[bytes]
    train: Path
    log: Path

    @classmethod
    def start(
        cls,
        corpus: str,
        train: Path,
        opts: dict[str, Any],
        environment: dict[str, str],
        log: Path | None = None,
        rest_s: float = 0.1,
        **machine: Any,
    ) -> Launched:
        """Start it in a process group of its own, as a terminal does. Its workers rest `rest_s`
        after each step. Appends to its log.
        """
        paths = [
            str(Path(__file__).parent / "paced"),
            *filter(None, [os.environ.get("PYTHONPATH")]),
        ]
        paced = {"PYTHONPATH": os.pathsep.join(paths), "REST_S": str(rest_s)}
        train.parent.mkdir(parents=True, exist_ok=True)
        log = log or train.parent / "printed.log"
        with open(log, "ab") as file:
            process = subprocess.Popen(
                words(corpus, train, opts, **machine),
                stdout=file,
                stderr=file,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | paced | environment,
                start_new_session=True,
                # nohup ignores it, and so would this
                preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
            )
        return cls(process, train, log)

    @property
    def printed(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def last_line(self) -> str:
        """Its last line of output."""
        return self.printed.rstrip().rsplit("\n", 1)[-1]

    def end(self, within_s: float = 500) -> int:
        """Wait for its end; return the exit code."""
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise AssertionError(f"did not end within {within_s} s:\n{self.printed}") from None

    def wait_for_step(self, step: int) -> None:
        """Wait until the curve has this step."""
        wait_for(lambda: self.step() >= step, lambda: self.printed)

    def wait_for_print(self, text: str) -> None:
        """Wait until `text` was printed."""
        wait_for(lambda: text in self.printed, lambda: self.printed)

    def step(self) -> int:
        """Last step of the curve."""
        return last_step(self.train)

    def losses(self) -> dict[int, float]:
        """Loss by step; fails if a step is in the curve twice."""
        return losses(self.train)

    def job_ids(self) -> list[str]:
        """Ids of its submitted jobs, oldest first."""
        return re.findall(r"submitted job (\d+)", self.printed)

    def records(self) -> list[dict[str, Any]]:
        """Contents of its job.json files, oldest first."""
        return [json.loads(path.read_text()) for path in sorted(self.train.glob("jobs/*/job.json"))]


def wrapper(folder: Path, name: str, script: str) -> dict[str, str]:
    """A shell script in place of a SLURM command (`$REAL`), first on the returned PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/bash\nREAL={shutil.which(name)}\n{script}\n")
    path.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def cellmill(rig: Rig, *words: str, cwd: Path | None = None, code: int | None = None) -> str:
    """What a command of cellmill prints; it must end with the exit code, if given."""
    done = subprocess.run(
        [sys.executable, "-m", "cellmill.cli", *words],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | rig.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
    )
    assert code in (None, done.returncode), done.stdout
    return done.stdout
