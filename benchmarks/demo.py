"""Seconds of each stage of the demo, the first and the second time after an installation, and the
share of imports.

    python benchmarks/demo.py [--repeats 3]

Each turn makes the demo twice, in a new folder each (`--directory`): first with an empty cache of
numba's machine code, then with the cache that the first one left. CPU-seconds are of all processes
of a stage. Imports are the CPU-seconds of a Python that imports the stage's module as `cellmill`
does, and ends; of a training those of its launcher, agent and rank. The last row is Snakemake
itself.
"""

import argparse
import json
import os
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from origin import commit, machine

from cellmill.cli import MODULE_OF

ROOT = Path(__file__).resolve().parents[1]
BEGUN = {"train": ["cellmill.launch.agent", "cellmill.train.worker"]}
"""Modules of the processes that a stage starts."""
IMPORT = "from cellmill.imports import importing\nwith importing():\n    import {}"
MEASURED = """#!{python} -S
import json, os, resource, subprocess, sys, time
began = time.monotonic()
code = subprocess.call([{python!r}, "-m", "cellmill.cli", *sys.argv[1:]])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
line = [sys.argv[1], time.monotonic() - began, used.ru_utime + used.ru_stime]
with open({log!r}, "a") as file:
    file.write(json.dumps(line) + "\\n")
sys.exit(code)
"""
Seconds = tuple[float, float]  # wall and CPU


def timed(command: list[str], environment: dict[str, str], **more: str | Path) -> Seconds:
    """Run a command. Exits with its output if it fails."""
    began = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, **more)  # type: ignore[call-overload]
    if done.returncode:
        sys.exit(f"{shlex.join(command)} failed: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (
        time.monotonic() - began,
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    )


def demo(folder: Path, cache: Path, more: list[str]) -> dict[str, Seconds]:
    """Make the demo in `folder`; seconds by stage, in the order in which they ended, and of the
    whole.
    """
    shutil.copytree(ROOT / "config", folder / "config")
    (folder / "bin").mkdir()
    log = folder / "stages.jsonl"
    program = folder / "bin" / "cellmill"
    program.write_text(MEASURED.format(python=sys.executable, log=str(log)))
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "NUMBA_CACHE_DIR": str(cache)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # as a user has it
    command = [
        sys.executable,
        "-m",
        "snakemake",
        "--snakefile",
        str(ROOT / "Snakefile"),
        "--directory",
        str(folder),
    ]
    whole = timed([*command, "--profile", str(ROOT / "profiles" / "local"), *more], environment)
    stages = {
        name: (wall, cpu) for name, wall, cpu in map(json.loads, log.read_text().splitlines())
    }
    own = tuple(total - sum(parts) for total, parts in zip(whole, zip(*stages.values())))
    return stages | {"Snakemake": (own[0], own[1]), "all": whole}


def imports_of(stage: str) -> float:
    """CPU-seconds of the imports of a stage's processes."""
    environment = {**os.environ, "CELLMILL_ERROR_FILE": ""}
    names = [f"cellmill.cli, cellmill.{MODULE_OF[stage]}", *BEGUN.get(stage, [])]
    return sum(timed([sys.executable, "-c", IMPORT.format(name)], environment)[1] for name in names)


def shown(values: list[float]) -> str:
    return f"{statistics.median(values):z.1f} ({min(values):z.1f} to {max(values):z.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--until", default="", help="last stage, such as shard (default: all)")
    given = parser.parse_args()
    more = ["--until", given.until] if given.until else []
    first = []
    second = []
    imports = []
    for _ in range(given.repeats):
        with tempfile.TemporaryDirectory(prefix="demo-") as name:
            cache = Path(name) / "cache"
            first.append(demo(Path(name) / "first", cache, more))
            second.append(demo(Path(name) / "second", cache, more))
        imports.append({stage: imports_of(stage) for stage in second[-1] if stage in MODULE_OF})
    load = "/".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{machine()}, load {load}, commit {commit()}: python {shlex.join(sys.argv)}\n")
    print("| stage | first, wall s | second, wall s | second, CPU-s | imports, CPU-s | the rest |")
    print("|---|---:|---:|---:|---:|---:|")
    for stage in second[0]:
        walls = " | ".join(shown([turn[stage][0] for turn in turns]) for turns in (first, second))
        cpu = [turn[stage][1] for turn in second]
        own = [turn.get(stage, 0.0) for turn in imports]
        rest = [total - part for total, part in zip(cpu, own)]
        parts = f"{shown(own)} | {shown(rest)}" if stage in MODULE_OF else " | "
        print(f"| {stage} | {walls} | {shown(cpu)} | {parts} |")


if __name__ == "__main__":
    main()
