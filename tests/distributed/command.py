"""`cellmill train` as a user runs it: real torchrun, real processes to signal and to kill."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from cellmill.runs.folder import read_lines

WITHIN_S = 580  # of a machine that is busy
ALONE = {"nodes": 1, "nproc_per_node": 1, "max_restarts": 0}


def words(corpus: str | Path, out: Path, options: dict[str, Any], **machine: Any) -> list[str]:
    """`cellmill train` as an argument list; keys of `machine` are its flags."""
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in machine.items()]
    return [
        *(
            sys.executable,
            "-m",
            "cellmill.cli",
            "train",
            "--options",
            json.dumps(options),
            "--out",
            str(out),
        ),
        *(
            "--manifest",
            f"{corpus}/shards/manifest.json",
            "--vocabulary",
            f"{corpus}/vocabulary.tsv",
            *flags,
        ),
    ]


def losses(out: Path) -> dict[int, float]:
    """Loss by step; fails if a step is in the curve twice."""
    lines = [line for line in read_lines(out / "metrics.jsonl") if "loss" in line]
    assert len({line["step"] for line in lines}) == len(lines), "a step is in the curve twice"
    return {line["step"]: line["loss"] for line in lines}


def last_step(out: Path) -> int:
    """Last step of the curve."""
    return max((line["step"] for line in read_lines(out / "metrics.jsonl")), default=0)


def wait_for(
    condition: Callable[[], Any], show: Callable[[], str] = str, within_s: float = 400
) -> Any:
    """Return what `condition` returns once it holds; fail with the text of `show`. Far longer than
    usual.
    """
    give_up = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < give_up, f"not within {within_s} s: {show()}"
        time.sleep(0.05)
    return found


def pids_with(*words: str) -> list[int]:
    """Processes whose command line has all of these words; nodes of a rig share this machine's
    process table.
    """
    commands = [
        (process.pid, " ".join(process.info["cmdline"] or ()))
        for process in psutil.process_iter(["cmdline"])
    ]
    return [pid for pid, command in commands if all(word in command for word in words)]


class Run:
    """A run in the folder `out` on the shards in `corpus`, and its processes."""

    process: subprocess.Popen[str]

    def __init__(self, corpus: str | Path, out: Path) -> None:
        self.corpus = corpus
        self.out = out

    def train(
        self, options: dict[str, Any], *more: str, code: int = 0, **machine: Any
    ) -> tuple[str, str]:
        """What a training that ends with `code` prints to stdout and stderr."""
        command = [*words(self.corpus, self.out, options, **ALONE | machine), *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout, done.stderr

    def start(self, options: dict[str, Any], until: int, **machine: int) -> None:
        """Start a training and wait until a step is logged."""
        with open(self.out.with_suffix(".log"), "a") as log:
            command = words(self.corpus, self.out, options, **ALONE | machine)
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                text=True,
                # pytest under nohup ignores it
                preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
            )
        self.wait_for_step(until)

    def wait_for_step(self, step: int) -> None:
        wait_for(
            lambda: last_step(self.out) >= step or self.process.poll() is not None,
            lambda: self.log,
            WITHIN_S,
        )
        assert last_step(self.out) >= step, f"ended before step {step}:\n{self.log}"

    def wait_for_start(self, number: int) -> None:
        """Wait until the processes have started for this time: the curve then has no later step of
        an earlier time.
        """
        began = re.compile(r"^(starting at|going on from) step \d+$", re.M)
        wait_for(lambda: len(began.findall(self.log)) >= number, lambda: self.log, WITHIN_S)

    def end(self, code: int) -> str:
        """The log of the training once it has ended with `code` and left no process."""
        assert self.process.wait(WITHIN_S) == code, self.log
        self.none_left()
        return self.log

    def none_left(self) -> None:
        """Wait until no agent and no worker is alive."""
        wait_for(lambda: not pids_with("cellmill.train.worker", str(self.out)))

    def workers(self) -> list[psutil.Process]:
        agents = pids_with("cellmill.launch.agent", str(self.out))
        pids = pids_with("cellmill.train.worker", str(self.out))
        return [psutil.Process(pid) for pid in pids if pid not in agents]

    def worker(self, rank: int = 0) -> psutil.Process:
        return next(
            process for process in self.workers() if process.environ().get("RANK") == str(rank)
        )

    def read(self, name: str) -> dict[str, Any]:
        """A JSON file of the run."""
        return json.loads((self.out / name).read_text())

    @property
    def log(self) -> str:
        return self.out.with_suffix(".log").read_text()

    @property
    def losses(self) -> dict[int, float]:
        return losses(self.out)

    @property
    def files(self) -> dict[Path, int]:
        """Modification times of the run's files."""
        paths = (path for path in self.out.rglob("*") if path.is_file() and path.name != "lock")
        return {path: path.stat().st_mtime_ns for path in paths}
