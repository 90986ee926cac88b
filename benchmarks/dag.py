"""How long Snakemake thinks about 1, 10, 100 and 400 runs, and what a launcher costs while it
waits.

    python benchmarks/dag.py [--runs 1 10 100 400] [--launchers 20]

The first table is `snakemake -n` on a configuration of so many runs of one corpus: parsing, the
graph, and scheduling every job of it, dry. The second starts launchers of a training that a
scripted SLURM says is running: memory of each, CPU time it takes, and how often squeue was asked by
all of them together.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import yaml

from cellmill.cli import main as cellmill

ROOT = Path(__file__).resolve().parents[1]
POLL_S = 5
OPTIONS = {
    "tokens": {"max_tokens": 64},
    "stream": {"lanes": 4, "block_cells": 8, "window_blocks": 4},
    "model": {"family": "encoder", "hidden": 16, "layers": 1, "heads": 2},
    "parallel": {},
    "train": {"steps": 10, "global_batch": 16, "token_budget": 2048},
}


def project(folder: Path, runs: int) -> None:
    """A configuration of `runs` runs that differ in their learning rate."""
    (folder / "config").mkdir(parents=True)
    tree = yaml.safe_load((ROOT / "config" / "config.yaml").read_text())
    corpus = next(iter(tree["corpora"]))
    tree["runs"] = {
        f"run{n:03}": {"corpus": corpus, "train": {"lr": 1e-4 * (n + 1)}} for n in range(runs)
    }
    (folder / "config" / "config.yaml").write_text(yaml.safe_dump(tree))
    shutil.copy(ROOT / "config" / "datasets.tsv", folder / "config")


def dry_run(folder: Path, runs: int, repeats: int) -> str:
    """A row of the table: medians of wall and CPU seconds, and the peak of memory."""
    project(folder, runs)
    command = [
        sys.executable,
        "-m",
        "snakemake",
        "-n",
        "--quiet",
        "rules",
        "--snakefile",
        str(ROOT / "Snakefile"),
    ]
    walls = []
    cpus = []
    for _ in range(repeats):
        began = time.perf_counter()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [*command, "--profile", str(ROOT / "profiles" / "slurm")],
            cwd=folder,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        walls.append(time.perf_counter() - began)
        cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return f"| {runs} | {6 + 5 * runs} | {statistics.median(walls):.1f} | {statistics.median(cpus):.1f} | {peak:.0f} |"


def corpus(folder: Path) -> None:
    """Vocabulary and shards of 120 simulated cells."""
    (folder / "datasets.tsv").write_text("dataset\tpath\nsim\traw.h5ad\n")
    (folder / "config.yaml").write_text(
        yaml.safe_dump(
            {
                "corpora": {"sim": {"table": str(folder / "datasets.tsv")}},
                "preprocess": {"min_genes": 5, "min_cells": 1},
                "train": {"steps": 1},
                "runs": {"sim": {"corpus": "sim"}},
            }
        )
    )
    shared = ["--config", str(folder / "config.yaml"), "--corpus", "sim"]
    raw = str(folder / "raw.h5ad")
    cells = str(folder / "cells.h5ad")
    for words in (
        ["simulate", "--out", raw, "--cells", "120", "--genes", "100"],
        [
            "preprocess",
            *shared,
            "--input",
            raw,
            "--dataset",
            "sim",
            "--out",
            cells,
            "--report",
            f"{folder}/sim.json",
        ],
        ["vocabulary", *shared, "--cells", cells, "--out", f"{folder}/vocabulary.tsv"],
        [
            *("shard", *shared, "--cells", cells, "--vocabulary", f"{folder}/vocabulary.tsv"),
            *("--out", f"{folder}/shards/manifest.json"),
        ],
    ):
        if cellmill(words):
            sys.exit(f"cellmill {words[0]} failed")


def waiting(folder: Path, launchers: int, seconds: float) -> str:
    """A row of the second table."""
    corpus(folder)
    fake = folder / "fake"
    (fake / "bin").mkdir(parents=True)
    for name in ("sbatch", "squeue", "sacct", "scancel", "srun"):
        shutil.copy(ROOT / "tests" / "unit" / "fake_slurm.py", fake / "bin" / name)
        (fake / "bin" / name).chmod(0o755)
    jobs = "".join(f"{n}|RUNNING|None|node1|other\n" for n in range(1, 2 * launchers))
    answers = {
        "squeue": [[0, jobs, ""]],
        "sbatch": [[0, f"Submitted batch job {n}\n", ""] for n in range(1, launchers + 1)],
        "scancel": [[0, "", ""]],
    }
    (fake / "answers.json").write_text(json.dumps(answers))
    environment = os.environ | {
        "PATH": f"{fake / 'bin'}:{os.environ['PATH']}",
        "FAKE_SLURM": str(fake),
        "TMPDIR": str(folder),
    }
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "cellmill.cli", "train", "--options", json.dumps(OPTIONS)),
                *(
                    "--manifest",
                    f"{folder}/shards/manifest.json",
                    "--vocabulary",
                    f"{folder}/vocabulary.tsv",
                ),
                *("--out", f"{folder}/runs/{n}/train", "--launcher", "slurm", f"--poll-s={POLL_S}"),
            ],
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        for n in range(launchers)
    ]
    while sum(
        (folder / "runs" / str(n) / "train" / "jobs" / "001" / "job.json").exists()
        for n in range(launchers)
    ) < (launchers):
        if any(process.poll() is not None for process in processes):
            sys.exit("a launcher ended; run one by hand to see why")
        time.sleep(0.5)
    watched = [psutil.Process(process.pid) for process in processes]
    asked = squeues(fake)
    cpu = [sum(process.cpu_times()[:2]) for process in watched]
    time.sleep(seconds)
    memory = statistics.median(process.memory_info().rss for process in watched) / 1e6
    used = statistics.median(sum(p.cpu_times()[:2]) - before for p, before in zip(watched, cpu))
    row = (
        f"| {launchers} | {memory:.0f} | {100 * used / seconds:.2f} | {60 * (squeues(fake) - asked) / seconds:.0f} "
        f"| {60 / POLL_S * launchers:.0f} |"
    )
    for process in processes:
        process.kill()
        process.wait()
    return row


def squeues(fake: Path) -> int:
    return sum(line.startswith("squeue") for line in (fake / "calls").read_text().splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 10, 100, 400])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--launchers", type=int, default=20)
    parser.add_argument(
        "--seconds", type=float, default=30, help="how long the launchers are watched"
    )
    arguments = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    print(
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, commit {commit.strip()}\n"
    )
    print("| runs | jobs | wall s | CPU s | peak MB |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for runs in arguments.runs:
            print(dry_run(Path(folder) / str(runs), runs, arguments.repeats), flush=True)
    print(
        "\n| launchers | MB each | CPU % each | squeue calls a minute | one each would be |\n|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        print(waiting(Path(folder), arguments.launchers, arguments.seconds))


if __name__ == "__main__":
    main()
